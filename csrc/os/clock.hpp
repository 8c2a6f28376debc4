// Two clocks: steady for durations and deadlines, wall for what Python compares to time.time().
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

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

// Converts at most thirty years, since longer times overflow.
inline int64_t to_ns(double seconds) {
    constexpr double kForever = 1e9;
    return static_cast<int64_t>(std::clamp(seconds, -kForever, kForever) * 1e9);
}

inline double to_seconds(int64_t ns) {
    return static_cast<double>(ns) * 1e-9;
}

// Waits at most `ns`. The thread sanitizer of gcc 12 does not support the steady wait: under it, a
// step back of the wall clock prolongs the wait.
inline void wait_ns(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                    int64_t ns) {
    const std::chrono::nanoseconds most(ns);
#ifdef __SANITIZE_THREAD__
    changed.wait_until(lock, std::chrono::system_clock::now() + most);
#else
    changed.wait_for(lock, most);
#endif
}

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1'000'000'000;

}  // namespace pipemorph
