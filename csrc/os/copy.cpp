#include "os/copy.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace pipemorph {

void copy_past_caches(uint8_t* to, const uint8_t* from, size_t bytes) {
#if defined(__x86_64__)
    constexpr size_t kLine = 64;
    constexpr size_t kWorthIt = size_t{64} << 10;
    if (bytes >= kWorthIt) {
        const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
        std::memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
            const auto* in = reinterpret_cast<const __m128i*>(from);
            auto* out = reinterpret_cast<__m128i*>(to);
            const __m128i a = _mm_loadu_si128(in);
            const __m128i b = _mm_loadu_si128(in + 1);
            const __m128i c = _mm_loadu_si128(in + 2);
            const __m128i d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
        // These stores are unordered by themselves, even with respect to a mutex's release.
        _mm_sfence();
    }
#endif
    std::memcpy(to, from, bytes);
}

}  // namespace pipemorph
