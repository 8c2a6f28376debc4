// How long a message may go without its acknowledgement once all of it has been given to paths.
//
// A path may look alive and deliver nothing: a card acknowledges without its process, and a kernel
// fills its buffers. Only the peer's own acknowledgement says that a chunk is where it belongs.
// Time passes here only while something is heard of the peer, so a peer that is stopped, a control
// connection that is being made anew, and a machine that was paused cost no path its life. Pure
// state, no clocks.
#pragma once

#include <cstdint>

namespace pipemorph {

class Watchdog {
  public:
    // Nothing is late before `floor_ns`.
    explicit Watchdog(int64_t floor_ns) : floor_ns_(floor_ns) {}

    // A frame of the peer's came in.
    void heard(int64_t now_ns);
    // The time that has passed while it was heard.
    int64_t clock_ns() const { return clock_ns_; }
    // An echo went to the peer and back.
    void echoed(int64_t rtt_ns, int64_t now_ns);
    // The least of some two seconds; 0 before there were a few, since the first may have been held
    // up.
    int64_t least_round_trip_ns() const;
    // Something is under way from now on, and was not before.
    void started() { since_ns_ = clock_ns_; }
    void acknowledged(uint64_t bytes);
    // Another transport carries: what the last one did says nothing of it.
    void carrier_changed() { rate_ = 0; }
    int64_t patience_ns(uint64_t bytes_under_way) const;

  private:
    const int64_t floor_ns_;
    int64_t heard_ns_ = 0;
    int64_t clock_ns_ = 0;
    int64_t rtt_ns_[2] = {0, 0};  // least of this period, and of the one before
    int64_t period_ns_ = 0;
    uint32_t echoes_ = 0;
    // Rate of acknowledgements while something is under way.
    int64_t since_ns_ = 0;
    uint64_t bytes_ = 0;
    double rate_ = 0.0;
};

}  // namespace pipemorph
