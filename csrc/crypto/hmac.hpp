// HMAC-SHA256 (RFC 2104) by libcrypto, and what goes with it.
#pragma once

#include <array>
#include <memory>

#include "base/bytes.hpp"

namespace pipemorph {

using Digest = std::array<uint8_t, 32>;
struct HmacContext;

// One thread at a time. Throws EngineError where there is no libcrypto, or no memory.
class Hmac {
  public:
    explicit Hmac(Bytes key);
    Hmac& update(Bytes data);
    // Of all that was fed; what is fed next is a new message under the same key.
    Digest finish();

  private:
    struct Free {
        void operator()(HmacContext* context) const;
    };
    std::unique_ptr<HmacContext, Free> context_;
};

// Takes the same time whatever the contents, so that a forger learns nothing from it.
bool equal_constant_time(Bytes a, Bytes b);

// From the kernel's generator; throws if there is none.
void fill_random(std::span<uint8_t> out);

}  // namespace pipemorph
