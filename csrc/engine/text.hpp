// How durations and ranks are said in messages to people.
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

}  // namespace pipemorph
