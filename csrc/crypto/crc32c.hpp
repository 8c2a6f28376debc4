// CRC32C (Castagnoli) of a chunk's payload. TCP's own checksum lets one error in a few
// million corrupted packets pass; a silently wrong activation is worse than a resent chunk.
#pragma once

#include "base/bytes.hpp"

namespace pipemorph {

// Continues `crc` (0 to start) over `data`, with the widest instructions of this machine.
uint32_t crc32c(uint32_t crc, Bytes data);

// Versions for other machines: with the instruction of SSE4.2 or ARMv8 only, and without any. Tests
// hold all three equal.
uint32_t crc32c_narrow(uint32_t crc, Bytes data);
uint32_t crc32c_software(uint32_t crc, Bytes data);

bool crc32c_is_accelerated();

}  // namespace pipemorph
