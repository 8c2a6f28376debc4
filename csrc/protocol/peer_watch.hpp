// Whether a link's peer is heard over control, when to seek it again, and when it counts as dead.
// Pure state, no clocks.
//
// A connection over which nothing new has come was none. Whoever lets handshakes and signs of life
// through and then cuts gets neither dial after dial nor more time than the deadline. A process
// that was stopped (a job suspended, a machine paused) heard nobody, and nobody is to blame for
// that: the time does not count against the peer, which may have been stopped, too.
#pragma once

#include <cstdint>

namespace pipemorph {

class PeerWatch {
  public:
    // `deadline_ns`: half of it without a sign of life ends a connection; after so long without one
    // the peer is dead.
    PeerWatch(int64_t deadline_ns, int64_t now_ns)
        : deadline_ns_(deadline_ns), heard_ns_(now_ns), looked_ns_(now_ns) {}

    // A connection stands.
    void connected(int64_t now_ns);
    // A frame came over it. `news`: the peer had not said it before.
    void heard(bool news, int64_t now_ns);
    // The connection is lost. True: the peer is to be sought at once.
    bool lost(int64_t now_ns);

    // The peer is being sought from now on. False: it is already.
    bool seek();
    void found() { seeks_ = false; }
    // Sought by dialling it, or by looking whether anybody `listens` at its address, in vain or
    // not.
    void not_reached(bool listens, int64_t now_ns);
    void looked_up(bool listens, int64_t now_ns);
    // Nothing was learnt of it: no memory, or no more descriptors.
    void not_sought(int64_t now_ns);

    // To be called several times in each fourth of a second. How long nobody looked, if that was a
    // pause of this process; else 0.
    int64_t look(int64_t now_ns);
    // While a connection stands: whether it is silent, and whether it is time for a sign of life.
    bool is_silent(int64_t now_ns) const { return now_ns - heard_ns_ > deadline_ns_ / 2; }
    bool pings(int64_t now_ns) const { return now_ns >= next_ping_ns_; }
    void pinged(int64_t now_ns);
    // While none stands.
    bool is_gone(int64_t now_ns) const;  // nobody has been listening at its address for a while
    int64_t missed_ns(int64_t now_ns) const;
    bool is_missed_too_long(int64_t now_ns) const { return missed_ns(now_ns) > deadline_ns_; }
    bool seeks_now(int64_t now_ns) const { return now_ns >= next_seek_ns_; }

  private:
    void back_off(int64_t now_ns);
    void note(bool listens, int64_t now_ns);

    const int64_t deadline_ns_;
    int64_t heard_ns_;      // the last time that anything came
    int64_t looked_ns_;     // the last time that anybody looked
    int64_t since_ns_ = 0;  // when the connection was made
    bool works_ = false;    // something new has come over it, or any frame after a second
    int64_t down_since_ns_ = 0;
    int64_t refused_since_ns_ = 0;  // nobody listens since
    bool seeks_ = false;
    int64_t backoff_ns_ = 0;
    int64_t next_seek_ns_ = 0;
    int64_t next_ping_ns_ = 0;
};

}  // namespace pipemorph
