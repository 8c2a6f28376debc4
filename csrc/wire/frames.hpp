// Frames on the control connection.
//
// A frame ends with its MAC. It has a sequence number (0: an echo, which need not arrive) and
// acknowledges the frames that its sender has received, so that a broken connection can be resumed
// without losing or repeating a frame.
#pragma once

#include <optional>
#include <variant>

#include "wire/bitmap.hpp"
#include "wire/bytes.hpp"
#include "wire/key.hpp"
#include "wire/mac.hpp"

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

// Last message of the dialler in the handshake: the transport of the link, which is up after it.
struct ConfirmFrame {
    Transport transport = Transport::tcp;
};

// Grant of a receive slot, which the sender may fill once.
struct SlotGrant {
    uint8_t direction = 0;
    uint32_t slot = 0;
    uint64_t serial = 0;
    uint32_t segment = 0;
    uint64_t offset = 0;
    uint64_t bytes = 0;
};
// Message without payload, which needs no slot.
struct InlineFrame {
    MessageInfo message;
};

// Acknowledgement of complete messages, and grants: a message's slot is often granted again with
// the acknowledgement of the next message.
struct AckFrame {
    std::vector<uint64_t> messages;
    std::vector<SlotGrant> slots;
};

// End of a path's epoch: its sender has given it up. The receiver stops reading it into slots, then
// reports the chunks that it has.
struct FenceFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    std::vector<uint64_t> messages;
};

struct ChunkReport {
    uint64_t message = 0;
    uint32_t chunks = 0;  // 0: none has arrived
    std::vector<uint8_t> bits;

    bool has(size_t i) const { return i < chunks && (bits[i / 8] >> (i % 8) & 1); }
};
struct BitmapFrame {
    uint32_t path = 0;
    uint32_t epoch = 0;
    std::vector<ChunkReport> reports;
    bool last = true;  // the fence is answered in full
};

// Shared memory: the peer has mapped our segment, or could not for the reason `error`.
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

// End of the link at its sender. The reason of a closed link names unfinished work (empty: none),
// that of a dead one its error.
struct ByeFrame {
    std::string reason;
    bool died = false;
};

// Memory of a segment's slots for one of the receiver's rails; no bytes: the rail cannot reach it,
// and is out of use. Sent before the slots are granted.
struct RegionFrame {
    uint32_t rail = 0;
    uint32_t segment = 0;
    uint64_t address = 0;
    uint64_t bytes = 0;
    uint32_t key = 0;
};

// End of a reliable connection between two queue pairs.
struct QpAddress {
    uint32_t number = 0;
    uint32_t first_packet = 0;  // PSN
    std::array<uint8_t, 16> gid{};
    uint16_t lid = 0;
    uint8_t mtu = 0;
};

// Offer of the dialler: its queue pair for a path's new epoch on its rail `from_rail`, which needs
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
// Appends a frame. Without `frame_mac` it has no MAC, as in some tests.
void append_frame(std::vector<uint8_t>& out, const EncodedFrame& frame, uint64_t sequence,
                  uint64_t acknowledged, FrameMac* frame_mac = nullptr);

std::optional<FrameHeader> decode_frame_header(Bytes data);
std::optional<Frame> decode_frame(uint8_t type, Bytes body);

}  // namespace pipemorph
