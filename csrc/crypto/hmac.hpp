// HMAC-SHA256 (RFC 2104) and the comparison that goes with it.
#pragma once

#include "crypto/sha256.hpp"

namespace pipemorph {

class Hmac {
  public:
    explicit Hmac(Bytes key);
    Hmac& update(Bytes data);
    // Of all that was fed; what is fed next is a new message under the same key.
    Digest finish();

  private:
    Sha256 inner_;  // each has been fed its half of the key
    Sha256 outer_;
    Sha256 now_;
};

// Takes the same time whatever the contents, so that a forger learns nothing from it.
bool equal_constant_time(Bytes a, Bytes b);

// From the kernel's generator; throws if there is none.
void fill_random(std::span<uint8_t> out);

}  // namespace pipemorph
