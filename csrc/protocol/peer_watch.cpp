#include "protocol/peer_watch.hpp"

#include <algorithm>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kLeastBackoff = 20 * kMillisecond;
constexpr int64_t kMostBackoff = 500 * kMillisecond;
constexpr int64_t kPingEvery = 100 * kMillisecond;
constexpr int64_t kNoPause = 250 * kMillisecond;  // a few looks

}  // namespace

void PeerWatch::connected(int64_t now) {
    heard_ns_ = since_ns_ = now;
    refused_since_ns_ = 0;
    works_ = false;
}

void PeerWatch::heard(bool news, int64_t now) {
    heard_ns_ = now;
    if (works_ || !(news || now - since_ns_ >= kSecond)) return;
    works_ = true;
    down_since_ns_ = 0;
    backoff_ns_ = 0;
}

bool PeerWatch::lost(int64_t now) {
    if (down_since_ns_ == 0) down_since_ns_ = now;
    next_seek_ns_ = 0;
    if (!works_) back_off(now);
    return works_;
}

void PeerWatch::back_off(int64_t now) {
    const int64_t most = std::clamp(deadline_ns_ / 10, kLeastBackoff, kMostBackoff);
    backoff_ns_ = std::clamp(backoff_ns_ * 2, kLeastBackoff, most);
    next_seek_ns_ = now + backoff_ns_;
}

bool PeerWatch::seek() {
    if (seeks_) return false;
    return seeks_ = true;
}

void PeerWatch::note(bool listens, int64_t now) {
    if (listens)
        refused_since_ns_ = 0;
    else if (refused_since_ns_ == 0)
        refused_since_ns_ = now;
}

void PeerWatch::not_reached(bool listens, int64_t now) {
    not_sought(now);
    note(listens, now);
}

void PeerWatch::looked_up(bool listens, int64_t now) {
    seeks_ = false;
    next_seek_ns_ = now + deadline_ns_ / 40;
    note(listens, now);
}

void PeerWatch::not_sought(int64_t now) {
    seeks_ = false;
    back_off(now);
}

int64_t PeerWatch::look(int64_t now) {
    const int64_t passed = now - looked_ns_;
    looked_ns_ = now;
    if (passed <= std::max(deadline_ns_ / 4, kNoPause)) return 0;
    for (int64_t* since : {&heard_ns_, &down_since_ns_, &refused_since_ns_})
        if (*since != 0) *since = std::min(*since + passed, now);
    return passed;
}

void PeerWatch::pinged(int64_t now) {
    next_ping_ns_ = now + kPingEvery;
}

bool PeerWatch::is_gone(int64_t now) const {
    return refused_since_ns_ != 0 && now - refused_since_ns_ > deadline_ns_ * 2 / 5;
}

// It was silent before it counted as down, so the whole silence counts.
int64_t PeerWatch::missed_ns(int64_t now) const {
    return now - std::min(down_since_ns_, heard_ns_ + deadline_ns_ / 2);
}

}  // namespace pipemorph
