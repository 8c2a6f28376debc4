// SHA-256 (FIPS 180-4), in-house so that the wheel depends on no crypto library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pipemorph {

using Bytes = std::span<const uint8_t>;
using Digest = std::array<uint8_t, 32>;

class Sha256 {
  public:
    Sha256();
    void update(Bytes data);
    Digest finish();

  private:
    void compress(const uint8_t* block);

    std::array<uint32_t, 8> state_;
    std::array<uint8_t, 64> pending_{};
    size_t pending_size_ = 0;
    uint64_t total_ = 0;
};

Digest sha256(Bytes data);

}  // namespace pipemorph
