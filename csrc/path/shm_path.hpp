// Chunks through shared memory: the sender copies straight into the receiver's slot and then
// sends the header over a unix socket. The socket is doorbell and memory barrier in one, passes
// the memfds, and its end tells of the peer's death; there is no shared state to be left locked
// or half-written by a killed process.
#pragma once

#include "path/stream_path.hpp"
#include "wire/payload_guard.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

class ShmPath final : public StreamPath {
  public:
    ShmPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch, Fd fd,
            const ConnectionKeys& keys, Integrity integrity = Integrity::crc);

  private:
    Sent send_some() override;
    void receive_some() override;
    void drop_work() override;
    Sent flush_header();
    Sent send_header(const ChunkHeader& header, Bytes payload);
    bool header_received();
    bool is_proved(const uint8_t* payload, uint64_t bytes);

    // A header, its seal, and the MAC of its payload. The latter two are zeros with a CRC: between
    // two processes, the kernel keeps others out and loses nothing.
    static constexpr size_t kPayloadMac = kChunkHeaderSize + kSealSize;
    static constexpr size_t kHead = kPayloadMac + kChunkTrailerSize;

    Sealer says_;
    PayloadGuard guard_out_;
    std::array<uint8_t, kHead> header_out_{};
    size_t header_left_ = 0;               // to be sent, from the buffer's end
    bool small_ = true;                    // its chunk
    std::shared_ptr<Memory> segment_out_;  // its descriptor goes with the header

    Sealer hears_;
    PayloadGuard guard_in_;
    std::array<uint8_t, kHead> header_in_{};
    size_t header_have_ = 0;
    ChunkSink sink_;  // of the chunk that is being taken
    std::deque<Fd> descriptors_;
};

}  // namespace pipemorph
