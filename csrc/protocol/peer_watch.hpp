// Liveness of a link's peer on the control connection: when to reconnect, and when the peer counts
// as dead. Pure state, no clocks.
//
// A connection without a new frame does not count. So a network that passes handshakes and pings,
// and then cuts, causes neither dial after dial nor more time than the deadline. A process that was
// stopped (a suspended job, a paused machine) received nothing, so that time does not count against
// the peer, which may have been stopped as well.
#pragma once

#include <cstdint>

namespace pipemorph {

class PeerWatch {
  public:
    // `deadline_ns`: time without a frame after which the peer is dead. Half of it ends a
    // connection.
    PeerWatch(int64_t deadline_ns, int64_t now_ns)
        : deadline_ns_(deadline_ns), last_frame_ns_(now_ns), checked_ns_(now_ns) {}

    // Records a new connection.
    void connected(int64_t now_ns);
    // Records a frame. `is_new`: the peer had not sent it before.
    void frame_received(bool is_new, int64_t now_ns);
    // Records the loss of the connection. True: reconnect at once.
    bool lost(int64_t now_ns);

    // Begins an attempt to reconnect. False: one is in progress.
    bool begin_reconnect();
    void reconnected() { reconnecting_ = false; }
    // End an attempt that dialled the peer without success, or that probed its address. `listens`:
    // a process accepts connections there.
    void dial_unanswered(bool listens, int64_t now_ns);
    void probe_finished(bool listens, int64_t now_ns);
    // Ends an attempt that could not be made: no memory, or no more descriptors.
    void reconnect_not_tried(int64_t now_ns);

    // To be called several times per quarter of a second. Time since the last call, if that was a
    // pause of this process; else 0.
    int64_t measure_pause(int64_t now_ns);
    // With a connection: true if it is silent, and true if a ping is due.
    bool is_silent(int64_t now_ns) const { return now_ns - last_frame_ns_ > deadline_ns_ / 2; }
    bool pings(int64_t now_ns) const { return now_ns >= next_ping_ns_; }
    void pinged(int64_t now_ns);
    // Without a connection.
    bool is_gone(int64_t now_ns) const;  // its address has refused connections for a while
    int64_t unreachable_ns(int64_t now_ns) const;
    bool is_unreachable_too_long(int64_t now_ns) const {
        return unreachable_ns(now_ns) > deadline_ns_;
    }
    bool is_reconnect_due(int64_t now_ns) const { return now_ns >= next_reconnect_ns_; }

  private:
    void back_off(int64_t now_ns);
    void record_listening(bool listens, int64_t now_ns);

    const int64_t deadline_ns_;
    int64_t last_frame_ns_;  // time of the last frame
    int64_t checked_ns_;     // time of the last check
    int64_t since_ns_ = 0;   // time at which the connection was made
    bool works_ = false;     // a new frame has arrived over it, or any frame after a second
    int64_t down_since_ns_ = 0;
    int64_t refused_since_ns_ = 0;  // time of the first refusal
    bool reconnecting_ = false;
    int64_t backoff_ns_ = 0;
    int64_t next_reconnect_ns_ = 0;
    int64_t next_ping_ns_ = 0;
};

}  // namespace pipemorph
