// Copy of a payload that is not read soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipemorph {

// Copies as memcpy, but past the caches: it neither reads the lines that it fills nor evicts the
// data of the next chunk. A third faster than memcpy for megabytes.
void copy_past_caches(uint8_t* to, const uint8_t* from, size_t bytes);

}  // namespace pipemorph
