// CRC32C (Castagnoli) of a chunk's payload. TCP's own checksum lets one error in a few
// million corrupted packets pass; a silently wrong activation is worse than a resent chunk.
#pragma once

#include "crypto/sha256.hpp"

namespace pipemorph {

// Continue `crc` (0 to start) over `data`. Uses the SSE4.2 instruction where there is one.
uint32_t crc32c(uint32_t crc, Bytes data);

// The portable form, for the tests to hold the two equal.
uint32_t crc32c_software(uint32_t crc, Bytes data);

bool crc32c_is_accelerated();

}  // namespace pipemorph
