#include "wire/frames.hpp"

namespace pipemorph {
namespace {

template <class... Ts>
struct Overloaded : Ts... {
    using Ts::operator()...;
};
// Newer compilers deduce this themselves; clang before 17 does not.
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

void write_message(Writer& w, const MessageInfo& m) {
    w.u64(m.id);
    const Key& k = m.key;
    for (const int64_t v : {k.generation, k.iteration, k.microbatch, k.direction, k.tensor})
        w.i64(v);
    w.i64(m.posted_ns);
    w.i64(m.started_ns);
    w.text(m.note);
}

MessageInfo read_message(Reader& r) {
    MessageInfo m;
    m.id = r.u64();
    Key& k = m.key;
    for (int64_t* v : {&k.generation, &k.iteration, &k.microbatch, &k.direction, &k.tensor})
        *v = r.i64();
    m.posted_ns = r.i64();
    m.started_ns = r.i64();
    m.note = r.text(kMaxNote);
    return m;
}

// A count from the wire may claim billions: believe it only as far as the bytes go.
bool plausible(const Reader& r, size_t count, size_t least_bytes_each) {
    return r.ok() && count <= r.left() / least_bytes_each;
}

void write_qp(Writer& w, const QpAddress& q) {
    w.u32(q.number);
    w.u32(q.first_packet);
    w.raw(q.gid);
    w.u16(q.lid);
    w.u8(q.mtu);
}

// Both numbers have 24 bits, and path MTUs are 256 (1) to 4096 bytes (5).
bool read_qp(Reader& r, QpAddress& q) {
    q.number = r.u32();
    q.first_packet = r.u32();
    q.gid = r.fixed<16>();
    q.lid = r.u16();
    q.mtu = r.u8();
    return r.ok() && q.number >> 24 == 0 && q.first_packet >> 24 == 0 && q.mtu >= 1 && q.mtu <= 5;
}

constexpr size_t kGrantBytes = 1 + 4 + 8 + 4 + 8 + 8;

template <typename T>
std::optional<Frame> finish(const Reader& r, T frame) {
    if (!r.complete()) return std::nullopt;
    return Frame{std::move(frame)};
}

std::optional<Frame> read_grants(Reader r) {
    GrantFrame f;
    const size_t count = r.u32();
    if (!plausible(r, count, kGrantBytes)) return std::nullopt;
    for (size_t i = 0; i < count; ++i) {
        SlotGrant g;
        g.direction = r.u8();
        g.slot = r.u32();
        g.serial = r.u64();
        g.segment = r.u32();
        g.offset = r.u64();
        g.bytes = r.u64();
        if (g.direction >= kDirections) return std::nullopt;
        f.slots.push_back(g);
    }
    return finish(r, std::move(f));
}

std::optional<Frame> read_fence(Reader r) {
    FenceFrame f;
    f.path = r.u32();
    f.epoch = r.u32();
    const size_t count = r.u32();
    if (!plausible(r, count, 8)) return std::nullopt;
    for (size_t i = 0; i < count; ++i) f.messages.push_back(r.u64());
    return finish(r, std::move(f));
}

std::optional<Frame> read_bitmaps(Reader r) {
    BitmapFrame f;
    f.path = r.u32();
    f.epoch = r.u32();
    const size_t count = r.u32();
    if (!plausible(r, count, 12)) return std::nullopt;
    for (size_t i = 0; i < count; ++i) {
        ChunkReport report;
        report.message = r.u64();
        report.chunks = r.u32();
        const Bytes bits = r.raw((size_t{report.chunks} + 7) / 8);
        if (!r.ok()) return std::nullopt;
        report.bits.assign(bits.begin(), bits.end());
        f.reports.push_back(std::move(report));
    }
    const uint8_t last = r.u8();
    if (last > 1) return std::nullopt;
    f.last = last == 1;
    return finish(r, std::move(f));
}

}  // namespace

EncodedFrame encode_frame(const Frame& frame) {
    EncodedFrame out;
    out.type = static_cast<uint8_t>(frame.index() + 1);
    Writer w(out.body);
    std::visit(Overloaded{[&](const ConfirmFrame& f) { w.u8(static_cast<uint8_t>(f.transport)); },
                          [&](const GrantFrame& f) {
                              w.u32(static_cast<uint32_t>(f.slots.size()));
                              for (const SlotGrant& g : f.slots) {
                                  w.u8(g.direction);
                                  w.u32(g.slot);
                                  w.u64(g.serial);
                                  w.u32(g.segment);
                                  w.u64(g.offset);
                                  w.u64(g.bytes);
                              }
                          },
                          [&](const InlineFrame& f) { write_message(w, f.message); },
                          [&](const AckFrame& f) { w.u64(f.message); },
                          [&](const FenceFrame& f) {
                              w.u32(f.path);
                              w.u32(f.epoch);
                              w.u32(static_cast<uint32_t>(f.messages.size()));
                              for (const uint64_t id : f.messages) w.u64(id);
                          },
                          [&](const BitmapFrame& f) {
                              w.u32(f.path);
                              w.u32(f.epoch);
                              w.u32(static_cast<uint32_t>(f.reports.size()));
                              for (const ChunkReport& r : f.reports) {
                                  w.u64(r.message);
                                  w.u32(r.chunks);
                                  w.raw(r.bits);
                              }
                              w.u8(f.last ? 1 : 0);
                          },
                          [&](const MappedFrame& f) {
                              w.u32(f.segment);
                              w.text(f.error);
                          },
                          [&](const PingFrame& f) {
                              w.i64(f.sent_steady_ns);
                              w.i64(f.sent_wall_ns);
                          },
                          [&](const PongFrame& f) {
                              w.i64(f.ping_steady_ns);
                              w.i64(f.ping_wall_ns);
                              w.i64(f.received_wall_ns);
                              w.i64(f.sent_wall_ns);
                          },
                          [&](const ByeFrame& f) {
                              w.u8(f.died ? 1 : 0);
                              w.text(f.reason.substr(0, ByeFrame::kMostReason));
                          },
                          [&](const RegionFrame& f) {
                              w.u32(f.rail);
                              w.u32(f.segment);
                              w.u64(f.address);
                              w.u64(f.bytes);
                              w.u32(f.key);
                          },
                          [&](const OfferFrame& f) {
                              w.u32(f.path);
                              w.u32(f.epoch);
                              w.u32(f.from_rail);
                              w.u32(f.to_rail);
                              write_qp(w, f.qp);
                          },
                          [&](const AnswerFrame& f) {
                              w.u32(f.path);
                              w.u32(f.epoch);
                              w.text(f.error);
                              write_qp(w, f.qp);
                          }},
               frame);
    return out;
}

void append_frame(std::vector<uint8_t>& out, const EncodedFrame& frame, uint64_t sequence,
                  uint64_t acknowledged) {
    Writer w(out);
    w.u32(static_cast<uint32_t>(frame.body.size()));
    w.u32(frame.type);
    w.u64(sequence);
    w.u64(acknowledged);
    w.raw(frame.body);
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
    Reader r(body);
    switch (type) {
        case 1: {
            const uint8_t transport = r.u8();
            if (transport < 1 || transport > 3) return std::nullopt;
            return finish(r, ConfirmFrame{static_cast<Transport>(transport)});
        }
        case 2:
            return read_grants(r);
        case 3: {
            InlineFrame f{read_message(r)};
            const int64_t direction = f.message.key.direction;
            if (direction < 0 || direction >= kDirections) return std::nullopt;
            return finish(r, std::move(f));
        }
        case 4: {
            AckFrame f{r.u64()};
            return finish(r, f);
        }
        case 5:
            return read_fence(r);
        case 6:
            return read_bitmaps(r);
        case 7: {
            MappedFrame f;
            f.segment = r.u32();
            f.error = r.text(1024);
            return finish(r, std::move(f));
        }
        case 8: {
            PingFrame f;
            f.sent_steady_ns = r.i64();
            f.sent_wall_ns = r.i64();
            return finish(r, f);
        }
        case 9: {
            PongFrame f;
            f.ping_steady_ns = r.i64();
            f.ping_wall_ns = r.i64();
            f.received_wall_ns = r.i64();
            f.sent_wall_ns = r.i64();
            return finish(r, f);
        }
        case 10: {
            ByeFrame f;
            const uint8_t died = r.u8();
            if (died > 1) return std::nullopt;
            f.died = died == 1;
            f.reason = r.text(ByeFrame::kMostReason);
            return finish(r, std::move(f));
        }
        case 11: {
            RegionFrame f;
            f.rail = r.u32();
            f.segment = r.u32();
            f.address = r.u64();
            f.bytes = r.u64();
            f.key = r.u32();
            return finish(r, f);
        }
        case 12: {
            OfferFrame f;
            f.path = r.u32();
            f.epoch = r.u32();
            f.from_rail = r.u32();
            f.to_rail = r.u32();
            if (!read_qp(r, f.qp)) return std::nullopt;
            return finish(r, f);
        }
        case 13: {
            AnswerFrame f;
            f.path = r.u32();
            f.epoch = r.u32();
            f.error = r.text(1024);
            // An answer that says no has no queue pair to show.
            if (!read_qp(r, f.qp) && f.error.empty()) return std::nullopt;
            return finish(r, std::move(f));
        }
        default:
            return std::nullopt;
    }
}

}  // namespace pipemorph
