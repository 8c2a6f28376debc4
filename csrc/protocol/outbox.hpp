// The sending half of a link: messages in their queues, credits, and which path each chunk took.
// Pure state, no sockets and no locks: the link calls it with its own lock held.
//
// A message completes only on the receiver's acknowledgement. A chunk is sent again only after
// its path's epoch was fenced and the receiver has said that it lacks it.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "base/error.hpp"
#include "protocol/telemetry.hpp"
#include "wire/chunk.hpp"
#include "wire/frames.hpp"

namespace pipemorph {

struct OutMessage {
    MessageInfo info;
    const uint8_t* data = nullptr;
    std::shared_ptr<void> hold;  // keeps `data` alive
    int64_t posted_steady_ns = 0;
    int64_t started_steady_ns = 0;
    size_t queue = 0;
    uint64_t promised = 0;  // bytes of the slot it may take; 0: it waits for one
    std::optional<SlotGrant> slot;
    uint32_t chunks = 0;
    uint32_t next_chunk = 0;
    // Path and epoch that each chunk was last given to.
    struct Carrier {
        uint32_t path = 0;
        uint32_t epoch = 0;
        bool confirmed = false;  // the receiver reported it after a fence
        int64_t given_ns = 0;    // by the watchdog's clock
    };
    std::vector<Carrier> carriers;
    uint32_t again = 0;      // chunks that wait to be sent again
    int64_t watched_ns = 0;  // when a chunk was given last, or a path was given up for it
    uint32_t times_late = 0;
    // Connections that were lost with a chunk of it since the receiver last had one that it had not
    // reported before: how many, and by the watchdog's clock when the first and the last.
    uint64_t losses = 0;
    int64_t first_loss_ns = 0;
    int64_t last_loss_ns = 0;

    // Before that it cannot be anywhere else.
    bool was_sent() const { return chunks == 0 ? started_steady_ns != 0 : next_chunk == chunks; }
};

// One chunk for a path to carry. Holding it keeps the payload alive.
struct ChunkTask {
    std::shared_ptr<OutMessage> message;
    ChunkHeader header;
    const uint8_t* data = nullptr;
    size_t bytes = 0;
};

class Outbox {
  public:
    Outbox(size_t queues, uint32_t chunk_bytes);

    // Throws EngineError for a key in flight or a message larger than any slot, and has then posted
    // nothing, as where there is no memory. `leased`: the slot that its payload is in already.
    std::shared_ptr<OutMessage> post(MessageInfo info, const uint8_t* data,
                                     std::shared_ptr<void> hold, int64_t now_steady_ns,
                                     const std::optional<SlotGrant>& leased = std::nullopt);
    // A free slot, the smallest that holds so many bytes, to be filled before its message is
    // posted. Never the last one of its size: messages that are posted meanwhile go through the
    // others, whatever the application waits for before it posts this one.
    std::optional<SlotGrant> lease(int direction, uint64_t bytes);
    // An empty message that may go out on the control connection now.
    std::optional<MessageInfo> next_inline(int64_t now_wall_ns, int64_t now_steady_ns);

    // What is too large for all slots that are known fails. So slots that came together are granted
    // together: one of them may be a message's, however small the others are.
    void granted(std::span<const SlotGrant> grants);
    void granted(const SlotGrant& grant) { granted(std::span(&grant, 1)); }
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall_ns,
                                        int64_t now_steady_ns, int64_t clock_ns = 0);
    bool has_chunks() const;
    // How many could be given to a path right now.
    uint64_t ready_chunks() const;

    std::shared_ptr<OutMessage> find(uint64_t id) const {
        const auto it = by_id_.find(id);
        return it == by_id_.end() ? nullptr : it->second;
    }
    // One that was sent. False: no such message is in flight.
    bool acknowledged(uint64_t message, int64_t now_steady_ns);

    // The messages with chunks entrusted to a path's epoch: what to ask the receiver about.
    std::vector<uint64_t> entrusted_to(uint32_t path, uint32_t epoch) const;
    // Chunks of that epoch: when the first of those that are missing was given, by the watchdog's
    // clock, and whether some have arrived of which that was not known.
    struct Fenced {
        std::optional<int64_t> missing_since_ns;
        bool arrived = false;
    };
    Fenced fenced(const BitmapFrame& report, int64_t clock_ns = 0);

    // Bytes of the messages that have been given to paths, whole or in part.
    uint64_t bytes_under_way() const { return under_way_; }
    // Of all chunks of these messages nothing was heard for `patience_ns` by the watchdog's clock,
    // doubled with each time that a path was given up for the message.
    std::vector<std::shared_ptr<OutMessage>> late(int64_t clock_ns, int64_t patience_ns) const;
    // The message that has waited longest since its first loss; null: there is none. `again_after`:
    // one of which a chunk was lost so long after that as well.
    std::shared_ptr<OutMessage> stuck(int64_t again_after_ns = 0) const;

    // The link is dead: let go of every payload.
    void abandon() noexcept;

    enum class Ticket { unknown, in_flight, done, failed, abandoned };
    Ticket ticket(uint64_t id) const;
    std::string failure(uint64_t id) const;
    size_t in_flight() const { return by_id_.size(); }
    uint64_t largest_slot(int direction) const { return largest_slot_[size_t(direction)]; }
    size_t credits(int direction) const;
    std::string describe(uint64_t id) const;

    uint64_t chunks_resent = 0;
    uint64_t messages_sent = 0;
    uint64_t bytes_sent = 0;
    SentRing telemetry;

  private:
    using Pointer = std::shared_ptr<OutMessage>;
    void promise_slots(size_t direction);
    void take_slot(OutMessage& message);
    std::deque<Pointer>* next_queue();
    void fail(const Pointer& message, std::string why);
    void forget(const Pointer& message);
    ChunkTask give(const Pointer& message, uint32_t index, uint32_t path, uint32_t epoch,
                   int64_t now_wall_ns, int64_t now_steady_ns, int64_t clock_ns);
    static std::string too_large(const MessageInfo& info, uint64_t largest);

    const size_t queues_;
    const uint32_t chunk_bytes_;
    uint64_t next_id_ = 1;
    std::array<size_t, kDirections> turn_{};
    // Direction d's queues are at [d * queues_, (d + 1) * queues_).
    std::vector<std::deque<Pointer>> queue_;
    uint64_t turns_ = 0;
    std::array<std::deque<Pointer>, kDirections> waiting_;  // for a slot, oldest first
    // Slots of one size that are free here. `promised`: as many of them are somebody's already.
    struct Credits {
        std::vector<SlotGrant> free;
        size_t promised = 0;
    };
    std::array<std::map<uint64_t, Credits>, kDirections> credits_;
    std::array<uint64_t, kDirections> largest_slot_{};
    std::deque<std::pair<Pointer, uint32_t>> again_;  // chunks lost with their path
    std::deque<Pointer> inline_;
    size_t inline_in_flight_ = 0;
    uint64_t under_way_ = 0;
    std::map<uint64_t, Pointer> by_id_;
    std::unordered_set<Key, KeyHash> keys_;
    std::map<uint64_t, std::string> failed_;  // why; of the oldest of very many empty
    std::deque<uint64_t> explained_;          // those of which the reason is kept, oldest first
    std::map<uint64_t, Pointer> abandoned_;   // without their messages
};

}  // namespace pipemorph
