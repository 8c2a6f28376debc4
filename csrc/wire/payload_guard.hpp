// Integrity of chunk payloads: checksum, MAC or encryption.
#pragma once

#include <optional>

#include "crypto/aes_gcm.hpp"

namespace pipemorph {

// Integrity of payloads over sockets and in shared memory; frames and headers always have MACs.
enum class Integrity : uint8_t {
    crc = 1,   // against errors of the network: CRC32C, over sockets only
    mac = 2,   // against attackers in the network: a MAC of header and payload
    aead = 3,  // as mac, and encrypted; shared memory: as mac
};

const char* name_of(Integrity integrity);

// Guard of one direction of a connection. Both ends count every chunk.
class PayloadGuard {
  public:
    enum class End { sends, receives };

    // `key`: of that direction of the connection.
    PayloadGuard(Integrity how, const Digest& key, End end);

    bool encrypts() const { return how_ == Integrity::aead; }
    bool is_keyed() const { return how_ != Integrity::crc; }

    // Begins the next chunk. `header`: as it is sent.
    void begin(Bytes header);
    // Adds the payload's next bytes, if they are not encrypted.
    void pass(Bytes data);
    // Adds bytes and stores them at `to`, which may be their address: encrypted by the sender,
    // decrypted by the receiver.
    void store(uint8_t* to, Bytes data);
    // Ends the chunk and returns its trailer. A CRC is the first four bytes, then zeros.
    Tag finish();
    // Ends the chunk. True if `said` is its trailer.
    bool fits(const Tag& said);

  private:
    Integrity how_;
    End end_;
    std::optional<AesGcm> cipher_;
    uint64_t place_ = 0;
    uint32_t crc_ = 0;
};

}  // namespace pipemorph
