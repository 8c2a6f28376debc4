// AES-256-GCM (NIST SP 800-38D) by libcrypto: encrypts and authenticates, or only the latter.
#pragma once

#include "crypto/hmac.hpp"

namespace pipemorph {

// Proves that bytes are what the holder of a key said.
using Tag = std::array<uint8_t, 16>;

struct CipherContext;

// One direction under one key, one thread at a time. Throws EngineError where libcrypto cannot.
class AesGcm {
  public:
    enum class Use { encrypt, decrypt };

    AesGcm(const Digest& key, Use use);
    // A text of its own. The same `place` must never begin two texts under one key.
    void begin(uint64_t place);
    // Of bytes that are told openly. Before any that are encrypted.
    void authenticate(Bytes data);
    // Encrypt or decrypt to `to`, which may be where `data` is. Until `fits` has said so, what was
    // decrypted may be anything.
    void apply(uint8_t* to, Bytes data);
    // Ends a text that was encrypted, or only authenticated.
    Tag tag();
    // Ends a text that was decrypted: whether this is its tag.
    bool fits(const Tag& tag);

  private:
    struct Free {
        void operator()(CipherContext* context) const;
    };
    std::unique_ptr<CipherContext, Free> context_;
    Use use_;
};

}  // namespace pipemorph
