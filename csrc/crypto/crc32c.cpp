#include "crypto/crc32c.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

// Compilation target of functions that use the processor's instruction for a CRC32C. "crc32" is for
// clang, where it is apart from SSE 4.2.
#if defined(__x86_64__)
#define PIPEMORPH_CRC __attribute__((target("sse4.2,crc32")))
#elif defined(__aarch64__) && defined(__clang__)
#define PIPEMORPH_CRC __attribute__((target("crc")))
#elif defined(__aarch64__)
#define PIPEMORPH_CRC __attribute__((target("+crc")))
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

// Raw register update, without the inversions at either end.
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

#if defined(PIPEMORPH_CRC)

#if defined(__x86_64__)
PIPEMORPH_CRC inline uint64_t step(uint64_t r, uint64_t word) {
    return _mm_crc32_u64(r, word);
}
PIPEMORPH_CRC inline uint32_t step(uint32_t r, uint8_t byte) {
    return _mm_crc32_u8(r, byte);
}
bool has_instruction() {
    return __builtin_cpu_supports("sse4.2");
}
#else
PIPEMORPH_CRC inline uint64_t step(uint64_t r, uint64_t word) {
    return __crc32cd(static_cast<uint32_t>(r), word);
}
PIPEMORPH_CRC inline uint32_t step(uint32_t r, uint8_t byte) {
    return __crc32cb(r, byte);
}
// Optional in ARMv8.0, part of every later one.
bool has_instruction() {
    constexpr unsigned long kCrc32 = 1UL << 7;  // HWCAP_CRC32
    return (getauxval(AT_HWCAP) & kCrc32) != 0;
}
#endif

// The instruction has a latency of two or three cycles and a throughput of one, so three streams
// run side by side. Joining them needs "the register after kStride zero bytes", which is linear:
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

PIPEMORPH_CRC uint32_t advance_hardware(uint32_t r, const uint8_t* p, size_t n) {
    static const ZeroTables zeros;
    uint64_t a = r;
    while (n >= 3 * kStride) {
        uint64_t b = 0;
        uint64_t c = 0;
        for (const uint8_t* end = p + kStride; p < end; p += 8) {
            a = step(a, load64(p));
            b = step(b, load64(p + kStride));
            c = step(c, load64(p + 2 * kStride));
        }
        a = zeros.shift(static_cast<uint32_t>(a)) ^ b;
        a = zeros.shift(static_cast<uint32_t>(a)) ^ c;
        p += 2 * kStride;
        n -= 3 * kStride;
    }
    for (; n >= 8; p += 8, n -= 8) a = step(a, load64(p));
    r = static_cast<uint32_t>(a);
    for (; n > 0; ++p, --n) r = step(r, *p);
    return r;
}

#endif

#if defined(__x86_64__)

// Where there are 512-bit carry-less multiplications, 256 bytes are folded at once: a block B
// that lies D bits before another adds B * x^D (mod P) to it, and the last 16 bytes have the same
// remainder as all of them.
//
// A reflected product is one bit short, hence the x^(n-1); 32-bit remainders sit in the upper
// half of the 64-bit operand.
struct Fold {
    uint64_t low;   // for the first half
    uint64_t high;  // for the second half

    explicit Fold(int bits) : low(power(bits + 63)), high(power(bits - 1)) {}

    // x^n mod P
    static uint64_t power(int n) {
        uint32_t r = 0x80000000;
        for (int i = 0; i < n; ++i) r = (r >> 1) ^ (r & 1 ? kPolynomial : 0);
        return uint64_t{r} << 32;
    }
};

#define PIPEMORPH_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2,crc32")))

PIPEMORPH_WIDE inline __m512i constant(const Fold& f) {
    const auto low = static_cast<long long>(f.low);
    const auto high = static_cast<long long>(f.high);
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

PIPEMORPH_WIDE inline __m512i fold(__m512i block, __m512i by, __m512i onto) {
    const __m512i first = _mm512_clmulepi64_epi128(block, by, 0x00);
    const __m512i second = _mm512_clmulepi64_epi128(block, by, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(first, second), onto);
}

PIPEMORPH_WIDE uint32_t advance_wide(uint32_t r, const uint8_t* p, size_t n) {
    static const Fold by_2048(2048), by_512(512), by_128(128);
    if (n >= 512) {
        __m512i a[4];
        for (int i = 0; i < 4; ++i) a[i] = _mm512_loadu_si512(p + 64 * i);
        a[0] =
            _mm512_xor_si512(a[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(r))));
        p += 256;
        n -= 256;
        const __m512i far = constant(by_2048);
        for (; n >= 256; p += 256, n -= 256)
            for (int i = 0; i < 4; ++i) a[i] = fold(a[i], far, _mm512_loadu_si512(p + 64 * i));
        const __m512i near = constant(by_512);
        for (int i = 1; i < 4; ++i) a[i] = fold(a[i - 1], near, a[i]);
        alignas(64) uint64_t lanes[8];
        _mm512_store_si512(lanes, a[3]);
        __m128i last = _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
        const __m128i by =
            _mm_set_epi64x(static_cast<long long>(by_128.high), static_cast<long long>(by_128.low));
        for (int i = 1; i < 4; ++i) {
            const __m128i next = _mm_load_si128(reinterpret_cast<const __m128i*>(lanes + 2 * i));
            last = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(last, by, 0x00),
                                               _mm_clmulepi64_si128(last, by, 0x11)),
                                 next);
        }
        const auto first = static_cast<uint64_t>(_mm_cvtsi128_si64(last));
        const auto second = static_cast<uint64_t>(_mm_extract_epi64(last, 1));
        r = static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
    }
    return advance_hardware(r, p, n);
}

bool has_wide() {
    static const bool yes =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    return yes;
}

#endif

}  // namespace

bool crc32c_is_accelerated() {
#if defined(PIPEMORPH_CRC)
    static const bool yes = has_instruction();
    return yes;
#else
    return false;
#endif
}

uint32_t crc32c_software(uint32_t crc, Bytes data) {
    return ~advance_software(~crc, data.data(), data.size());
}

uint32_t crc32c_narrow(uint32_t crc, Bytes data) {
#if defined(PIPEMORPH_CRC)
    if (crc32c_is_accelerated()) return ~advance_hardware(~crc, data.data(), data.size());
#endif
    return crc32c_software(crc, data);
}

uint32_t crc32c(uint32_t crc, Bytes data) {
#if defined(__x86_64__)
    if (has_wide()) return ~advance_wide(~crc, data.data(), data.size());
#endif
    return crc32c_narrow(crc, data);
}

}  // namespace pipemorph
