// How things are said in messages to people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>

namespace pipemorph {

inline std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
}

inline std::string rank_text(uint32_t rank) {
    return "rank " + std::to_string(rank);
}

// Also where there is no memory.
inline void keep_words(std::string& in, std::string_view words) noexcept {
    try {
        in = words;
    } catch (const std::bad_alloc&) {
        in = "out of memory";  // short enough to need none
    }
}

inline std::string before_more(const std::string& text) {
    return text.empty() ? text : text + ", ";
}

}  // namespace pipemorph
