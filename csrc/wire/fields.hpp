// Fields of a struct on the wire, listed once for both directions: an overload of `fields(io,
// value)` passes them to `io`, a FieldWriter or a FieldReader, in their order.
#pragma once

#include <concepts>
#include <type_traits>

#include "wire/bytes.hpp"

namespace pipemorph {

// `Value` is T, const where it is written.
template <class Value, class T>
concept Is = std::same_as<std::remove_const_t<Value>, T>;

constexpr size_t kMostText = 1024;

// Writes integers and enums in their width, lists after their length, and structs by their fields.
class FieldWriter {
  public:
    explicit FieldWriter(std::vector<uint8_t>& out) : w_(out) {}

    template <class... T>
    void operator()(const T&... values) {
        (put(values), ...);
    }
    void bytes(Bytes data, size_t) { w_.raw(data); }

  private:
    template <class T>
    void put(const T& v) {
        if constexpr (std::integral<T> || std::is_enum_v<T>) {
            if constexpr (sizeof(T) == 1) w_.u8(static_cast<uint8_t>(v));
            if constexpr (sizeof(T) == 2) w_.u16(v);
            if constexpr (sizeof(T) == 4) w_.u32(v);
            if constexpr (sizeof(T) == 8) w_.u64(static_cast<uint64_t>(v));
        } else if constexpr (std::same_as<T, std::string>) {
            w_.text(std::string_view(v).substr(0, kMostText));
        } else if constexpr (requires { std::tuple_size<T>::value; }) {
            w_.raw(v);
        } else if constexpr (requires { v.size(); }) {
            w_.u32(static_cast<uint32_t>(v.size()));
            for (const auto& each : v) put(each);
        } else {
            fields(*this, v);
        }
    }

    Writer w_;
};

class FieldReader {
  public:
    explicit FieldReader(Bytes data) : r_(data) {}

    template <class... T>
    void operator()(T&... values) {
        (get(values), ...);
    }
    void bytes(std::vector<uint8_t>& out, size_t n) {
        const Bytes data = r_.raw(n);
        out.assign(data.begin(), data.end());
    }
    // True if every field was present and valid, and no bytes remain.
    bool complete() const { return r_.complete() && !bad_; }

  private:
    template <class T>
    void get(T& v) {
        if constexpr (std::same_as<T, bool>) {
            const uint8_t byte = r_.u8();
            bad_ |= byte > 1;
            v = byte == 1;
        } else if constexpr (std::integral<T> || std::is_enum_v<T>) {
            if constexpr (sizeof(T) == 1) v = static_cast<T>(r_.u8());
            if constexpr (sizeof(T) == 2) v = r_.u16();
            if constexpr (sizeof(T) == 4) v = r_.u32();
            if constexpr (sizeof(T) == 8) v = static_cast<T>(r_.u64());
        } else if constexpr (std::same_as<T, std::string>) {
            v = r_.text(kMostText);
        } else if constexpr (requires { std::tuple_size<T>::value; }) {
            v = r_.fixed<std::tuple_size_v<T>>();
        } else if constexpr (requires { v.size(); }) {
            // The length may claim billions: it counts only as far as there are bytes.
            for (size_t rest = r_.u32(); rest > 0 && r_.ok(); --rest) get(v.emplace_back());
        } else {
            fields(*this, v);
        }
    }

    Reader r_;
    bool bad_ = false;
};

}  // namespace pipemorph
