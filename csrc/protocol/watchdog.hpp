// Watchdog of messages: time that a completely sent message may lack its acknowledgement.
//
// A path may seem alive and deliver nothing: a card acknowledges without its process, and a kernel
// fills its buffers. Only the peer's own acknowledgement proves delivery. Time passes here only
// while frames of the peer arrive, so a stopped peer, a control connection that is being remade,
// and a paused machine end no path. Pure state, no clocks.
#pragma once

#include <cstdint>

namespace pipemorph {

class Watchdog {
  public:
    // `floor_ns`: least time before a message is late.
    explicit Watchdog(int64_t floor_ns) : floor_ns_(floor_ns) {}

    // Records a frame of the peer.
    void frame_received(int64_t now_ns);
    // Time that has passed while frames arrived.
    int64_t clock_ns() const { return clock_ns_; }
    // Records the round trip of an echo.
    void echoed(int64_t rtt_ns, int64_t now_ns);
    // Least round trip of some two seconds; 0 before there were a few, since the first may be slow.
    int64_t least_round_trip_ns() const;
    // Records that messages are under way from now on.
    void started() { since_ns_ = clock_ns_; }
    void acknowledged(uint64_t bytes);
    // Discards the rate, since another transport carries.
    void carrier_changed() { rate_ = 0; }
    int64_t patience_ns(uint64_t bytes_under_way) const;

  private:
    const int64_t floor_ns_;
    int64_t last_frame_ns_ = 0;
    int64_t clock_ns_ = 0;
    int64_t rtt_ns_[2] = {0, 0};  // least of this period, and of the previous one
    int64_t period_ns_ = 0;
    uint32_t echoes_ = 0;
    // Rate of acknowledgements while something is under way.
    int64_t since_ns_ = 0;
    uint64_t bytes_ = 0;
    double rate_ = 0.0;
};

}  // namespace pipemorph
