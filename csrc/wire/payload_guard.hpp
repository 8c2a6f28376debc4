// What tells that a chunk's payload is what its sender sent.
#pragma once

#include <optional>

#include "crypto/aes_gcm.hpp"

namespace pipemorph {

// Of payloads over sockets and in shared memory; frames and headers have seals in any case.
enum class Integrity : uint8_t {
    crc = 1,   // against errors of the network: CRC32C, over sockets only
    mac = 2,   // against others on the way: a MAC of header and payload
    aead = 3,  // as mac, and nobody on the way can read it; shared memory: as mac
};

const char* name_of(Integrity integrity);

// One direction of one connection. Both ends count every chunk.
class PayloadGuard {
  public:
    enum class End { sends, receives };

    // `key`: of that direction of the connection.
    PayloadGuard(Integrity how, const Digest& key, End end);

    bool encrypts() const { return how_ == Integrity::aead; }
    bool is_keyed() const { return how_ != Integrity::crc; }

    // The next chunk. `header`: as it is sent.
    void begin(Bytes header);
    // The payload's next bytes. If it encrypts, they have to be stored.
    void pass(Bytes data);
    // The same, and stores them at `to`, which may be where they are: encrypted by who sends,
    // decrypted by who receives.
    void store(uint8_t* to, Bytes data);
    // Ends the chunk: what follows its payload. Of a CRC the first four bytes, then zeros.
    Tag finish();
    // Ends the chunk: whether that followed it.
    bool fits(const Tag& said);

  private:
    Integrity how_;
    End end_;
    std::optional<AesGcm> cipher_;
    uint64_t place_ = 0;
    uint32_t crc_ = 0;
};

}  // namespace pipemorph
