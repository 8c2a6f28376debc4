// Header in front of every chunk on a data path. It carries the message's metadata, so the first
// chunk to arrive, over any path, opens the message.
#pragma once

#include <optional>

#include "wire/bytes.hpp"
#include "wire/key.hpp"

namespace pipemorph {

constexpr size_t kChunkHeaderSize = 224;
// Trailer with the checksum or MAC of the payload. It follows the payload, so that the sender can
// sum and send piece by piece while the bytes are in its cache. In shared memory it follows the
// header.
constexpr size_t kChunkTrailerSize = 16;

struct ChunkHeader {
    enum class Type : uint8_t { chunk = 1, segment = 2 };

    Type type = Type::chunk;
    uint32_t path = 0;
    uint32_t epoch = 0;   // of the path: a fenced epoch's chunks are dropped
    uint32_t slot = 0;    // for Type::segment: the segment's number
    uint64_t serial = 0;  // of the slot's grant: identifies this use of the slot
    uint32_t index = 0;
    uint32_t chunk_bytes = 0;
    MessageInfo message;  // for Type::segment only `bytes` is used: the segment's size

    uint64_t chunks() const {
        return chunk_bytes == 0 ? 0 : (message.bytes + chunk_bytes - 1) / chunk_bytes;
    }
    uint64_t offset() const { return uint64_t{index} * chunk_bytes; }
    uint64_t length() const {
        const uint64_t rest = message.bytes - offset();
        return rest < chunk_bytes ? rest : chunk_bytes;
    }
};

void encode_chunk(const ChunkHeader& header, std::span<uint8_t, kChunkHeaderSize> out);

// Decodes a header. Empty if it is damaged or impossible.
std::optional<ChunkHeader> decode_chunk(Bytes data);

}  // namespace pipemorph
