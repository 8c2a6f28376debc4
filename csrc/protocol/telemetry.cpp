#include "protocol/telemetry.hpp"

#include <algorithm>
#include <numeric>

#include "os/clock.hpp"

namespace pipemorph {

std::optional<Echo> echo_of(const PongFrame& pong, int64_t now_wall, int64_t now_steady) {
    constexpr int64_t kLongest = 60 * kSecond;
    constexpr int64_t kNoClock = int64_t{1} << 62;  // so that sums of differences fit
    const auto is_time = [](int64_t ns) { return ns >= 0 && ns < kNoClock; };
    if (pong.ping_steady_ns <= 0 || pong.ping_steady_ns > now_steady ||
        !is_time(pong.ping_wall_ns) || !is_time(pong.received_wall_ns) ||
        !is_time(pong.sent_wall_ns))
        return std::nullopt;
    const int64_t rtt =
        now_steady - pong.ping_steady_ns - (pong.sent_wall_ns - pong.received_wall_ns);
    if (rtt < 0) return std::nullopt;
    const int64_t peer_minus_ours =
        ((pong.received_wall_ns - pong.ping_wall_ns) + (pong.sent_wall_ns - now_wall)) / 2;
    return Echo{std::min(rtt, kLongest), peer_minus_ours};
}

void EchoMeter::add(int64_t rtt_ns, int64_t peer_minus_ours_ns) {
    if (samples_.size() < kMaxSamples) {
        samples_.push_back(rtt_ns);
        sample_next_ = 0;
    } else {
        samples_[sample_next_] = rtt_ns;
        sample_next_ = (sample_next_ + 1) % kMaxSamples;
    }
    const Offset offset{rtt_ns, -peer_minus_ours_ns};
    if (window_.size() < kWindow) {
        window_.push_back(offset);
    } else {
        window_[window_next_] = offset;
        window_next_ = (window_next_ + 1) % kWindow;
    }
}

std::optional<EchoMeter::Summary> EchoMeter::summary() const {
    if (samples_.empty()) return std::nullopt;
    std::vector<int64_t> sorted = samples_;
    std::sort(sorted.begin(), sorted.end());
    const int64_t sum = std::accumulate(sorted.begin(), sorted.end(), int64_t{0});
    const auto n = static_cast<int64_t>(sorted.size());
    // Nearest rank: with few samples this is the largest.
    const auto rank = static_cast<size_t>((99 * n + 99) / 100 - 1);
    return Summary{sorted.front(), sum / n, sorted[rank]};
}

std::optional<int64_t> EchoMeter::clock_offset_ns() const {
    if (window_.empty()) return std::nullopt;
    return std::min_element(window_.begin(), window_.end(),
                            [](const Offset& a, const Offset& b) { return a.rtt_ns < b.rtt_ns; })
        ->offset_ns;
}

}  // namespace pipemorph
