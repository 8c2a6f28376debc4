// Receiving half of a link: slots, the chunks in them, and the mailbox of complete messages. Pure
// state, no sockets and no locks: the link calls it with its own lock held.
//
// A slot goes granted → receiving → full → held → granted. Its serial number rises with every grant
// and is never reset, which reveals a chunk for an earlier use of the slot.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>

#include "os/memory.hpp"
#include "wire/bitmap.hpp"
#include "wire/chunk.hpp"
#include "wire/frames.hpp"

namespace pipemorph {

// Complete message. `keep` keeps its bytes mapped.
struct Arrived {
    MessageInfo info;
    int64_t arrived_ns = 0;  // wall clock
    uint8_t* data = nullptr;
    std::optional<uint32_t> slot;  // empty messages have none
    uint64_t serial = 0;
    std::shared_ptr<void> keep;
};

// Destination of a chunk's bytes while they are read, without the lock.
struct ChunkSink {
    enum class Verdict { take, duplicate, stale, invalid };
    Verdict verdict = Verdict::invalid;
    uint8_t* data = nullptr;  // only for `take`; the others are read and dropped
    uint32_t slot = 0;
    uint64_t serial = 0;
    uint32_t index = 0;
    uint32_t path = 0;  // over which it comes
    uint32_t epoch = 0;
    std::shared_ptr<void> keep;
};

class Inbox {
  public:
    // Slots of one size. A reservation of n slots has the places below n; slots of a place are
    // never removed.
    struct Room {
        uint32_t place = 0;
        uint32_t slots = 0;
        uint64_t bytes = 0;  // of each
    };
    // Rooms to add for `wanted` slots of at least `bytes` in one direction. A new slot of a place
    // is at least as large as the other slots there together, so that changing sizes do not add up:
    // a place has less than four times its largest request.
    std::vector<Room> missing(int direction, uint32_t wanted, uint64_t bytes) const;
    // Adds slots inside `memory`. `grant_segment` grants them: at once for TCP, and for shared
    // memory once the peer has mapped the segment.
    uint32_t add_segment(int direction, const Room& room, std::shared_ptr<Memory> memory);
    std::vector<SlotGrant> grant_segment(uint32_t segment);
    std::shared_ptr<Memory> segment(uint32_t number) const;
    const std::vector<std::shared_ptr<Memory>>& segments() const { return segments_; }

    ChunkSink begin_chunk(const ChunkHeader& header);
    // `intact`: all bytes of the chunk are in the slot and the checksum is right. The result names
    // the message that the chunk completed, if any.
    struct Finished {
        bool message_complete = false;
        uint64_t message = 0;
        uint64_t bytes = 0;
    };
    Finished finish_chunk(const ChunkSink& sink, bool intact, int64_t now_wall_ns);
    void deliver_empty(MessageInfo info, int64_t now_wall_ns);

    std::vector<ChunkReport> report(const std::vector<uint64_t>& messages) const;

    bool has(const Key& key) const { return mailbox_.contains(key); }
    std::optional<Arrived> take(const Key& key);
    // Releases a slot of the application; returns its next grant. Empty if it was released before.
    std::optional<SlotGrant> release(uint32_t slot, uint64_t serial);

    // Progress of a message, for error texts.
    struct Progress {
        uint64_t chunks = 0;
        uint64_t of = 0;
    };
    std::optional<Progress> progress(const Key& key) const;
    // Extent of all slots of a direction: their bytes, the largest one's bytes, and their places.
    struct Extent {
        uint64_t bytes = 0;
        uint64_t largest = 0;
        uint32_t places = 0;
    };
    Extent extent(int direction) const;
    uint32_t slots(int direction) const;
    uint32_t slots_in_use(int direction) const;

  private:
    enum class State { reserved, granted, receiving, full, held };
    struct Slot {
        State state = State::reserved;
        uint8_t direction = 0;
        uint32_t place = 0;
        uint32_t segment = 0;
        uint64_t offset = 0;
        uint64_t bytes = 0;
        uint64_t serial = 0;
        MessageInfo message;
        uint32_t chunk_bytes = 0;
        Bitmap claimed;  // being read now
        Bitmap arrived;
    };

    SlotGrant grant(uint32_t number);

    std::vector<Slot> slots_;
    std::vector<std::shared_ptr<Memory>> segments_;
    std::unordered_map<uint64_t, uint32_t> receiving_;  // incomplete message → slot
    std::unordered_map<Key, std::deque<Arrived>, KeyHash> mailbox_;
};

}  // namespace pipemorph
