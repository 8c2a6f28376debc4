// Mapped, prefaulted memory for slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "os/fd.hpp"

namespace pipemorph {

class Memory {
  public:
    // Size that `anonymous` and `shareable` map for `bytes`.
    static size_t mapped(size_t bytes);
    // All three throw EngineError with the size and the system's reason.
    static std::shared_ptr<Memory> anonymous(size_t bytes);
    // Memory of a memfd. It has no name, so it vanishes with the processes. It is sealed, so that
    // the peer can map it but not shrink it.
    static std::shared_ptr<Memory> shareable(size_t bytes);
    // Reason for which there can be no shareable memory, as under some sandboxes; empty: none.
    static std::string why_not_shareable();
    // Maps a peer's memfd. Refuses one that could still be shrunk.
    static std::shared_ptr<Memory> map_peer(const Fd& fd, size_t bytes);

    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory();

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    int fd() const { return fd_.get(); }

  private:
    Memory(uint8_t* data, size_t size, Fd fd) : data_(data), size_(size), fd_(std::move(fd)) {}

    uint8_t* data_;
    size_t size_;
    Fd fd_;
};

}  // namespace pipemorph
