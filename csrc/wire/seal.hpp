// What makes a frame the peer's own: a MAC over its place in the connection and its bytes.
//
// Every connection has keys of its own, one for each direction, out of its handshake and so out of
// both nonces. The place is counted, not sent: a frame that was altered, added, left out, repeated,
// moved, or recorded on another connection has a seal that does not fit.
#pragma once

#include "crypto/hmac.hpp"

namespace pipemorph {

// Half of an HMAC-SHA256.
using Seal = std::array<uint8_t, 16>;
constexpr size_t kSealSize = std::tuple_size_v<Seal>;

struct ConnectionKeys {
    Digest ours{};    // for what this end says
    Digest theirs{};  // for what it hears
};

// One direction of one connection. Both ends count every frame.
class Sealer {
  public:
    explicit Sealer(const Digest& key) : mac_(key) {}

    Seal seal(Bytes frame);
    // Whether `seal` is that of the next frame. If not, nothing that follows can be believed.
    bool fits(Bytes frame, Bytes seal) { return equal_constant_time(this->seal(frame), seal); }

  private:
    Hmac mac_;
    uint64_t place_ = 0;
};

}  // namespace pipemorph
