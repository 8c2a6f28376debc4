// Frames on the control connection.
//
// Each ends with its seal, and has a sequence number (0: an echo, which nobody misses) and
// acknowledges what its sender has received, so that a connection that breaks can be resumed
// without losing or repeating one.
#pragma once

#include <optional>
#include <variant>

#include "wire/bitmap.hpp"
#include "wire/bytes.hpp"
#include "wire/key.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

constexpr size_t kFrameHeaderSize = 24;
constexpr size_t kMaxFrameBody = size_t{1} << 20;

struct FrameHeader {
    uint32_t body_bytes = 0;
    uint8_t type = 0;
    uint64_t sequence = 0;
    uint64_t acknowledged = 0;
};

enum class Transport : uint8_t { any = 0, tcp = 1, shm = 2, rdma = 3 };

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
// A message without payload: it needs no slot.
struct InlineFrame {
    MessageInfo message;
};

// Messages that are all here, and slots: what a message has left is often granted with the
// acknowledgement of the next.
struct AckFrame {
    std::vector<uint64_t> messages;
    std::vector<SlotGrant> slots;
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
    bool last = true;  // the fence is answered in full
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

// The sender is done with the link. Of one that was closed the reason says what was left undone
// (empty: nothing), of one that died what it died of.
struct ByeFrame {
    std::string reason;
    bool died = false;
};

// Where a segment's slots can be written to over one of the receiver's rails; no bytes: nowhere,
// that rail is out of use. Sent before the slots are granted.
struct RegionFrame {
    uint32_t rail = 0;
    uint32_t segment = 0;
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint32_t key = 0;
};

// One end of a reliable connection between two queue pairs.
struct QpAddress {
    uint32_t number = 0;
    uint32_t first_packet = 0;  // PSN
    std::array<uint8_t, 16> gid{};
    uint16_t lid = 0;
    uint8_t mtu = 0;
};

// The dialler has made a queue pair for a path's new epoch on its rail `from_rail`, and asks for
// one on the acceptor's rail `to_rail`.
struct OfferFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    uint32_t from_rail = 0;
    uint32_t to_rail = 0;
    QpAddress qp;
};
struct AnswerFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    std::string error;  // empty: `qp` is ready to receive
    QpAddress qp;
};

using Frame =
    std::variant<ConfirmFrame, InlineFrame, AckFrame, FenceFrame, BitmapFrame, MappedFrame,
                 PingFrame, PongFrame, ByeFrame, RegionFrame, OfferFrame, AnswerFrame>;

struct EncodedFrame {
    uint8_t type = 0;
    std::vector<uint8_t> body;
};

EncodedFrame encode_frame(const Frame& frame);
// Without a sealer it has no seal, as in the tests of what does not need one.
void append_frame(std::vector<uint8_t>& out, const EncodedFrame& frame, uint64_t sequence,
                  uint64_t acknowledged, Sealer* sealer = nullptr);

std::optional<FrameHeader> decode_frame_header(Bytes data);
std::optional<Frame> decode_frame(uint8_t type, Bytes body);

}  // namespace pipemorph
