// Formats of values in messages to people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>

namespace pipemorph {

inline std::string format_seconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
}

inline std::string format_rank(uint32_t rank) {
    return "rank " + std::to_string(rank);
}

// Assigns a text without throwing, even if memory is exhausted.
inline void keep_words(std::string& in, std::string_view words) noexcept {
    try {
        in = words;
    } catch (const std::bad_alloc&) {
        in = "out of memory";  // short enough to need no allocation
    }
}

inline std::string append_comma(const std::string& text) {
    return text.empty() ? text : text + ", ";
}

}  // namespace pipemorph
