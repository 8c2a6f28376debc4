#include "crypto/hmac.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace pipemorph {

Hmac::Hmac(Bytes key) {
    std::array<uint8_t, 64> block{};
    if (key.size() > block.size()) {
        const Digest short_key = sha256(key);
        std::copy(short_key.begin(), short_key.end(), block.begin());
    } else {
        std::copy(key.begin(), key.end(), block.begin());
    }
    std::array<uint8_t, 64> inner_pad;
    std::array<uint8_t, 64> outer_pad;
    for (size_t i = 0; i < block.size(); ++i) {
        inner_pad[i] = block[i] ^ 0x36;
        outer_pad[i] = block[i] ^ 0x5c;
    }
    inner_.update(inner_pad);
    outer_.update(outer_pad);
    now_ = inner_;
}

Hmac& Hmac::update(Bytes data) {
    now_.update(data);
    return *this;
}

Digest Hmac::finish() {
    const Digest inner = now_.finish();
    now_ = inner_;
    Sha256 outer = outer_;
    outer.update(inner);
    return outer.finish();
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
