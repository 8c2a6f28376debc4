// HMAC-SHA256 (RFC 2104) by libcrypto, constant-time comparison and random bytes.
#pragma once

#include <array>
#include <memory>

#include "base/bytes.hpp"

namespace pipemorph {

using Digest = std::array<uint8_t, 32>;
struct HmacContext;

// One thread at a time. Throws EngineError without libcrypto or memory.
class Hmac {
  public:
    explicit Hmac(Bytes key);
    Hmac& update(Bytes data);
    // Digest of all updates since the last call. The next update begins a new message under the
    // same key.
    Digest finish();

  private:
    struct Free {
        void operator()(HmacContext* context) const;
    };
    std::unique_ptr<HmacContext, Free> context_;
};

// Compares in a time that does not depend on the contents, so that a forger learns nothing.
bool equal_constant_time(Bytes a, Bytes b);

// Fills `out` from the kernel's generator; throws if there is none.
void fill_random(std::span<uint8_t> out);

}  // namespace pipemorph
