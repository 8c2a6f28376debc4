#include "protocol/path_state.hpp"

#include <algorithm>

namespace pipemorph {
namespace {

constexpr int64_t kFirstPause = 20'000'000;
// Time of being up after which a broken path is redialled without a pause.
constexpr int64_t kLongEnough = 1'000'000'000;

}  // namespace

const char* name_of(PathState state) {
    switch (state) {
        case PathState::init:
            return "INIT";
        case PathState::connecting:
            return "CONNECTING";
        case PathState::up:
            return "UP";
        case PathState::suspect:
            return "SUSPECT";
        case PathState::fencing:
            return "FENCING";
        case PathState::down:
            return "DOWN";
        case PathState::cooldown:
            return "COOLDOWN";
    }
    return "?";
}

bool PathMachine::may_dial(int64_t now_ns) {
    if (state_ == PathState::down) state_ = PathState::cooldown;
    return state_ == PathState::init || (state_ == PathState::cooldown && now_ns >= next_try_ns_);
}

uint32_t PathMachine::dial() {
    state_ = PathState::connecting;
    return ++epoch_;
}

void PathMachine::take(uint32_t epoch) {
    state_ = PathState::connecting;
    epoch_ = epoch;
}

void PathMachine::connected(uint32_t epoch, int64_t now_ns) {
    if (epoch != epoch_ || state_ != PathState::connecting) return;
    state_ = PathState::up;
    up_since_ns_ = now_ns;
    ++times_up_;
}

void PathMachine::suspected(uint32_t epoch, bool suspicious) {
    if (epoch != epoch_) return;
    if (suspicious && state_ == PathState::up)
        state_ = PathState::suspect;
    else if (!suspicious && state_ == PathState::suspect)
        state_ = PathState::up;
}

// A path that breaks as soon as it is up must not be remade in a tight loop.
void PathMachine::pause(int64_t now_ns) {
    const bool was_up = state_ == PathState::up || state_ == PathState::suspect;
    pause_ns_ = was_up && now_ns - up_since_ns_ > kLongEnough
                    ? 0
                    : std::clamp(pause_ns_ * 2, kFirstPause, longest_pause_ns_);
    next_try_ns_ = now_ns + pause_ns_;
}

void PathMachine::dial_failed(uint32_t epoch, int64_t now_ns) {
    if (epoch != epoch_ || state_ != PathState::connecting) return;
    pause(now_ns);
    state_ = PathState::cooldown;
}

void PathMachine::lost(uint32_t epoch, int64_t now_ns) {
    if (epoch != epoch_ || !live()) return;
    pause(now_ns);
    state_ = PathState::fencing;
    ++times_lost_;
}

void PathMachine::fence_answered(uint32_t epoch) {
    if (epoch == epoch_ && state_ == PathState::fencing) state_ = PathState::down;
}

void PathMachine::fenced_by_peer(uint32_t epoch) {
    fenced_ = std::max(fenced_, epoch);
}

bool should_defer_to_others(double own_rate, double rate_of_others, uint64_t ready_chunks) {
    return own_rate > 0 && rate_of_others > own_rate * static_cast<double>(ready_chunks);
}

}  // namespace pipemorph
