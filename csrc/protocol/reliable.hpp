// Control frames that survive the connection they were first sent on.
//
// A frame is stored until the peer acknowledges it. After a reconnect both ends exchange the number
// of the last received frame, and the rest is sent again: credits, acknowledgements, fences and
// empty messages are neither lost nor repeated.
#pragma once

#include <deque>

#include "wire/frames.hpp"

namespace pipemorph {

class ReliableStream {
  public:
    // Queues a frame, with or without a connection.
    void send(const Frame& frame);
    // Appends the next frames for this connection, in order, at most about `limit` bytes.
    void write(std::vector<uint8_t>& out, size_t limit, FrameMac* frame_mac = nullptr);
    bool has_unwritten() const { return next_to_write_ < unacknowledged_.size(); }
    bool all_acknowledged() const { return unacknowledged_.empty(); }

    enum class Verdict { deliver, repeated, gap };
    Verdict received(uint64_t sequence);
    // False: the peer acknowledges a frame that was never sent.
    bool acknowledged(uint64_t sequence);
    uint64_t last_received() const { return received_; }

    // Continues on a new connection; the peer has all frames up to `peer_received`.
    bool resume(uint64_t peer_received);

  private:
    std::deque<EncodedFrame> unacknowledged_;  // the first has sequence acknowledged_ + 1
    size_t next_to_write_ = 0;
    uint64_t acknowledged_ = 0;
    uint64_t received_ = 0;
};

}  // namespace pipemorph
