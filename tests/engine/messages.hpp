// Messages as tests of the protocol post them.
#pragma once

#include "protocol/outbox.hpp"

namespace pipemorph {

inline constexpr uint32_t kChunk = 4096;

inline MessageInfo message(int64_t microbatch, uint64_t bytes, int64_t direction = 0) {
    MessageInfo m;
    m.key = {0, 0, microbatch, direction, 0};
    m.bytes = bytes;
    return m;
}

}  // namespace pipemorph
