#include "protocol/flow.hpp"

#include <algorithm>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr double kGain = 2.0;
constexpr double kDrained = 0.5;
constexpr int64_t kRoundTripAge = 10 * kSecond;
// Factor of the round trip that reveals another wire: the window's own queue only doubles it.
constexpr int64_t kRecent = kSecond;
constexpr int64_t kFarBeyond = 4;
constexpr int64_t kPeakAge = kSecond;
constexpr double kRateWeight = 0.3;  // of the newest sample
constexpr int64_t kRateSpan = 20 * kMillisecond;

}  // namespace

uint64_t Flow::product() const {
    return static_cast<uint64_t>(std::max(peaks_[0], peaks_[1]) * to_seconds(least_rtt_ns_));
}

uint64_t Flow::window() const {
    const double wanted = (draining_ ? kDrained : kGain) * static_cast<double>(product());
    const uint64_t chunks = static_cast<uint64_t>(wanted) / chunk_bytes_ + 1;
    const uint64_t most = std::max<uint64_t>(kLeastChunks, most_ / chunk_bytes_);
    return std::clamp<uint64_t>(chunks, draining_ ? 1 : kLeastChunks, most) * chunk_bytes_;
}

bool Flow::has_room(int64_t now) {
    draining_ = draining_ || (least_rtt_ns_ > 0 && now - least_rtt_at_ns_ > kRoundTripAge);
    if (in_flight_ + chunk_bytes_ <= window()) return true;
    limited_ = true;
    return false;
}

void Flow::sent(uint64_t bytes, int64_t now) {
    if (chunks_.empty()) delivered_ns_ = busy_since_ns_ = now;
    chunks_.push_back({bytes, now, delivered_, delivered_ns_, limited_, draining_});
    in_flight_ += bytes;
}

void Flow::delivered(int64_t now) {
    if (chunks_.empty()) return;
    const Chunk chunk = chunks_.front();
    chunks_.pop_front();
    in_flight_ -= chunk.bytes;
    delivered_ += chunk.bytes;
    delivered_ns_ = now;
    learn_round_trip(chunk, now);
    learn_rate(chunk, now);
}

void Flow::learn_round_trip(const Chunk& chunk, int64_t now) {
    const int64_t rtt = std::max<int64_t>(now - chunk.sent_ns, 1);
    recent_rtt_ns_ = recent_rtt_ns_ == 0 ? rtt : std::min(recent_rtt_ns_, rtt);
    if (least_rtt_ns_ == 0 || rtt <= least_rtt_ns_ || (draining_ && chunk.quiet)) {
        least_rtt_ns_ = rtt;
        least_rtt_at_ns_ = now;
        draining_ = false;
    }
    if (now - recent_since_ns_ < std::max(kRecent, 4 * least_rtt_ns_)) return;
    draining_ = draining_ || recent_rtt_ns_ > kFarBeyond * least_rtt_ns_;
    recent_rtt_ns_ = 0;
    recent_since_ns_ = now;
}

void Flow::learn_rate(const Chunk& chunk, int64_t now) {
    const int64_t took = std::max<int64_t>(now - chunk.delivered_ns, 1);
    const double rate = static_cast<double>(delivered_ - chunk.delivered) / to_seconds(took);
    if (chunk.limited) limited_ns_ = now;
    // The rate of an idle application does not show that of the wire, unless it is higher.
    if (chunk.limited || rate > std::max(peaks_[0], peaks_[1])) {
        if (now - period_ns_ > std::max(kPeakAge, 10 * least_rtt_ns_)) {
            peaks_ = {0.0, peaks_[0]};
            period_ns_ = now;
        }
        peaks_[0] = std::max(peaks_[0], rate);
    }
    busy_bytes_ += chunk.bytes;
    busy_ns_ += now - busy_since_ns_;
    busy_since_ns_ = now;
    // Acknowledgements arrive in batches, so a sample needs several of them.
    if (busy_ns_ < kRateSpan || busy_bytes_ < uint64_t{4} * chunk_bytes_) return;
    const double sample = static_cast<double>(busy_bytes_) / to_seconds(busy_ns_);
    busy_rate_ = busy_rate_ > 0 ? busy_rate_ + kRateWeight * (sample - busy_rate_) : sample;
    busy_ns_ = 0;
    busy_bytes_ = 0;
}

}  // namespace pipemorph
