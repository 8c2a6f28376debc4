#include "wire/chunk.hpp"

#include "crypto/crc32c.hpp"

namespace pipemorph {
namespace {

constexpr uint32_t kMagic = 0x4b484350;  // "PCHK"

}  // namespace

void encode_chunk(const ChunkHeader& h, std::span<uint8_t, kChunkHeaderSize> out) {
    std::vector<uint8_t> buffer;
    buffer.reserve(kChunkHeaderSize);
    Writer w(buffer);
    w.u32(kMagic);
    w.u8(static_cast<uint8_t>(h.type));
    w.u8(static_cast<uint8_t>(h.message.note.size()));
    w.u16(0);
    w.u32(h.path);
    w.u32(h.epoch);
    w.u32(h.slot);
    w.u64(h.serial);
    w.u32(h.index);
    w.u32(h.chunk_bytes);
    w.u32(0);
    w.u64(h.message.id);
    w.u64(h.message.bytes);
    w.i64(h.message.posted_ns);
    w.i64(h.message.started_ns);
    const Key& k = h.message.key;
    for (const int64_t v : {k.generation, k.iteration, k.microbatch, k.direction, k.tensor})
        w.i64(v);
    for (const char c : h.message.note) w.u8(static_cast<uint8_t>(c));
    buffer.resize(kChunkHeaderSize - 4);
    w.u32(crc32c(0, buffer));
    std::memcpy(out.data(), buffer.data(), kChunkHeaderSize);
}

std::optional<ChunkHeader> decode_chunk(Bytes data) {
    if (data.size() != kChunkHeaderSize) return std::nullopt;
    Reader tail(data.last(4));
    if (tail.u32() != crc32c(0, data.first(kChunkHeaderSize - 4))) return std::nullopt;
    Reader r(data);
    if (r.u32() != kMagic) return std::nullopt;
    ChunkHeader h;
    const uint8_t type = r.u8();
    const uint8_t note_size = r.u8();
    r.u16();
    h.path = r.u32();
    h.epoch = r.u32();
    h.slot = r.u32();
    h.serial = r.u64();
    h.index = r.u32();
    h.chunk_bytes = r.u32();
    r.u32();
    h.message.id = r.u64();
    h.message.bytes = r.u64();
    h.message.posted_ns = r.i64();
    h.message.started_ns = r.i64();
    Key& k = h.message.key;
    for (int64_t* v : {&k.generation, &k.iteration, &k.microbatch, &k.direction, &k.tensor})
        *v = r.i64();
    if (note_size > kMaxNote) return std::nullopt;
    const Bytes note = r.raw(note_size);
    h.message.note.assign(note.begin(), note.end());
    if (!r.ok()) return std::nullopt;

    if (type == static_cast<uint8_t>(ChunkHeader::Type::segment)) {
        h.type = ChunkHeader::Type::segment;
        return h;
    }
    if (type != static_cast<uint8_t>(ChunkHeader::Type::chunk)) return std::nullopt;
    // An empty message never takes a slot, and a chunk must lie inside its message. The size is
    // bounded first so that the arithmetic cannot wrap.
    if (h.message.bytes == 0 || h.message.bytes >> 48 != 0 || h.chunk_bytes == 0)
        return std::nullopt;
    if (h.chunks() > kMaxChunks || h.index >= h.chunks()) return std::nullopt;
    if (k.direction < 0 || k.direction >= kDirections || h.message.id == 0) return std::nullopt;
    return h;
}

}  // namespace pipemorph
