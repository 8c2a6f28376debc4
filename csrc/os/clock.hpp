// Two clocks: steady for durations and deadlines, wall for what Python compares to time.time().
#pragma once

#include <chrono>
#include <cstdint>

namespace pipemorph {

inline int64_t steady_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline int64_t wall_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
}

inline int64_t to_ns(double seconds) {
    return static_cast<int64_t>(seconds * 1e9);
}

inline double to_seconds(int64_t ns) {
    return static_cast<double>(ns) * 1e-9;
}

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;

}  // namespace pipemorph
