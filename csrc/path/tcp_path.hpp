// Path over a TCP socket. A chunk is its header, the header's MAC, the payload and a trailer; the
// payload is received directly into the slot.
#pragma once

#include "path/stream_path.hpp"
#include "wire/mac.hpp"
#include "wire/payload_guard.hpp"

namespace pipemorph {

class TcpPath final : public StreamPath {
  public:
    TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch, Fd fd,
            const ConnectionKeys& keys, Integrity integrity = Integrity::crc);

  private:
    Sent send_some() override;
    void receive_some() override;
    void drop_work() override;

    // Each returns false if the path has failed.
    bool consume_ahead(Bytes ahead);
    bool process_between();
    bool process_header();
    bool process_trailer();

    void store_payload(size_t bytes);
    const uint8_t* guard_payload(size_t from, size_t& to);

    static constexpr size_t kHead = kChunkHeaderSize + kMacSize;

    // Sending: header, MAC, payload, trailer.
    FrameMac outgoing_mac_;
    std::optional<ChunkTask> task_;
    std::array<uint8_t, kHead> head_out_{};
    PayloadGuard guard_out_;
    Tag trailer_out_{};
    size_t sent_ = 0;                 // bytes of all four together
    size_t guarded_ = 0;              // summed or encrypted bytes of the payload
    std::vector<uint8_t> encrypted_;  // encrypted bytes of the current piece
    size_t piece_at_ = 0;
    bool trailer_made_ = false;

    // Receiving. A chunk's trailer and the next header lie between two payloads and are read
    // together. The first chunk has no trailer before it, so the buffer starts as if one had been
    // read.
    FrameMac incoming_mac_;
    PayloadGuard guard_in_;
    std::array<uint8_t, kChunkTrailerSize + kHead> between_{};
    size_t between_have_ = kChunkTrailerSize;
    std::optional<ChunkHeader> chunk_;
    ChunkSink sink_;
    uint64_t payload_have_ = 0;
};

}  // namespace pipemorph
