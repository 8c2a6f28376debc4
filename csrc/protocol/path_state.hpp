// State machine of one data path, without sockets, clocks or locks.
//
//   INIT ─▶ CONNECTING ─▶ UP ⇄ SUSPECT          carries chunks in UP only
//              ▲    │      │      │
//              │    └──────┴──────┴─▶ FENCING    given up here; the peer reports what arrived
//              │                         │
//           COOLDOWN ◀─────── DOWN ◀─────┘       answered: missing chunks move elsewhere
//
// Each connection is a new epoch, and epochs only rise. The dialling side makes them; the other
// side accepts every newer one, since its peer's last fence may still be in flight.
#pragma once

#include <cstdint>

namespace pipemorph {

enum class PathState { init, connecting, up, suspect, fencing, down, cooldown };

const char* name_of(PathState state);

class PathMachine {
  public:
    explicit PathMachine(int64_t longest_pause_ns = 1'000'000'000)
        : longest_pause_ns_(longest_pause_ns) {}

    PathState state() const { return state_; }
    uint32_t epoch() const { return epoch_; }
    bool carries() const { return state_ == PathState::up; }
    // True if a connection of the current epoch may exist.
    bool live() const {
        return state_ == PathState::connecting || state_ == PathState::up ||
               state_ == PathState::suspect;
    }

    // Dialling side: true if a new connection is due; `dial` begins it and returns its epoch.
    bool may_dial(int64_t now_ns);
    uint32_t dial();
    // Other side: true if this epoch is new; `take` adopts it.
    bool may_take(uint32_t epoch) const { return epoch > epoch_ && epoch > fenced_; }
    void take(uint32_t epoch);

    // Events of the current epoch. Those of an earlier epoch are ignored.
    void connected(uint32_t epoch, int64_t now_ns);
    void suspected(uint32_t epoch, bool suspicious);
    // No chunk was assigned to it, so no fence is needed.
    void dial_failed(uint32_t epoch, int64_t now_ns);
    void lost(uint32_t epoch, int64_t now_ns);
    void fence_answered(uint32_t epoch);
    // Records that the peer has given up this epoch and all earlier ones.
    void fenced_by_peer(uint32_t epoch);
    bool is_fenced(uint32_t epoch) const { return epoch <= fenced_; }
    // Ends the pause before the next try, since conditions have improved.
    void reset_backoff() {
        if (state_ == PathState::cooldown) next_try_ns_ = 0;
    }

    // Time at which the last connection was made.
    int64_t up_since_ns() const { return up_since_ns_; }
    uint64_t times_up() const { return times_up_; }
    uint64_t times_lost() const { return times_lost_; }

  private:
    void pause(int64_t now_ns);

    int64_t longest_pause_ns_;
    PathState state_ = PathState::init;
    uint32_t epoch_ = 0;
    uint32_t fenced_ = 0;
    int64_t up_since_ns_ = 0;
    int64_t pause_ns_ = 0;
    int64_t next_try_ns_ = 0;
    uint64_t times_up_ = 0;
    uint64_t times_lost_ = 0;
};

// True if a path should leave the next chunk to faster ones, which would carry all `ready_chunks`
// before it had carried one. Rates are bytes per second, 0 if unknown.
bool should_defer_to_others(double own_rate, double rate_of_others, uint64_t ready_chunks);

}  // namespace pipemorph
