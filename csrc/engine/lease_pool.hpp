// Memory for payloads that the rails of a link read where they were written: registered with each
// rail, lent in pieces, and given back with the last reference to a piece, whoever drops it.
//
// It grows when a lease found nothing, and never shrinks: whoever writes there may have locked it
// for a device. What it has and what the rails' paths have staged beside is bounded as a whole.
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
    explicit LeasePool(uint64_t most_bytes) : left_(most_bytes) {}

    struct Piece {
        uint8_t* data = nullptr;
        // A card may read it as long as this lives, and nobody else gets it.
        std::shared_ptr<void> hold;
    };
    // Nothing: no piece that large is free.
    std::optional<Piece> take(uint64_t bytes);
    // What is to be added for such a lease that got nothing: so many bytes, as a call of `add`. 0:
    // nothing, since that is being done already, or may not be.
    uint64_t to_add(uint64_t bytes);
    // `registered`: with the rails that can reach it. Without memory: it cannot be had.
    void add(std::shared_ptr<Memory> memory,
             std::vector<std::shared_ptr<Registration>> registered = {});
    // All of it, while no piece is taken.
    void drop();
    std::vector<std::shared_ptr<Memory>> memory() const;
    // The device's key for an address; nothing if that is not in memory that it can reach.
    std::optional<uint32_t> key(const VerbsDevice& device, const uint8_t* data) const;

    // For memory of paths, within the same bounds. False: there is no room for that.
    bool claim(uint64_t bytes);
    void disclaim(uint64_t bytes);

  private:
    struct Segment {
        std::shared_ptr<Memory> memory;
        std::vector<std::shared_ptr<Registration>> registered;
        std::map<size_t, size_t> free;  // from where, so many bytes; no two that touch
    };
    void give_back(size_t segment, size_t offset, size_t bytes) noexcept;

    mutable std::mutex mu_;
    std::vector<Segment> segments_;
    uint64_t bytes_ = 0;
    uint64_t left_;  // that may be added or claimed
    bool growing_ = false;
    bool no_more_ = false;  // memory, or it cannot be registered
};

}  // namespace pipemorph
