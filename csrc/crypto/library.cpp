#include "crypto/library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <type_traits>

#include "base/error.hpp"

namespace pipemorph {
namespace {

constexpr CryptoLibrary kLibraries[] = {
    {"libcrypto.so.3", 0x30000000UL, 0x40000000UL},
    {"libcrypto.so.1.1", 0x10101000UL, 0x10200000UL},
};

// Option against a teardown at the process's end, when the engine's threads may still run. It has
// no effect if the library was used before, as by Python's hashlib.
constexpr uint64_t kNoAtExit = 0x00080000;

// RFC 4231, test case 2; twice, since the second begins without the key.
bool computes(const Crypto& c) {
    constexpr std::string_view kKey = "Jefe";
    constexpr std::string_view kData = "what do ya want for nothing?";
    constexpr std::array<unsigned char, 32> kExpected = {
        0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24,
        0x26, 0x08, 0x95, 0x75, 0xc7, 0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27,
        0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43};
    const std::unique_ptr<HmacContext, void (*)(HmacContext*)> context(c.hmac_new(), c.hmac_free);
    if (!context || c.sha256 == nullptr) return false;
    for (const bool first : {true, false}) {
        std::array<unsigned char, 64> out{};
        unsigned int size = 0;
        const bool done =
            c.hmac_begin(context.get(), first ? kKey.data() : nullptr,
                         first ? static_cast<int>(kKey.size()) : 0, first ? c.sha256 : nullptr,
                         nullptr) == 1 &&
            c.hmac_update(context.get(), reinterpret_cast<const unsigned char*>(kData.data()),
                          kData.size()) == 1 &&
            c.hmac_end(context.get(), out.data(), &size) == 1;
        if (!done || size != kExpected.size() ||
            !std::equal(kExpected.begin(), kExpected.end(), out.begin()))
            return false;
    }
    return true;
}

// Test case 13 of the submission that became NIST SP 800-38D: the tag of no text.
bool authenticates(const Crypto& c) {
    constexpr std::array<unsigned char, 32> kKey{};
    constexpr std::array<unsigned char, 12> kNonce{};
    constexpr std::array<unsigned char, 16> kExpected = {0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45,
                                                         0x36, 0xb9, 0xa9, 0x63, 0xb4, 0xf1,
                                                         0xc4, 0xcb, 0x73, 0x8b};
    const std::unique_ptr<CipherContext, void (*)(CipherContext*)> context(c.cipher_new(),
                                                                           c.cipher_free);
    if (!context || c.aes_256_gcm == nullptr) return false;
    unsigned char rest[16];
    std::array<unsigned char, 16> tag{};
    int size = 0;
    constexpr int kGetTag = 0x10;
    return c.encrypt_begin(context.get(), c.aes_256_gcm, nullptr, kKey.data(), kNonce.data()) ==
               1 &&
           c.encrypt_end(context.get(), rest, &size) == 1 &&
           c.cipher_control(context.get(), kGetTag, 16, tag.data()) == 1 && tag == kExpected;
}

std::optional<Crypto> take(void* library, const CryptoLibrary& expected, std::string& why) {
    const std::string name = expected.name;
    const auto find = [&](auto& function, const char* symbol) {
        // POSIX guarantees that a symbol's address fits a function pointer.
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
        if (function == nullptr && why.empty())
            why = name + " has no " + symbol + ": it is not OpenSSL's";
        return function != nullptr;
    };
    unsigned long (*number)() = nullptr;
    const char* (*version)(int) = nullptr;
    int (*init)(uint64_t, const void*) = nullptr;
    const DigestMethod* (*sha256)() = nullptr;
    const CipherMethod* (*aes_256_gcm)() = nullptr;
    Crypto c{};
    const bool complete =
        find(number, "OpenSSL_version_num") && find(version, "OpenSSL_version") &&
        find(init, "OPENSSL_init_crypto") && find(sha256, "EVP_sha256") &&
        find(c.hmac_new, "HMAC_CTX_new") && find(c.hmac_free, "HMAC_CTX_free") &&
        find(c.hmac_begin, "HMAC_Init_ex") && find(c.hmac_update, "HMAC_Update") &&
        find(c.hmac_end, "HMAC_Final") && find(aes_256_gcm, "EVP_aes_256_gcm") &&
        find(c.cipher_new, "EVP_CIPHER_CTX_new") && find(c.cipher_free, "EVP_CIPHER_CTX_free") &&
        find(c.cipher_control, "EVP_CIPHER_CTX_ctrl") &&
        find(c.encrypt_begin, "EVP_EncryptInit_ex") &&
        find(c.encrypt_update, "EVP_EncryptUpdate") && find(c.encrypt_end, "EVP_EncryptFinal_ex") &&
        find(c.decrypt_begin, "EVP_DecryptInit_ex") &&
        find(c.decrypt_update, "EVP_DecryptUpdate") && find(c.decrypt_end, "EVP_DecryptFinal_ex");
    if (!complete) return std::nullopt;
    c.version = version(0);
    if (number() < expected.least || number() >= expected.first_after) {
        why = name + " is " + c.version + ", whose interface does not match its name";
        return std::nullopt;
    }
    if (init(kNoAtExit, nullptr) != 1) {
        why = name + " (" + c.version + ") cannot be initialized";
        return std::nullopt;
    }
    c.sha256 = sha256();
    c.aes_256_gcm = aes_256_gcm();
    if (!computes(c)) {
        why = name + " (" + c.version + ") does not compute the HMAC-SHA256 of RFC 4231";
        return std::nullopt;
    }
    if (!authenticates(c)) {
        why = name + " (" + c.version + ") does not compute the AES-256-GCM of NIST SP 800-38D";
        return std::nullopt;
    }
    return c;
}

}  // namespace

std::optional<Crypto> load_crypto(std::span<const CryptoLibrary> libraries, std::string& why) {
    std::string missing;
    for (const CryptoLibrary& library : libraries) {
        // Local: other libraries may use another version, with the same names.
        void* handle = dlopen(library.name, RTLD_NOW | RTLD_LOCAL);
        if (handle != nullptr) {
            why.clear();
            if (auto found = take(handle, library, why)) return found;
            why += ": the engine needs OpenSSL 3 or 1.1.1 (Debian: libssl3)";
            return std::nullopt;
        }
        missing += (missing.empty() ? "" : "; ") + std::string(dlerror());
    }
    why = "OpenSSL's libcrypto cannot be loaded (" + missing +
          "): install OpenSSL 3 or 1.1.1 (Debian: libssl3)";
    return std::nullopt;
}

const Crypto& crypto() {
    static std::string why;
    static std::optional<Crypto> loaded = load_crypto(kLibraries, why);
    if (!loaded) throw EngineError(why);
    return *loaded;
}

}  // namespace pipemorph
