// What is fuzzed, each with what must hold for any input at all. One that does not hold aborts.
#pragma once

#include <string_view>

#include "base/bytes.hpp"

namespace fuzz {

using Target = void (*)(pipemorph::Bytes input);

// Bytes of a stranger, and of a peer that knows the secret and says what it likes, to both halves
// of the handshake.
void handshake(pipemorph::Bytes input);
// Bytes of an authenticated peer on the control connection, and chunk headers on a data path.
void control(pipemorph::Bytes input);

// Null for a name that there is not.
Target target(std::string_view name);

}  // namespace fuzz
