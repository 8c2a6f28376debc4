// The header in front of every chunk on a data path. It carries the whole message's metadata, so
// whichever chunk comes first, over whichever path, opens the message.
#pragma once

#include <optional>

#include "wire/bytes.hpp"
#include "wire/key.hpp"

namespace pipemorph {

constexpr size_t kChunkHeaderSize = 224;
// What the payload is proved by follows it. Behind and not in front, so that the sender can sum and
// send piece by piece while the bytes are in its cache. In shared memory it follows the header.
constexpr size_t kChunkTrailerSize = 16;

struct ChunkHeader {
    enum class Type : uint8_t { chunk = 1, segment = 2 };

    Type type = Type::chunk;
    uint32_t path = 0;
    uint32_t epoch = 0;   // of the path: a fenced epoch's chunks are dropped
    uint32_t slot = 0;    // for Type::segment: the segment's number
    uint64_t serial = 0;  // of the slot's grant: tells this use of the slot from earlier ones
    uint32_t index = 0;
    uint32_t chunk_bytes = 0;
    MessageInfo message;  // for Type::segment only `bytes` counts: the segment's size

    uint64_t chunks() const {
        return chunk_bytes == 0 ? 0 : (message.bytes + chunk_bytes - 1) / chunk_bytes;
    }
    uint64_t offset() const { return uint64_t{index} * chunk_bytes; }
    uint64_t length() const {
        const uint64_t left = message.bytes - offset();
        return left < chunk_bytes ? left : chunk_bytes;
    }
};

void encode_chunk(const ChunkHeader& header, std::span<uint8_t, kChunkHeaderSize> out);

// Nothing if the header is damaged or says something no sender would say.
std::optional<ChunkHeader> decode_chunk(Bytes data);

}  // namespace pipemorph
