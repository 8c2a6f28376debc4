// Chunks through shared memory: the sender copies directly into the receiver's slot and then sends
// the header over a unix socket. The socket is notification and memory barrier in one, passes the
// memfds, and its end reveals the peer's death. There is no shared state that a killed process
// could leave locked or half-written.
#pragma once

#include "path/stream_path.hpp"
#include "wire/mac.hpp"
#include "wire/payload_guard.hpp"

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
    bool process_header();
    bool is_proved(const uint8_t* payload, uint64_t bytes);

    // Header, its MAC, and the MAC of its payload. Both MACs are zero with integrity crc: between
    // two processes, the kernel excludes others and loses nothing.
    static constexpr size_t kPayloadMac = kChunkHeaderSize + kMacSize;
    static constexpr size_t kHead = kPayloadMac + kChunkTrailerSize;

    FrameMac outgoing_mac_;
    PayloadGuard guard_out_;
    std::array<uint8_t, kHead> header_out_{};
    size_t header_unsent_ = 0;             // unsent bytes, at the buffer's end
    bool small_ = true;                    // its chunk is small
    std::shared_ptr<Memory> segment_out_;  // its descriptor goes with the header

    FrameMac incoming_mac_;
    PayloadGuard guard_in_;
    std::array<uint8_t, kHead> header_in_{};
    size_t header_have_ = 0;
    ChunkSink sink_;  // of the chunk that is being received
    std::deque<Fd> descriptors_;
};

}  // namespace pipemorph
