// Little-endian reading and writing with bounds checks. A reader's failure is sticky: one check of
// `ok()` after the last field is enough, and nothing is read past the end.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.hpp"

namespace pipemorph {

class Writer {
  public:
    explicit Writer(std::vector<uint8_t>& out) : out_(out) {}

    void u8(uint8_t v) { out_.push_back(v); }
    void u16(uint16_t v) { integer(v); }
    void u32(uint32_t v) { integer(v); }
    void u64(uint64_t v) { integer(v); }
    void i64(int64_t v) { integer(static_cast<uint64_t>(v)); }
    void raw(Bytes data) {
        // A plain loop: gcc 12 warns of false overflows in the inlined range insert.
        for (const uint8_t byte : data) out_.push_back(byte);
    }
    void text(std::string_view s) {
        u16(static_cast<uint16_t>(s.size()));
        raw({reinterpret_cast<const uint8_t*>(s.data()), s.size()});
    }

  private:
    template <typename T>
    void integer(T v) {
        for (size_t i = 0; i < sizeof(T); ++i) out_.push_back(static_cast<uint8_t>(v >> (8 * i)));
    }

    std::vector<uint8_t>& out_;
};

class Reader {
  public:
    explicit Reader(Bytes data) : data_(data) {}

    uint8_t u8() { return integer<uint8_t>(); }
    uint16_t u16() { return integer<uint16_t>(); }
    uint32_t u32() { return integer<uint32_t>(); }
    uint64_t u64() { return integer<uint64_t>(); }
    int64_t i64() { return static_cast<int64_t>(integer<uint64_t>()); }

    Bytes raw(size_t n) {
        if (!ok_ || n > data_.size()) {
            ok_ = false;
            return {};
        }
        const Bytes head = data_.first(n);
        data_ = data_.subspan(n);
        return head;
    }

    template <size_t N>
    std::array<uint8_t, N> fixed() {
        std::array<uint8_t, N> out{};
        const Bytes data = raw(N);
        if (ok_) std::memcpy(out.data(), data.data(), N);
        return out;
    }

    std::string text(size_t limit) {
        const size_t n = u16();
        if (n > limit) ok_ = false;
        const Bytes data = raw(ok_ ? n : 0);
        return {data.begin(), data.end()};
    }

    size_t remaining() const { return data_.size(); }
    bool ok() const { return ok_; }
    // True if all bytes were read, and no more were needed.
    bool complete() const { return ok_ && data_.empty(); }

  private:
    template <typename T>
    T integer() {
        const Bytes data = raw(sizeof(T));
        if (!ok_) return 0;
        T v = 0;
        for (size_t i = 0; i < sizeof(T); ++i)
            v = static_cast<T>(v | static_cast<T>(data[i]) << (8 * i));
        return v;
    }

    Bytes data_;
    bool ok_ = true;
};

}  // namespace pipemorph
