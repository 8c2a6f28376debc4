#include "wire/frames.hpp"

#include <algorithm>

#include "wire/fields.hpp"

namespace pipemorph {

// --- The fields of each frame, in the order of the wire ---

void fields(auto& io, Is<ConfirmFrame> auto& f) {
    io(f.transport);
}
void fields(auto& io, Is<SlotGrant> auto& g) {
    io(g.direction, g.slot, g.serial, g.segment, g.offset, g.bytes);
}
void fields(auto& io, Is<Key> auto& k) {
    io(k.generation, k.iteration, k.microbatch, k.direction, k.tensor);
}
void fields(auto& io, Is<MessageInfo> auto& m) {
    io(m.id, m.key, m.posted_ns, m.started_ns, m.note);
}
void fields(auto& io, Is<InlineFrame> auto& f) {
    io(f.message);
}
void fields(auto& io, Is<AckFrame> auto& f) {
    io(f.messages, f.slots);
}
void fields(auto& io, Is<FenceFrame> auto& f) {
    io(f.path, f.epoch, f.messages);
}
void fields(auto& io, Is<ChunkReport> auto& r) {
    io(r.message, r.chunks);
    io.bytes(r.bits, (size_t{r.chunks} + 7) / 8);
}
void fields(auto& io, Is<BitmapFrame> auto& f) {
    io(f.path, f.epoch, f.reports, f.last);
}
void fields(auto& io, Is<MappedFrame> auto& f) {
    io(f.segment, f.error);
}
void fields(auto& io, Is<PingFrame> auto& f) {
    io(f.sent_steady_ns, f.sent_wall_ns);
}
void fields(auto& io, Is<PongFrame> auto& f) {
    io(f.ping_steady_ns, f.ping_wall_ns, f.received_wall_ns, f.sent_wall_ns);
}
void fields(auto& io, Is<ByeFrame> auto& f) {
    io(f.died, f.reason);
}
void fields(auto& io, Is<RegionFrame> auto& f) {
    io(f.rail, f.segment, f.address, f.bytes, f.key);
}
void fields(auto& io, Is<QpAddress> auto& q) {
    io(q.number, q.first_packet, q.gid, q.lid, q.mtu);
}
void fields(auto& io, Is<OfferFrame> auto& f) {
    io(f.path, f.epoch, f.from_rail, f.to_rail, f.qp);
}
void fields(auto& io, Is<AnswerFrame> auto& f) {
    io(f.path, f.epoch, f.error, f.qp);
}

namespace {

// --- Validation of frames ---

bool valid(const auto&) {
    return true;
}
bool valid(const ConfirmFrame& f) {
    return f.transport >= Transport::tcp && f.transport <= Transport::rdma;
}
bool valid(const AckFrame& f) {
    return std::all_of(f.slots.begin(), f.slots.end(),
                       [](const SlotGrant& g) { return g.direction < kDirections; });
}
bool valid(const InlineFrame& f) {
    const int64_t direction = f.message.key.direction;
    return direction >= 0 && direction < kDirections && f.message.note.size() <= kMaxNote;
}
// Both numbers have 24 bits, and path MTUs are 256 (1) to 4096 bytes (5).
bool valid(const QpAddress& q) {
    return q.number >> 24 == 0 && q.first_packet >> 24 == 0 && q.mtu >= 1 && q.mtu <= 5;
}
bool valid(const OfferFrame& f) {
    return valid(f.qp);
}
// An answer with an error has no queue pair.
bool valid(const AnswerFrame& f) {
    return !f.error.empty() || valid(f.qp);
}

// Decodes a frame. `type`: its place in the variant, counted from 1.
template <size_t I = 0>
std::optional<Frame> decode(uint8_t type, FieldReader r) {
    if constexpr (I == std::variant_size_v<Frame>) {
        return std::nullopt;
    } else {
        if (type != I + 1) return decode<I + 1>(type, r);
        std::variant_alternative_t<I, Frame> frame;
        fields(r, frame);
        if (!r.complete() || !valid(frame)) return std::nullopt;
        return frame;
    }
}

}  // namespace

EncodedFrame encode_frame(const Frame& frame) {
    EncodedFrame out;
    out.type = static_cast<uint8_t>(frame.index() + 1);
    FieldWriter io(out.body);
    std::visit([&](const auto& f) { fields(io, f); }, frame);
    return out;
}

void append_frame(std::vector<uint8_t>& out, const EncodedFrame& frame, uint64_t sequence,
                  uint64_t acknowledged, FrameMac* frame_mac) {
    const size_t from = out.size();
    Writer w(out);
    w.u32(static_cast<uint32_t>(frame.body.size()));
    w.u32(frame.type);
    w.u64(sequence);
    w.u64(acknowledged);
    w.raw(frame.body);
    if (frame_mac != nullptr) w.raw(frame_mac->mac(Bytes(out).subspan(from)));
}

std::optional<FrameHeader> decode_frame_header(Bytes data) {
    if (data.size() != kFrameHeaderSize) return std::nullopt;
    Reader r(data);
    FrameHeader h;
    h.body_bytes = r.u32();
    const uint32_t type = r.u32();
    h.sequence = r.u64();
    h.acknowledged = r.u64();
    if (h.body_bytes > kMaxFrameBody) return std::nullopt;
    if (type == 0 || type > std::variant_size_v<Frame>) return std::nullopt;
    h.type = static_cast<uint8_t>(type);
    return h;
}

std::optional<Frame> decode_frame(uint8_t type, Bytes body) {
    return decode(type, FieldReader(body));
}

}  // namespace pipemorph
