#include "protocol/peer_watch.hpp"

#include <algorithm>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kLeastBackoff = 20 * kMillisecond;
constexpr int64_t kMostBackoff = 500 * kMillisecond;
constexpr int64_t kPingEvery = 100 * kMillisecond;
constexpr int64_t kNoPause = 250 * kMillisecond;  // a few checks

}  // namespace

void PeerWatch::connected(int64_t now) {
    last_frame_ns_ = since_ns_ = now;
    refused_since_ns_ = 0;
    works_ = false;
}

void PeerWatch::frame_received(bool is_new, int64_t now) {
    last_frame_ns_ = now;
    if (works_ || !(is_new || now - since_ns_ >= kSecond)) return;
    works_ = true;
    down_since_ns_ = 0;
    backoff_ns_ = 0;
}

bool PeerWatch::lost(int64_t now) {
    if (down_since_ns_ == 0) down_since_ns_ = now;
    next_reconnect_ns_ = 0;
    if (!works_) back_off(now);
    return works_;
}

void PeerWatch::back_off(int64_t now) {
    const int64_t most = std::clamp(deadline_ns_ / 10, kLeastBackoff, kMostBackoff);
    backoff_ns_ = std::clamp(backoff_ns_ * 2, kLeastBackoff, most);
    next_reconnect_ns_ = now + backoff_ns_;
}

bool PeerWatch::begin_reconnect() {
    if (reconnecting_) return false;
    return reconnecting_ = true;
}

void PeerWatch::record_listening(bool listens, int64_t now) {
    if (listens)
        refused_since_ns_ = 0;
    else if (refused_since_ns_ == 0)
        refused_since_ns_ = now;
}

void PeerWatch::dial_unanswered(bool listens, int64_t now) {
    reconnect_not_tried(now);
    record_listening(listens, now);
}

void PeerWatch::probe_finished(bool listens, int64_t now) {
    reconnecting_ = false;
    next_reconnect_ns_ = now + deadline_ns_ / 40;
    record_listening(listens, now);
}

void PeerWatch::reconnect_not_tried(int64_t now) {
    reconnecting_ = false;
    back_off(now);
}

int64_t PeerWatch::measure_pause(int64_t now) {
    const int64_t passed = now - checked_ns_;
    checked_ns_ = now;
    if (passed <= std::max(deadline_ns_ / 4, kNoPause)) return 0;
    for (int64_t* since : {&last_frame_ns_, &down_since_ns_, &refused_since_ns_})
        if (*since != 0) *since = std::min(*since + passed, now);
    return passed;
}

void PeerWatch::pinged(int64_t now) {
    next_ping_ns_ = now + kPingEvery;
}

bool PeerWatch::is_gone(int64_t now) const {
    return refused_since_ns_ != 0 && now - refused_since_ns_ > deadline_ns_ * 2 / 5;
}

// Time without the peer, including the silence before the connection counted as down.
int64_t PeerWatch::unreachable_ns(int64_t now) const {
    return now - std::min(down_since_ns_, last_frame_ns_ + deadline_ns_ / 2);
}

}  // namespace pipemorph
