// AES-256-GCM (NIST SP 800-38D) by libcrypto: encrypts and authenticates, or only the latter.
#pragma once

#include "crypto/hmac.hpp"

namespace pipemorph {

// Authentication tag: proves that bytes come unchanged from a holder of the key.
using Tag = std::array<uint8_t, 16>;

struct CipherContext;

// One direction under one key, one thread at a time. Throws EngineError if libcrypto fails.
class AesGcm {
  public:
    enum class Use { encrypt, decrypt };

    AesGcm(const Digest& key, Use use);
    // Begins a text. A `place` must never begin two texts under one key.
    void begin(uint64_t place);
    // Authenticates bytes that are sent in the clear, before any that are encrypted.
    void authenticate(Bytes data);
    // Encrypts or decrypts to `to`, which may be where `data` is. Decrypted bytes must not be used
    // before `fits` has returned true.
    void apply(uint8_t* to, Bytes data);
    // Ends a text that was encrypted, or only authenticated, and returns its tag.
    Tag tag();
    // Ends a text that was decrypted. True if `tag` is its tag.
    bool fits(const Tag& tag);

  private:
    struct Free {
        void operator()(CipherContext* context) const;
    };
    std::unique_ptr<CipherContext, Free> context_;
    Use use_;
};

}  // namespace pipemorph
