// Sending half of a link: queues of messages, credits, and the path of each chunk. Pure state, no
// sockets and no locks: the link calls it with its own lock held.
//
// A message completes only on the receiver's acknowledgement. A chunk is resent only after its
// path's epoch was fenced and the receiver has reported it as missing.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "base/error.hpp"
#include "wire/chunk.hpp"
#include "wire/frames.hpp"

namespace pipemorph {

struct OutMessage {
    MessageInfo info;
    const uint8_t* data = nullptr;
    std::shared_ptr<void> hold;  // keeps `data` alive
    int64_t started_steady_ns = 0;
    size_t queue = 0;
    uint64_t promised = 0;  // bytes of the slot reserved for it; 0: it waits for one
    std::optional<SlotGrant> slot;
    uint32_t chunks = 0;
    uint32_t next_chunk = 0;
    // Path and epoch of each chunk's last assignment.
    struct Carrier {
        uint32_t path = 0;
        uint32_t epoch = 0;
        bool confirmed = false;   // the receiver reported it after a fence
        int64_t assigned_ns = 0;  // by the watchdog's clock
    };
    std::vector<Carrier> carriers;
    uint32_t resend_count = 0;  // chunks that wait to be resent
    int64_t watched_ns = 0;     // time of the last assignment, or of a path given up for it
    uint32_t times_late = 0;
    // Connections lost with a chunk of it since the receiver last reported a new chunk: their
    // number, and by the watchdog's clock the times of the first and the last.
    uint64_t losses = 0;
    int64_t first_loss_ns = 0;
    int64_t last_loss_ns = 0;

    // True once all chunks were assigned: before, no acknowledgement is valid.
    bool was_sent() const { return chunks == 0 ? started_steady_ns != 0 : next_chunk == chunks; }
};

// Chunk for a path to carry. It keeps the payload alive.
struct ChunkTask {
    std::shared_ptr<OutMessage> message;
    ChunkHeader header;
    const uint8_t* data = nullptr;
    size_t bytes = 0;
};

class Outbox {
  public:
    Outbox(size_t queues, uint32_t chunk_bytes);

    // Posts a message. Throws EngineError for a key in flight or a message larger than any slot;
    // then nothing is posted. `leased`: slot that already has the payload.
    std::shared_ptr<OutMessage> post(MessageInfo info, const uint8_t* data,
                                     std::shared_ptr<void> hold,
                                     const std::optional<SlotGrant>& leased = std::nullopt);
    // Smallest free slot of at least `bytes`, to be filled before its message is posted. Never the
    // last one of its size: messages that are posted meanwhile need another slot.
    std::optional<SlotGrant> lease(int direction, uint64_t bytes);
    // Next empty message that may be sent on the control connection.
    std::optional<MessageInfo> next_inline(int64_t now_wall_ns, int64_t now_steady_ns);

    // Adds slots. A message that is too large for all known slots fails, so slots that arrive
    // together must be added together.
    void granted(std::span<const SlotGrant> grants);
    void granted(const SlotGrant& grant) { granted(std::span(&grant, 1)); }
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall_ns,
                                        int64_t now_steady_ns, int64_t clock_ns = 0);
    bool has_chunks() const;
    // Number of chunks that could be assigned now.
    uint64_t ready_chunks() const;

    std::shared_ptr<OutMessage> find(uint64_t id) const {
        const auto it = by_id_.find(id);
        return it == by_id_.end() ? nullptr : it->second;
    }
    // Completes a message. False: no such message is in flight.
    bool acknowledged(uint64_t message);

    // Messages with chunks assigned to a path's epoch, for a fence.
    std::vector<uint64_t> assigned_to(uint32_t path, uint32_t epoch) const;
    // Result of a fence: assignment time of the first missing chunk, by the watchdog's clock, and
    // true if a chunk has arrived that was unconfirmed before.
    struct Fenced {
        std::optional<int64_t> missing_since_ns;
        bool arrived = false;
    };
    Fenced fenced(const BitmapFrame& report, int64_t clock_ns = 0);

    // Bytes of the messages with assigned chunks.
    uint64_t bytes_under_way() const { return under_way_; }
    // Messages without a report on any chunk for `patience_ns` by the watchdog's clock, doubled for
    // each path that was given up for the message.
    std::vector<std::shared_ptr<OutMessage>> late(int64_t clock_ns, int64_t patience_ns) const;
    // Message that has waited longest since its first loss, or null. `repeated_after_ns`: least
    // time between its first and its last loss.
    std::shared_ptr<OutMessage> stuck(int64_t repeated_after_ns = 0) const;

    // Releases every payload, since the link is dead.
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

  private:
    using Pointer = std::shared_ptr<OutMessage>;
    void promise_slots(size_t direction);
    void take_slot(OutMessage& message);
    std::deque<Pointer>* next_queue();
    void fail(const Pointer& message, std::string why);
    void forget(const Pointer& message);
    ChunkTask assign_chunk(const Pointer& message, uint32_t index, uint32_t path, uint32_t epoch,
                           int64_t now_wall_ns, int64_t now_steady_ns, int64_t clock_ns);
    static std::string too_large(const MessageInfo& info, uint64_t largest);

    const size_t queues_;
    const uint32_t chunk_bytes_;
    uint64_t next_id_ = 1;
    std::array<size_t, kDirections> turn_{};
    // Queues; those of direction d are at [d * queues_, (d + 1) * queues_).
    std::vector<std::deque<Pointer>> queue_;
    uint64_t turns_ = 0;
    std::array<std::deque<Pointer>, kDirections> waiting_;  // for a slot, oldest first
    // Free slots of one size. `promised`: number of them that are reserved for messages.
    struct Credits {
        std::vector<SlotGrant> free;
        size_t promised = 0;
    };
    std::array<std::map<uint64_t, Credits>, kDirections> credits_;
    std::array<uint64_t, kDirections> largest_slot_{};
    std::deque<std::pair<Pointer, uint32_t>> resend_queue_;  // chunks lost with their path
    std::deque<Pointer> inline_;
    size_t inline_in_flight_ = 0;
    uint64_t under_way_ = 0;
    std::map<uint64_t, Pointer> by_id_;
    std::unordered_set<Key, KeyHash> keys_;
    std::map<uint64_t, std::string> failed_;  // reasons; empty for the oldest of very many
    std::deque<uint64_t> explained_;          // tickets with a stored reason, oldest first
    std::map<uint64_t, Pointer> abandoned_;   // without their messages
};

}  // namespace pipemorph
