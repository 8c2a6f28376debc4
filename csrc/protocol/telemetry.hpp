// In-band telemetry: round trips of echoes, and the difference of the two clocks.
#pragma once

#include <optional>
#include <vector>

#include "wire/frames.hpp"

namespace pipemorph {

struct Echo {
    int64_t rtt_ns = 0;  // at most a minute
    int64_t peer_minus_ours_ns = 0;
};

// Echo of an answer that arrived now. Empty if it answers no possible ping, or has impossible
// times, since the peer is not trusted.
std::optional<Echo> echo_of(const PongFrame& pong, int64_t now_wall_ns, int64_t now_steady_ns);

class EchoMeter {
  public:
    void add(int64_t rtt_ns, int64_t peer_minus_ours_ns);

    struct Summary {
        int64_t min_ns = 0;
        int64_t mean_ns = 0;
        int64_t p99_ns = 0;
    };
    std::optional<Summary> summary() const;
    // Nanoseconds to add to the peer's clock for ours.
    std::optional<int64_t> clock_offset_ns() const;

  private:
    // About half a minute of echoes: old enough to hold a quiet one, young enough for drift.
    static constexpr size_t kWindow = 256;
    static constexpr size_t kMaxSamples = 1024;
    struct Offset {
        int64_t rtt_ns;
        int64_t offset_ns;
    };
    std::vector<int64_t> samples_;
    size_t sample_next_ = 0;
    std::vector<Offset> window_;
    size_t window_next_ = 0;
};

}  // namespace pipemorph
