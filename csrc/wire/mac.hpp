// Authentication of frames: a MAC over a frame's number in the connection and its bytes.
//
// Every connection has its own keys, one per direction, derived in its handshake from both nonces.
// The number is counted, not sent: the MAC of a frame that was altered, added, omitted, repeated,
// moved, or recorded on another connection does not match.
#pragma once

#include "crypto/hmac.hpp"

namespace pipemorph {

// Half of an HMAC-SHA256.
using Mac = std::array<uint8_t, 16>;
constexpr size_t kMacSize = std::tuple_size_v<Mac>;

struct ConnectionKeys {
    Digest ours{};    // for frames that this end sends
    Digest theirs{};  // for frames that it receives
};

// MACs of one direction of a connection. Both ends count every frame.
class FrameMac {
  public:
    explicit FrameMac(const Digest& key) : mac_(key) {}

    Mac mac(Bytes frame);
    // True if `mac` is that of the next frame. If not, later frames cannot be trusted.
    bool fits(Bytes frame, Bytes mac) { return equal_constant_time(this->mac(frame), mac); }

  private:
    Hmac mac_;
    uint64_t place_ = 0;
};

}  // namespace pipemorph
