// Chunks over a TCP socket: header and its seal, then payload, received straight into the slot.
#pragma once

#include "path/stream_path.hpp"
#include "wire/payload_guard.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

class TcpPath final : public StreamPath {
  public:
    TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch, Fd fd,
            const ConnectionKeys& keys, Integrity integrity = Integrity::crc);

  private:
    Sent send_some() override;
    void receive_some() override;
    void drop_work() override;

    bool consume(Bytes ahead);
    bool between_received();
    bool header_received();
    bool chunk_received();
    void payload_received(size_t bytes);
    const uint8_t* guard(size_t from, size_t& to);

    static constexpr size_t kHead = kChunkHeaderSize + kSealSize;

    // Sending: header, seal, payload, trailer.
    Sealer says_;
    std::optional<ChunkTask> task_;
    std::array<uint8_t, kHead> head_out_{};
    PayloadGuard guard_out_;
    Tag trailer_out_{};
    size_t sent_ = 0;                 // of all four together
    size_t guarded_ = 0;              // of the payload
    std::vector<uint8_t> encrypted_;  // the payload's bytes up to there, from where a piece began
    size_t piece_at_ = 0;
    bool ended_ = false;  // the trailer is made

    // Receiving. A chunk's trailer and the next one's header are read together. Before the first
    // chunk there is no trailer, so the buffer starts out as if it had been read.
    Sealer hears_;
    PayloadGuard guard_in_;
    std::array<uint8_t, kChunkTrailerSize + kHead> between_{};
    size_t between_have_ = kChunkTrailerSize;
    std::optional<ChunkHeader> chunk_;
    ChunkSink sink_;
    uint64_t payload_have_ = 0;
};

}  // namespace pipemorph
