// Chunks through shared memory: the sender copies straight into the receiver's slot and then
// sends the header over a unix socket. The socket is doorbell and memory barrier in one, passes
// the memfds, and its end tells of the peer's death; there is no shared state to be left locked
// or half-written by a killed process.
#pragma once

#include "path/stream_path.hpp"

namespace pipemorph {

class ShmPath final : public StreamPath {
  public:
    ShmPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
            Fd fd);

  private:
    bool send_some() override;
    void receive_some() override;
    void drop_work() override;
    bool flush_header();
    bool header_received();

    std::array<uint8_t, kChunkHeaderSize> header_out_{};
    size_t header_left_ = 0;               // to be sent, from the buffer's end
    std::shared_ptr<Memory> segment_out_;  // its descriptor goes with the header

    std::array<uint8_t, kChunkHeaderSize> header_in_{};
    size_t header_have_ = 0;
    int64_t next_aside_ns_ = 0;
    std::deque<Fd> descriptors_;
};

}  // namespace pipemorph
