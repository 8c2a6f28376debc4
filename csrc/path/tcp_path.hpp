// Chunks over a TCP socket: header and its seal, then payload, received straight into the slot.
#pragma once

#include "path/stream_path.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

class TcpPath final : public StreamPath {
  public:
    TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch, Fd fd,
            const ConnectionKeys& keys);

  private:
    bool send_some() override;
    void receive_some() override;
    void drop_work() override;

    bool header_received();
    bool chunk_received();
    void payload_received(size_t bytes);
    bool lands() const;

    static constexpr size_t kHead = kChunkHeaderSize + kSealSize;

    // Sending: header, seal, payload, trailer.
    Sealer says_;
    std::optional<ChunkTask> task_;
    std::array<uint8_t, kHead> head_out_{};
    std::array<uint8_t, kChunkTrailerSize> trailer_out_{};
    size_t sent_ = 0;    // of the three together
    size_t summed_ = 0;  // of the payload
    uint32_t crc_out_ = 0;

    // Receiving. A chunk's trailer and the next one's header are read together. Before the first
    // chunk there is no trailer, so the buffer starts out as if it had been read.
    Sealer hears_;
    std::array<uint8_t, kChunkTrailerSize + kHead> between_{};
    size_t between_have_ = kChunkTrailerSize;
    std::optional<ChunkHeader> chunk_;
    ChunkSink sink_;
    uint64_t payload_have_ = 0;
    uint32_t crc_in_ = 0;
};

}  // namespace pipemorph
