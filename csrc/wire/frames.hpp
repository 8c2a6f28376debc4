// Frames on the control connection.
//
// Each has a sequence number (0: an echo, which nobody misses) and acknowledges what its sender
// has received, so that a connection that breaks can be resumed without losing or repeating one.
#pragma once

#include <optional>
#include <variant>

#include "protocol/bitmap.hpp"
#include "protocol/key.hpp"
#include "wire/bytes.hpp"

namespace pipemorph {

constexpr size_t kFrameHeaderSize = 24;
constexpr size_t kMaxFrameBody = size_t{1} << 20;

struct FrameHeader {
    uint32_t body_bytes = 0;
    uint8_t type = 0;
    uint64_t sequence = 0;
    uint64_t acknowledged = 0;
};

enum class Transport : uint8_t { any = 0, tcp = 1, shm = 2 };

// The dialler's last word in the handshake: what the link will use. The link is up after it.
struct ConfirmFrame {
    Transport transport = Transport::tcp;
};

// One receive slot that the sender may fill once.
struct SlotGrant {
    uint8_t direction = 0;
    uint32_t slot = 0;
    uint64_t serial = 0;
    uint32_t segment = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
};
struct GrantFrame {
    std::vector<SlotGrant> slots;
};

// A message without payload: it needs no slot.
struct InlineFrame {
    MessageInfo message;
};

struct AckFrame {
    uint64_t message = 0;
};

// "I have given up this path's epoch. Stop reading it into slots, then tell me what you have."
struct FenceFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    std::vector<uint64_t> messages;
};

struct ChunkReport {
    uint64_t message = 0;
    uint32_t chunks = 0;  // 0: nothing of it has arrived
    std::vector<uint8_t> bits;

    bool has(size_t i) const { return i < chunks && (bits[i / 8] >> (i % 8) & 1); }
};
struct BitmapFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    std::vector<ChunkReport> reports;
};

// Shared memory: the peer has mapped our segment (or says why it could not).
struct MappedFrame {
    uint32_t segment = 0;
    std::string error;
};

struct PingFrame {
    int64_t sent_steady_ns = 0;
    int64_t sent_wall_ns = 0;
};
struct PongFrame {
    int64_t ping_steady_ns = 0;
    int64_t ping_wall_ns = 0;
    int64_t received_wall_ns = 0;
    int64_t sent_wall_ns = 0;
};

struct ByeFrame {
    std::string reason;
};

using Frame = std::variant<ConfirmFrame, GrantFrame, InlineFrame, AckFrame, FenceFrame, BitmapFrame,
                           MappedFrame, PingFrame, PongFrame, ByeFrame>;

struct EncodedFrame {
    uint8_t type = 0;
    std::vector<uint8_t> body;
};

EncodedFrame encode_frame(const Frame& frame);
void append_frame(std::vector<uint8_t>& out, const EncodedFrame& frame, uint64_t sequence,
                  uint64_t acknowledged);

std::optional<FrameHeader> decode_frame_header(Bytes data);
std::optional<Frame> decode_frame(uint8_t type, Bytes body);

}  // namespace pipemorph
