#include "protocol/watchdog.hpp"

#include <algorithm>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

// Longest silence of a healthy peer, which echoes every 100 ms.
constexpr int64_t kMostSilence = 250 * kMillisecond;
constexpr int64_t kRoundTripAge = 2 * kSecond;
constexpr uint32_t kLeastEchoes = 8;
constexpr int64_t kRateSpan = 200 * kMillisecond;
constexpr double kRateKept = 0.9;  // decay of the peak rate with each sample
// Slow-down, and least rate, with which a path still counts as healthy.
constexpr double kSlowDown = 16.0;
constexpr double kSlowest = 1e6;  // bytes per second
constexpr int64_t kRoundTrips = 8;

}  // namespace

void Watchdog::frame_received(int64_t now) {
    if (last_frame_ns_ != 0)
        clock_ns_ += std::clamp<int64_t>(now - last_frame_ns_, 0, kMostSilence);
    last_frame_ns_ = now;
}

void Watchdog::echoed(int64_t rtt, int64_t now) {
    ++echoes_;
    if (now - period_ns_ > kRoundTripAge) {
        rtt_ns_[1] = rtt_ns_[0];
        rtt_ns_[0] = 0;
        period_ns_ = now;
    }
    rtt_ns_[0] = rtt_ns_[0] == 0 ? rtt : std::min(rtt_ns_[0], rtt);
}

int64_t Watchdog::least_round_trip_ns() const {
    if (echoes_ < kLeastEchoes) return 0;
    if (rtt_ns_[0] == 0 || rtt_ns_[1] == 0) return std::max(rtt_ns_[0], rtt_ns_[1]);
    return std::min(rtt_ns_[0], rtt_ns_[1]);
}

void Watchdog::acknowledged(uint64_t bytes) {
    bytes_ += bytes;
    const int64_t took = clock_ns_ - since_ns_;
    if (took < kRateSpan) return;
    rate_ = std::max(static_cast<double>(bytes_) / to_seconds(took), kRateKept * rate_);
    bytes_ = 0;
    since_ns_ = clock_ns_;
}

int64_t Watchdog::patience_ns(uint64_t bytes_under_way) const {
    const double rate = std::max(rate_ / kSlowDown, kSlowest);
    return std::max(floor_ns_, kRoundTrips * least_round_trip_ns()) +
           to_ns(static_cast<double>(bytes_under_way) / rate);
}

}  // namespace pipemorph
