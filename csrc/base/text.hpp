// How things are said in messages to people.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace pipemorph {

inline std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
}

inline std::string rank_text(uint32_t rank) {
    return "rank " + std::to_string(rank);
}

inline std::string before_more(const std::string& text) {
    return text.empty() ? text : text + ", ";
}

}  // namespace pipemorph
