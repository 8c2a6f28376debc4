#include "wire/payload_guard.hpp"

#include <cstring>
#include <string_view>

#include "crypto/crc32c.hpp"

namespace pipemorph {
namespace {

// Key of payloads: frames use the connection's key itself.
Digest payload_key(const Digest& key) {
    constexpr std::string_view kFor = "payloads";
    return Hmac(key).update({reinterpret_cast<const uint8_t*>(kFor.data()), kFor.size()}).finish();
}

void copy(uint8_t* to, Bytes data) {
    if (to != data.data()) std::memcpy(to, data.data(), data.size());
}

}  // namespace

const char* name_of(Integrity integrity) {
    switch (integrity) {
        case Integrity::crc:
            return "crc";
        case Integrity::mac:
            return "mac";
        case Integrity::aead:
            return "aead";
    }
    return "?";
}

PayloadGuard::PayloadGuard(Integrity how, const Digest& key, End end) : how_(how), end_(end) {
    if (!is_keyed()) return;
    const bool decrypts = encrypts() && end == End::receives;
    cipher_.emplace(payload_key(key), decrypts ? AesGcm::Use::decrypt : AesGcm::Use::encrypt);
}

void PayloadGuard::begin(Bytes header) {
    crc_ = 0;
    if (!cipher_) return;
    cipher_->begin(place_++);
    cipher_->authenticate(header);
}

void PayloadGuard::pass(Bytes data) {
    if (cipher_)
        cipher_->authenticate(data);
    else
        crc_ = crc32c(crc_, data);
}

void PayloadGuard::store(uint8_t* to, Bytes data) {
    if (data.empty()) return;
    if (encrypts()) {
        cipher_->apply(to, data);
    } else if (cipher_) {
        // The MAC covers the copy, which is used afterwards: `data` may still be written by the
        // peer.
        copy(to, data);
        cipher_->authenticate({to, data.size()});
    } else {
        copy(to, data);
        crc_ = crc32c(crc_, {to, data.size()});
    }
}

Tag PayloadGuard::finish() {
    if (cipher_) return cipher_->tag();
    Tag out{};
    for (size_t i = 0; i < sizeof crc_; ++i) out[i] = static_cast<uint8_t>(crc_ >> (8 * i));
    return out;
}

bool PayloadGuard::fits(const Tag& said) {
    if (encrypts() && end_ == End::receives) return cipher_->fits(said);
    return equal_constant_time(finish(), said);
}

}  // namespace pipemorph
