// Pool of memory for payloads that the rails of a link read in place. It is registered with each
// rail and leased in pieces. The last reference to a piece returns it, on any thread.
//
// The pool grows after a lease without a free piece, and never shrinks: the application may have
// page-locked it for a device. Its memory and the staging of the rails' paths have a common limit.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "os/memory.hpp"
#include "verbs/rail.hpp"

namespace pipemorph {

// Any thread.
class LeasePool : public std::enable_shared_from_this<LeasePool> {
  public:
    explicit LeasePool(uint64_t most_bytes) : available_(most_bytes) {}

    struct Piece {
        uint8_t* data = nullptr;
        // A card may read the piece as long as this lives, and it is not leased again.
        std::shared_ptr<void> hold;
    };
    // Takes a piece; empty if none of that size is free.
    std::optional<Piece> take(uint64_t bytes);
    // Bytes to `add` for such a lease that got no piece. 0: growth is in progress, or not allowed.
    uint64_t to_add(uint64_t bytes);
    // Adds memory. `registered`: with the rails that can reach it. Null: there is no memory.
    void add(std::shared_ptr<Memory> memory,
             std::vector<std::shared_ptr<Registration>> registered = {});
    // Drops all memory, while no piece is leased.
    void drop();
    std::vector<std::shared_ptr<Memory>> memory() const;
    // Key of the device for an address; empty if it cannot reach it.
    std::optional<uint32_t> key(const VerbsDevice& device, const uint8_t* data) const;

    // Reserves memory of paths within the same limit. False: it is exceeded.
    bool claim(uint64_t bytes);
    void disclaim(uint64_t bytes);

  private:
    struct Segment {
        std::shared_ptr<Memory> memory;
        std::vector<std::shared_ptr<Registration>> registered;
        std::map<size_t, size_t> free;  // offset → bytes; never adjacent
    };
    void return_piece(size_t segment, size_t offset, size_t bytes) noexcept;

    mutable std::mutex mu_;
    std::vector<Segment> segments_;
    uint64_t bytes_ = 0;
    uint64_t available_;  // bytes that may be added or claimed
    bool growing_ = false;
    bool no_more_ = false;  // no memory, or it cannot be registered
};

}  // namespace pipemorph
