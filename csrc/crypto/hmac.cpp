#include "crypto/hmac.hpp"

#include <sys/random.h>

#include <cerrno>
#include <stdexcept>

#include "base/error.hpp"
#include "crypto/library.hpp"

namespace pipemorph {
namespace {

void must(int done) {
    if (done != 1) throw EngineError("libcrypto cannot compute an HMAC-SHA256");
}

}  // namespace

void Hmac::Free::operator()(HmacContext* context) const {
    crypto().hmac_free(context);
}

Hmac::Hmac(Bytes key) : context_(crypto().hmac_new()) {
    must(context_ != nullptr);
    // A null key would mean the previous one.
    const void* data = key.empty() ? "" : static_cast<const void*>(key.data());
    must(crypto().hmac_begin(context_.get(), data, static_cast<int>(key.size()), crypto().sha256,
                             nullptr));
}

Hmac& Hmac::update(Bytes data) {
    must(crypto().hmac_update(context_.get(), data.data(), data.size()));
    return *this;
}

Digest Hmac::finish() {
    Digest out;
    must(crypto().hmac_end(context_.get(), out.data(), nullptr));
    must(crypto().hmac_begin(context_.get(), nullptr, 0, nullptr, nullptr));
    return out;
}

bool equal_constant_time(Bytes a, Bytes b) {
    if (a.size() != b.size()) return false;
    volatile uint8_t difference = 0;
    for (size_t i = 0; i < a.size(); ++i)
        difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
    return difference == 0;
}

void fill_random(std::span<uint8_t> out) {
    while (!out.empty()) {
        const ssize_t n = getrandom(out.data(), out.size(), 0);
        if (n < 0 && errno != EINTR) throw std::runtime_error("getrandom failed");
        if (n > 0) out = out.subspan(static_cast<size_t>(n));
    }
}

}  // namespace pipemorph
