#include "crypto/aes_gcm.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "crypto/library.hpp"

namespace pipemorph {
namespace {

constexpr int kGetTag = 0x10;
constexpr int kSetTag = 0x11;
constexpr size_t kNonceBytes = 12;
// libcrypto counts in int.
constexpr size_t kMost = size_t{1} << 30;

void must(int done) {
    if (done != 1) throw EngineError("libcrypto cannot compute AES-256-GCM");
}

}  // namespace

void AesGcm::Free::operator()(CipherContext* context) const {
    crypto().cipher_free(context);
}

AesGcm::AesGcm(const Digest& key, Use use) : context_(crypto().cipher_new()), use_(use) {
    must(context_ != nullptr);
    const Crypto& c = crypto();
    const auto begin = use == Use::encrypt ? c.encrypt_begin : c.decrypt_begin;
    must(begin(context_.get(), c.aes_256_gcm, nullptr, key.data(), nullptr));
}

void AesGcm::begin(uint64_t place) {
    std::array<uint8_t, kNonceBytes> nonce{};
    for (size_t i = 0; i < sizeof place; ++i) nonce[i] = static_cast<uint8_t>(place >> (8 * i));
    const Crypto& c = crypto();
    const auto begin = use_ == Use::encrypt ? c.encrypt_begin : c.decrypt_begin;
    must(begin(context_.get(), nullptr, nullptr, nullptr, nonce.data()));
}

void AesGcm::authenticate(Bytes data) {
    if (!data.empty()) apply(nullptr, data);
}

void AesGcm::apply(uint8_t* to, Bytes data) {
    const Crypto& c = crypto();
    const auto update = use_ == Use::encrypt ? c.encrypt_update : c.decrypt_update;
    while (!data.empty()) {
        const Bytes part = data.first(std::min(data.size(), kMost));
        int size = 0;
        must(update(context_.get(), to, &size, part.data(), static_cast<int>(part.size())));
        data = data.subspan(part.size());
        if (to != nullptr) to += part.size();
    }
}

Tag AesGcm::tag() {
    const Crypto& c = crypto();
    uint8_t rest[16];
    int size = 0;
    must(c.encrypt_end(context_.get(), rest, &size));
    Tag out;
    must(c.cipher_control(context_.get(), kGetTag, static_cast<int>(out.size()), out.data()));
    return out;
}

bool AesGcm::fits(const Tag& tag) {
    const Crypto& c = crypto();
    Tag said = tag;
    must(c.cipher_control(context_.get(), kSetTag, static_cast<int>(said.size()), said.data()));
    uint8_t rest[16];
    int size = 0;
    return c.decrypt_end(context_.get(), rest, &size) == 1;
}

}  // namespace pipemorph
