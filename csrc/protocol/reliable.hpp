// Control frames that survive the connection they were first sent on.
//
// Every frame is kept until the peer says that it has it. After a reconnect both ends say how far
// they got and the rest is sent again: credits, acknowledgements, fences and empty messages are
// neither lost nor repeated.
#pragma once

#include <deque>

#include "wire/frames.hpp"

namespace pipemorph {

class ReliableStream {
  public:
    // Queue a frame. Safe while there is no connection.
    void send(const Frame& frame);
    // Frames to be written on this connection, in order, at most about `limit` bytes of them.
    void write(std::vector<uint8_t>& out, size_t limit, Sealer* sealer = nullptr);
    bool has_unwritten() const { return next_to_write_ < kept_.size(); }
    bool all_acknowledged() const { return kept_.empty(); }

    enum class Verdict { deliver, repeated, gap };
    Verdict received(uint64_t sequence);
    // False: the peer claims to have what was never sent.
    bool acknowledged(uint64_t sequence);
    uint64_t last_received() const { return received_; }

    // A new connection is up and the peer has everything up to `peer_received`.
    bool resume(uint64_t peer_received);

  private:
    std::deque<EncodedFrame> kept_;  // kept_[0] has sequence acknowledged_ + 1
    size_t next_to_write_ = 0;
    uint64_t acknowledged_ = 0;
    uint64_t received_ = 0;
};

}  // namespace pipemorph
