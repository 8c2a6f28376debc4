#include "crypto/crc32c.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace pipemorph {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

struct ByteTables {
    uint32_t at[8][256];

    constexpr ByteTables() : at{} {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t r = i;
            for (int bit = 0; bit < 8; ++bit) r = (r >> 1) ^ (r & 1 ? kPolynomial : 0);
            at[0][i] = r;
        }
        for (uint32_t i = 0; i < 256; ++i)
            for (int k = 1; k < 8; ++k) at[k][i] = (at[k - 1][i] >> 8) ^ at[0][at[k - 1][i] & 0xff];
    }
};

constexpr ByteTables kBytes;

// The raw register update, without the inversions at either end.
uint32_t advance_software(uint32_t r, const uint8_t* p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
        word ^= r;
        r = 0;
        for (int k = 0; k < 8; ++k) r ^= kBytes.at[7 - k][(word >> (8 * k)) & 0xff];
    }
    for (; n > 0; ++p, --n) r = (r >> 8) ^ kBytes.at[0][(r ^ *p) & 0xff];
    return r;
}

#if defined(__x86_64__)

// The instruction has a latency of three cycles and a throughput of one, so three streams run
// side by side. Joining them needs "the register after kStride zero bytes", which is linear:
// a table per byte of the register holds it.
constexpr size_t kStride = 2048;

struct ZeroTables {
    uint32_t at[4][256];

    ZeroTables() {
        const uint8_t zeros[64] = {};
        uint32_t basis[32];
        for (int bit = 0; bit < 32; ++bit) {
            uint32_t r = uint32_t{1} << bit;
            for (size_t done = 0; done < kStride; done += sizeof zeros)
                r = advance_software(r, zeros, sizeof zeros);
            basis[bit] = r;
        }
        for (int byte = 0; byte < 4; ++byte) {
            for (uint32_t value = 0; value < 256; ++value) {
                uint32_t r = 0;
                for (int bit = 0; bit < 8; ++bit)
                    if (value >> bit & 1) r ^= basis[8 * byte + bit];
                at[byte][value] = r;
            }
        }
    }

    uint32_t shift(uint32_t r) const {
        return at[0][r & 0xff] ^ at[1][r >> 8 & 0xff] ^ at[2][r >> 16 & 0xff] ^ at[3][r >> 24];
    }
};

uint64_t load64(const uint8_t* p) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    return word;
}

__attribute__((target("sse4.2"))) uint32_t advance_hardware(uint32_t r, const uint8_t* p,
                                                            size_t n) {
    static const ZeroTables zeros;
    uint64_t a = r;
    while (n >= 3 * kStride) {
        uint64_t b = 0;
        uint64_t c = 0;
        for (const uint8_t* end = p + kStride; p < end; p += 8) {
            a = _mm_crc32_u64(a, load64(p));
            b = _mm_crc32_u64(b, load64(p + kStride));
            c = _mm_crc32_u64(c, load64(p + 2 * kStride));
        }
        a = zeros.shift(static_cast<uint32_t>(a)) ^ b;
        a = zeros.shift(static_cast<uint32_t>(a)) ^ c;
        p += 2 * kStride;
        n -= 3 * kStride;
    }
    for (; n >= 8; p += 8, n -= 8) a = _mm_crc32_u64(a, load64(p));
    r = static_cast<uint32_t>(a);
    for (; n > 0; ++p, --n) r = _mm_crc32_u8(r, *p);
    return r;
}

#endif

}  // namespace

bool crc32c_is_accelerated() {
#if defined(__x86_64__)
    static const bool yes = __builtin_cpu_supports("sse4.2");
    return yes;
#else
    return false;
#endif
}

uint32_t crc32c_software(uint32_t crc, Bytes data) {
    return ~advance_software(~crc, data.data(), data.size());
}

uint32_t crc32c(uint32_t crc, Bytes data) {
#if defined(__x86_64__)
    if (crc32c_is_accelerated()) return ~advance_hardware(~crc, data.data(), data.size());
#endif
    return crc32c_software(crc, data);
}

}  // namespace pipemorph
