// Chunks over a TCP socket: header, then payload, received straight into the slot.
#pragma once

#include "path/stream_path.hpp"

namespace pipemorph {

class TcpPath final : public StreamPath {
  public:
    TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
            Fd fd);

  private:
    bool send_some() override;
    void receive_some() override;
    void drop_work() override;

    bool header_received();
    bool payload_received(size_t bytes);

    // Sending.
    std::optional<ChunkTask> task_;
    std::array<uint8_t, kChunkHeaderSize> header_out_{};
    size_t sent_ = 0;  // of header and payload together

    // Receiving. The header buffer fills first, then the payload.
    std::array<uint8_t, kChunkHeaderSize> header_in_{};
    size_t header_have_ = 0;
    std::optional<ChunkHeader> chunk_;
    ChunkSink sink_;
    uint64_t payload_have_ = 0;
    uint32_t crc_ = 0;
    std::vector<uint8_t> waste_;  // where dropped payloads go
};

}  // namespace pipemorph
