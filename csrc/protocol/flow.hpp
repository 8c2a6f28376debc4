// How much one connection may have under way: bandwidth × delay, measured on what it carries.
//
// The rate is what was delivered between a chunk's departure and its acknowledgement, over that
// time; the delay is the shortest that such a round trip was. Twice their product is let out: a
// window that is too small for the wire delivers all of itself in each round trip, so it doubles
// until the wire is full. Pure state, no clocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>

namespace pipemorph {

class Flow {
  public:
    // One on the wire, one behind it, one being copied: never so little that it runs dry between
    // two looks at what has been delivered.
    static constexpr uint32_t kLeastChunks = 3;

    // `most`: bytes of memory for what is under way.
    explicit Flow(uint32_t chunk_bytes = 1, uint64_t most = 0)
        : chunk_bytes_(chunk_bytes), most_(most) {}

    // There is less memory than was thought.
    void limit(uint64_t most) { most_ = std::min(most_, most); }
    // Whether one more chunk may go out.
    bool has_room(int64_t now_ns);
    void sent(uint64_t bytes, int64_t now_ns);
    // There was room, and nothing to send.
    void ran_out() { limited_ = false; }
    // The oldest chunk under way has been acknowledged: a connection keeps the order.
    void delivered(int64_t now_ns);

    // Bytes; whole chunks.
    uint64_t window() const;
    uint64_t in_flight() const { return in_flight_; }
    // As much as the wire holds is under way.
    bool is_half_full() const { return 2 * in_flight_ >= window(); }
    // Bytes per second while something was under way: smoothed, 0 if not known.
    double busy_rate() const { return busy_rate_; }
    // What the wire carries, and when that was seen last: only a full window shows it. 0: never.
    double wire_rate() const { return limited_ns_ > 0 ? std::max(peaks_[0], peaks_[1]) : 0.0; }
    int64_t wire_rate_ns() const { return limited_ns_; }
    int64_t least_round_trip_ns() const { return least_rtt_ns_; }

  private:
    struct Chunk {
        uint64_t bytes;
        int64_t sent_ns;
        uint64_t delivered;    // in all, when it was sent
        int64_t delivered_ns;  // when the last of that was
        bool limited;          // the window kept others back: its rate is the connection's
        bool quiet;            // sent while the queue drained
    };
    uint64_t product() const;
    void learn_rate(const Chunk& chunk, int64_t now_ns);
    void learn_round_trip(const Chunk& chunk, int64_t now_ns);

    uint32_t chunk_bytes_;
    uint64_t most_;
    std::deque<Chunk> chunks_;
    uint64_t in_flight_ = 0;
    uint64_t delivered_ = 0;
    int64_t delivered_ns_ = 0;
    bool limited_ = false;
    // The most that was seen: in this period, and in the one before.
    std::array<double, 2> peaks_{};
    int64_t period_ns_ = 0;
    int64_t limited_ns_ = 0;
    int64_t least_rtt_ns_ = 0;
    int64_t least_rtt_at_ns_ = 0;
    int64_t recent_rtt_ns_ = 0;  // the least since then
    int64_t recent_since_ns_ = 0;
    // The least is out of date, perhaps because of a queue of our own: let it drain and look.
    bool draining_ = false;
    int64_t busy_since_ns_ = 0;
    int64_t busy_ns_ = 0;
    uint64_t busy_bytes_ = 0;
    double busy_rate_ = 0.0;
};

}  // namespace pipemorph
