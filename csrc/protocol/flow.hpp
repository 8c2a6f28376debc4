// Flow control of one connection: bytes under way are limited to bandwidth × delay, both measured
// on its chunks.
//
// The rate is the bytes delivered between a chunk's departure and its acknowledgement, over that
// time; the delay is the shortest round trip. The window is twice their product: one that is too
// small for the wire is delivered completely in each round trip, so it doubles until the wire is
// full. Pure state, no clocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>

namespace pipemorph {

class Flow {
  public:
    // One chunk on the wire, one behind it, one being copied, so that the wire never runs dry.
    static constexpr uint32_t kLeastChunks = 3;

    // `most`: bytes of memory for what is under way.
    explicit Flow(uint32_t chunk_bytes = 1, uint64_t most = 0)
        : chunk_bytes_(chunk_bytes), most_(most) {}

    // Lowers the limit to the memory that there is.
    void limit(uint64_t most) { most_ = std::min(most_, most); }
    // True if one more chunk may be sent.
    bool has_room(int64_t now_ns);
    void sent(uint64_t bytes, int64_t now_ns);
    // Records that there was room and nothing to send.
    void ran_out() { limited_ = false; }
    // Records the acknowledgement of the oldest chunk under way: a connection preserves the order.
    void delivered(int64_t now_ns);

    // Window in bytes, a multiple of the chunk size.
    uint64_t window() const;
    uint64_t in_flight() const { return in_flight_; }
    // True if as much is under way as the wire holds.
    bool is_half_full() const { return 2 * in_flight_ >= window(); }
    // Bytes per second while something was under way: smoothed, 0 if unknown.
    double busy_rate() const { return busy_rate_; }
    // Rate of the wire, and the time of its last measurement, which needs a full window. 0: never.
    double wire_rate() const { return limited_ns_ > 0 ? std::max(peaks_[0], peaks_[1]) : 0.0; }
    int64_t wire_rate_ns() const { return limited_ns_; }
    int64_t least_round_trip_ns() const { return least_rtt_ns_; }

  private:
    struct Chunk {
        uint64_t bytes;
        int64_t sent_ns;
        uint64_t delivered;    // total bytes delivered when it was sent
        int64_t delivered_ns;  // time of the last delivery before it was sent
        bool limited;          // the window was full: the rate is that of the wire
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
    // Highest rate of this period, and of the previous one.
    std::array<double, 2> peaks_{};
    int64_t period_ns_ = 0;
    int64_t limited_ns_ = 0;
    int64_t least_rtt_ns_ = 0;
    int64_t least_rtt_at_ns_ = 0;
    int64_t recent_rtt_ns_ = 0;  // the least since `recent_since_ns_`
    int64_t recent_since_ns_ = 0;
    // The least round trip is outdated, perhaps by a queue of our own: drain it and measure.
    bool draining_ = false;
    int64_t busy_since_ns_ = 0;
    int64_t busy_ns_ = 0;
    uint64_t busy_bytes_ = 0;
    double busy_rate_ = 0.0;
};

}  // namespace pipemorph
