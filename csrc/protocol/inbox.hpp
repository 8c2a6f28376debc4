// The receiving half of a link: slots, the chunks in them, and the mailbox of whole messages.
// Pure state, no sockets and no locks: the link calls it with its own lock held.
//
// A slot goes granted → receiving → full → held → granted. Its serial number rises every time it
// is granted and is never reset, so a chunk meant for an earlier use of the slot can be told.
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

// A message that is all here. `keep` keeps its bytes mapped while anybody looks at them.
struct Arrived {
    MessageInfo info;
    int64_t arrived_ns = 0;  // wall clock
    uint8_t* data = nullptr;
    std::optional<uint32_t> slot;  // empty messages have none
    uint64_t serial = 0;
    std::shared_ptr<void> keep;
};

// Where a chunk's bytes go while they are being read, without the lock.
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
    // Slots of one size. A reservation of n slots has the places below n; whatever was ever added
    // for a place is there for good.
    struct Room {
        uint32_t place = 0;
        uint32_t slots = 0;
        uint64_t bytes = 0;  // of each
    };
    // What has to be added for `wanted` slots of at least `bytes` in one direction. A new slot of
    // a place is at least as large as the others there together, so that sizes which change for
    // ever do not add up: a place has less than four times the most that was asked of it.
    std::vector<Room> missing(int direction, uint32_t wanted, uint64_t bytes) const;
    // Adds slots inside `memory`. They are granted when `grant_segment` says so: at once for
    // TCP, once the peer has mapped the segment for shared memory.
    uint32_t add_segment(int direction, const Room& room, std::shared_ptr<Memory> memory);
    std::vector<SlotGrant> grant_segment(uint32_t segment);
    std::shared_ptr<Memory> segment(uint32_t number) const;
    const std::vector<std::shared_ptr<Memory>>& segments() const { return segments_; }

    ChunkSink begin_chunk(const ChunkHeader& header);
    // `intact`: all its bytes are in the slot and the checksum is right. Returns whether that
    // completed its message.
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
    // The application is done with it: the slot's next grant. Nothing if it was released before.
    std::optional<SlotGrant> release(uint32_t slot, uint64_t serial);

    // For messages to humans and for counters.
    struct Progress {
        uint64_t chunks = 0;
        uint64_t of = 0;
    };
    std::optional<Progress> progress(const Key& key) const;
    // All slots of a direction: their bytes, the bytes of the largest, and the places they have.
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
        Bitmap claimed;  // being read right now
        Bitmap here;
    };

    SlotGrant grant(uint32_t number);

    std::vector<Slot> slots_;
    std::vector<std::shared_ptr<Memory>> segments_;
    std::unordered_map<uint64_t, uint32_t> receiving_;  // message → slot, until it is complete
    std::unordered_map<Key, std::deque<Arrived>, KeyHash> mailbox_;
};

}  // namespace pipemorph
