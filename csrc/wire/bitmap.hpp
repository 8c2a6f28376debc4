// Bitmap of a message's chunks that are in the slot. Its test-and-set makes delivery exactly once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pipemorph {

class Bitmap {
  public:
    Bitmap() = default;
    explicit Bitmap(size_t size) : size_(size), bits_((size + 7) / 8) {}

    // Sets a bit. True if it was clear before.
    bool set(size_t i) {
        uint8_t& byte = bits_[i / 8];
        const auto mask = static_cast<uint8_t>(1 << (i % 8));
        if (byte & mask) return false;
        byte = static_cast<uint8_t>(byte | mask);
        ++count_;
        return true;
    }
    void clear(size_t i) {
        if (!test(i)) return;
        bits_[i / 8] = static_cast<uint8_t>(bits_[i / 8] & ~(1 << (i % 8)));
        --count_;
    }
    bool test(size_t i) const { return bits_[i / 8] >> (i % 8) & 1; }
    size_t size() const { return size_; }
    size_t count() const { return count_; }
    bool full() const { return count_ == size_; }
    const std::vector<uint8_t>& bytes() const { return bits_; }

  private:
    size_t size_ = 0;
    size_t count_ = 0;
    std::vector<uint8_t> bits_;
};

}  // namespace pipemorph
