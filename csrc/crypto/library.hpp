// OpenSSL's libcrypto, found at run time (docs/decisions/0013).
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace pipemorph {

// Opaque types of libcrypto.
struct HmacContext;
struct CipherContext;
struct CipherMethod;
struct DigestMethod;
struct CryptoEngine;

struct Crypto {
    HmacContext* (*hmac_new)();
    void (*hmac_free)(HmacContext* context);
    // A null key means the previous key. All three return 0 on failure.
    int (*hmac_begin)(HmacContext* context, const void* key, int key_bytes,
                      const DigestMethod* digest, CryptoEngine* engine);
    int (*hmac_update)(HmacContext* context, const unsigned char* data, size_t bytes);
    int (*hmac_end)(HmacContext* context, unsigned char* out, unsigned int* out_bytes);
    const DigestMethod* sha256;
    CipherContext* (*cipher_new)();
    void (*cipher_free)(CipherContext* context);
    // A null argument leaves its value unchanged. All of these return 0 on failure.
    using CipherBegin = int(CipherContext* context, const CipherMethod* method,
                            CryptoEngine* engine, const unsigned char* key,
                            const unsigned char* nonce);
    // A null `out` means bytes that are authenticated only.
    using CipherUpdate = int(CipherContext* context, unsigned char* out, int* out_bytes,
                             const unsigned char* in, int in_bytes);
    using CipherEnd = int(CipherContext* context, unsigned char* out, int* out_bytes);
    CipherBegin* encrypt_begin;
    CipherUpdate* encrypt_update;
    CipherEnd* encrypt_end;
    CipherBegin* decrypt_begin;
    CipherUpdate* decrypt_update;
    CipherEnd* decrypt_end;  // 0 also for a wrong tag
    int (*cipher_control)(CipherContext* context, int what, int bytes, void* data);
    const CipherMethod* aes_256_gcm;
    std::string version;  // "OpenSSL 3.0.17 1 Jul 2025"
};

struct CryptoLibrary {
    const char* name;     // of the file, which names its ABI
    unsigned long least;  // of OpenSSL_version_num
    unsigned long first_after;
};

// Loads the first of these that exists, if its version and its results are right. Otherwise `why`
// gets the reason and the remedy.
std::optional<Crypto> load_crypto(std::span<const CryptoLibrary> libraries, std::string& why);

// Library in use, loaded once and never unloaded. Throws EngineError if there is none.
const Crypto& crypto();

}  // namespace pipemorph
