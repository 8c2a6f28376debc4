// View of bytes that the caller owns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pipemorph {

using Bytes = std::span<const uint8_t>;

}  // namespace pipemorph
