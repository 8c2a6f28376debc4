// OpenSSL's libcrypto, found at run time (docs/decisions/0034).
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace pipemorph {

// Types of libcrypto that are only ever pointed to.
struct HmacContext;
struct CipherContext;
struct CipherMethod;
struct DigestMethod;
struct CryptoEngine;

struct Crypto {
    HmacContext* (*hmac_new)();
    void (*hmac_free)(HmacContext* context);
    // Without a key: the same key again. All three return 0 where they fail.
    int (*hmac_begin)(HmacContext* context, const void* key, int key_bytes,
                      const DigestMethod* digest, CryptoEngine* engine);
    int (*hmac_update)(HmacContext* context, const unsigned char* data, size_t bytes);
    int (*hmac_end)(HmacContext* context, unsigned char* out, unsigned int* out_bytes);
    const DigestMethod* sha256;
    CipherContext* (*cipher_new)();
    void (*cipher_free)(CipherContext* context);
    // What is null stays as it was. All of these return 0 where they fail.
    using CipherBegin = int(CipherContext* context, const CipherMethod* method,
                            CryptoEngine* engine, const unsigned char* key,
                            const unsigned char* nonce);
    // Without `out`: bytes that are authenticated only.
    using CipherUpdate = int(CipherContext* context, unsigned char* out, int* out_bytes,
                             const unsigned char* in, int in_bytes);
    using CipherEnd = int(CipherContext* context, unsigned char* out, int* out_bytes);
    CipherBegin* encrypt_begin;
    CipherUpdate* encrypt_update;
    CipherEnd* encrypt_end;
    CipherBegin* decrypt_begin;
    CipherUpdate* decrypt_update;
    CipherEnd* decrypt_end;  // 0 also if the tag is another
    int (*cipher_control)(CipherContext* context, int what, int bytes, void* data);
    const CipherMethod* aes_256_gcm;
    std::string version;  // "OpenSSL 3.0.17 1 Jul 2025"
};

struct CryptoLibrary {
    const char* name;     // of the file, which names its ABI
    unsigned long least;  // of OpenSSL_version_num
    unsigned long first_after;
};

// The first of these that is there, if it is what its name says and computes what it must.
// Nothing: `why` says why and what to do.
std::optional<Crypto> load_crypto(std::span<const CryptoLibrary> libraries, std::string& why);

// The one in use. Loaded once and never unloaded. Throws EngineError where there is none.
const Crypto& crypto();

}  // namespace pipemorph
