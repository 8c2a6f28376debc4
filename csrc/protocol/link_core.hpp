// Rules of a link: the meaning of its events, and the actions that follow. No sockets, threads,
// clocks or locks, so that a simulation can run the same code as a job.
//
// The owner of a core reports events to it, one at a time, with the current time where needed, and
// then carries out the result of `take_actions`.
#pragma once

#include <set>

#include "protocol/inbox.hpp"
#include "protocol/outbox.hpp"
#include "protocol/path_set.hpp"
#include "protocol/reliable.hpp"
#include "protocol/watchdog.hpp"

namespace pipemorph {

// Actions for the link, in this order.
struct Actions {
    // Offers of queue pairs to withdraw, by path.
    std::vector<uint32_t> withdraw;
    // Connections to give up, on their own thread: their rail is quarantined, or their chunks do
    // not arrive.
    struct Fail {
        uint32_t path = 0;
        std::string why;
    };
    std::vector<Fail> fail;
    // Slots to add, since the application empties them faster than they return; then `grown`.
    struct Grow {
        int direction = 0;
        Inbox::Room room;
    };
    std::vector<Grow> grow;
    // Connections of a path to retire up to an epoch, on the path's own thread, so that no byte can
    // reach a slot afterwards. Then `retired`, and a retry for those that cannot be retired yet.
    struct Retire {
        uint32_t path = 0;
        uint32_t epoch = 0;
    };
    std::vector<Retire> retire;
    bool flush = false;            // write control frames
    bool notify = false;           // notify the paths of chunks to send
    bool wake = false;             // wake waiting threads
    bool signal_notifier = false;  // ... and signal the application's eventfd
    bool dial = false;             // dial the paths of `due`
};

class LinkCore {
  public:
    struct Settings {
        bool dials = false;
        uint32_t peer_rank = 0;
        size_t queues = 1;
        uint32_t chunk_bytes = 0;
        // Bytes of memory for messages under way: limit of the staging for rails, and of the
        // receive slots that are added to a direction.
        uint64_t flight_bytes = uint64_t{512} << 20;
        // Least time before a message is late.
        int64_t patience_ns = 5'000'000'000;
        // Time after which a link without any path, or without any delivery, ends.
        int64_t give_up_ns = 10'000'000'000;
    };
    struct Counters {
        uint64_t messages_received = 0;
        uint64_t bytes_received = 0;
        uint64_t duplicate_chunks = 0;
        uint64_t stale_chunks = 0;
        uint64_t paths_remade = 0;
        uint64_t late_messages = 0;  // each ended a path
    };

    explicit LinkCore(const Settings& settings);

    Actions take_actions() { return std::exchange(actions_, {}); }

    const Outbox& out() const { return out_; }
    const Inbox& in() const { return in_; }
    const PathSet& paths() const { return paths_; }
    const Counters& counters() const { return counters_; }
    // The control connection writes and acknowledges its frames.
    ReliableStream& stream() { return stream_; }
    const ReliableStream& stream() const { return stream_; }

    // --- Setting up ---
    void assign_paths(const std::vector<std::pair<uint32_t, uint32_t>>& rails, Transport others,
                      size_t count) {
        paths_.assign(rails, others, count);
    }
    void start(int64_t now_ns) { paths_.start(now_ns); }
    void send(const Frame& frame);
    // Puts waiting acknowledgements and grants into the stream, in one frame, before it is written.
    void collect();
    // True if the peer has at most one free slot of this direction because grants wait.
    bool is_short_of_slots(int direction) const;

    // --- The application ---
    // Queues a message; `posted` must follow. If it throws, nothing was queued.
    std::shared_ptr<OutMessage> enqueue(MessageInfo info, const uint8_t* data,
                                        std::shared_ptr<void> hold,
                                        const std::optional<SlotGrant>& leased = std::nullopt) {
        return out_.post(std::move(info), data, std::move(hold), leased);
    }
    void posted(const OutMessage& message, int64_t now_wall_ns, int64_t now_ns);
    // Calls enqueue(), then posted().
    std::shared_ptr<OutMessage> post(MessageInfo info, const uint8_t* data,
                                     std::shared_ptr<void> hold, int64_t now_wall_ns,
                                     int64_t now_ns,
                                     const std::optional<SlotGrant>& leased = std::nullopt) {
        auto message = enqueue(std::move(info), data, std::move(hold), leased);
        posted(*message, now_wall_ns, now_ns);
        return message;
    }
    // Leases a slot of the peer, which the application fills before it posts the message.
    std::optional<SlotGrant> lease(int direction, uint64_t bytes) {
        return out_.lease(direction, bytes);
    }
    // Ends a lease without a message.
    void end_lease(const SlotGrant& slot);
    std::optional<Arrived> take(const Key& key);
    // Releases a slot. `at_once`: grant it now; else with the next frame, for which at most two
    // grants wait.
    void release(uint32_t slot, uint64_t serial, bool at_once);
    // Adds slots. `grant_room` grants them, or the peer's mapping of them (`shared`).
    uint32_t add_room(int direction, const Inbox::Room& room, std::shared_ptr<Memory> memory,
                      bool shared);
    // Announces the memory of a segment for one of our rails. A rail without bytes is quarantined
    // for the reason `error`.
    void add_region(const RegionFrame& region, const std::string& error, int64_t now_ns);
    void grant_room(uint32_t segment) { grant(in_.grant_segment(segment)); }
    // Shared memory: the next segment to offer to the peer.
    std::optional<uint32_t> next_segment_to_offer();
    // Releases the application's payloads: the link is over.
    void abandon() noexcept { out_.abandon(); }
    // Releases the inbox, when no message of it is in use.
    Inbox drop_inbox() { return std::exchange(in_, Inbox()); }

    // --- The peer's frames ---
    // True for grants, messages, acknowledgements, fences and regions.
    static bool handles(const Frame& frame);
    // Handles a frame. Returns a violation of the protocol, or an empty text.
    std::string handle(Frame& frame, int64_t now_wall_ns, int64_t now_ns);
    void mapped(uint32_t segment);

    // --- Paths ---
    std::vector<PathSet::Call> due(int64_t now_ns) { return paths_.due(now_ns); }
    void dial_failed(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns) {
        paths_.dial_failed(path, epoch, why, now_ns);
    }
    // Attaches a connection, which carries from now on. `local_thread`: its thread, if it is a
    // socket between two processes of one host. False: it is fenced or superseded.
    bool attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                int64_t now_ns);
    // Records a lost connection, which can no longer write. False: the loss was known.
    bool path_lost(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns);
    // Records the epochs that were retired after `Actions::retire`.
    void retired(uint32_t path, const std::vector<uint32_t>& epochs, int64_t now_ns);

    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall_ns,
                                        int64_t now_ns);
    // Limits a connection to a window: it reports deliveries from now on.
    void pace(uint32_t path, uint32_t epoch) { paths_.pace(path, epoch); }
    // Limits the bytes under way to the connection's memory.
    void limit(uint32_t path, uint32_t epoch, uint64_t most) { paths_.limit(path, epoch, most); }
    // Records the delivery of the connection's oldest chunk under way.
    void delivered(uint32_t path, uint32_t epoch, int64_t now_ns) {
        paths_.delivered(path, epoch, now_ns);
    }
    ChunkSink begin_chunk(const ChunkHeader& header);
    // Returns the bytes of the message that this chunk has completed; 0 if none.
    uint64_t finish_chunk(const ChunkSink& sink, bool intact, int64_t now_wall_ns);
    // Counts a dropped chunk of a fenced epoch.
    void stale_chunk() { ++counters_.stale_chunks; }

    // --- Rails ---
    // Dialler: offers the queue pair of a path that was due; `error`: error of making it. True if
    // it was offered.
    bool offer(uint32_t path, uint32_t epoch, const QpAddress& qp, std::string error,
               int64_t now_ns);
    // Acceptor: true if this offer needs a queue pair.
    bool take_offer(const OfferFrame& offer);
    // Acceptor: answers with the connected queue pair, or with `error`. True: it is current.
    bool answer(const OfferFrame& offer, const QpAddress& qp, std::string error, int64_t now_ns);
    // Dialler: true if its queue pair must be connected to this answer.
    bool take_answer(const AnswerFrame& answer, int64_t now_ns);
    // Dialler: records the connection, or `error`. True: it is current.
    bool connected(uint32_t path, uint32_t epoch, std::string error, int64_t now_ns);
    // Records an acknowledged probe. False: the epoch is over.
    bool path_up(uint32_t path, uint32_t epoch, int64_t now_ns);
    void path_suspect(uint32_t path, uint32_t epoch, bool suspicious, int64_t now_ns);
    void path_measured(uint32_t path, uint32_t epoch, double bytes_per_second, int64_t now_ns) {
        paths_.measured(path, epoch, bytes_per_second, now_ns);
    }
    // To be called regularly. `recovered`: a port has come up since the last call.
    void check_rails(bool recovered, int64_t now_ns);

    // --- Long links ---
    // Records a frame of the peer.
    void frame_received(int64_t now_ns) { watchdog_.frame_received(now_ns); }
    void echoed(int64_t rtt_ns, int64_t now_ns) { watchdog_.echoed(rtt_ns, now_ns); }
    // To be called regularly: handles late messages and a lack of slots. Returns the reason for
    // which the link must end: it has messages to send, and no path delivers.
    std::string check_flow(int64_t now_ns);
    // Errors of the paths, also of those that are up, now or in the last half minute; else empty.
    std::string path_errors(int64_t now_ns) const;
    // Ends `Actions::grow`. `there`: the slots were added; else there is no memory for more.
    void grown(int direction, bool there);

    void discount_pause(int64_t passed_ns, int64_t now_ns) {
        paths_.discount_pause(passed_ns, now_ns);
    }

  private:
    void send_empty_messages(int64_t now_wall_ns, int64_t now_ns);
    void acknowledge(uint64_t message);
    void acknowledge_empty(uint64_t message);
    void grant(const std::vector<SlotGrant>& grants);
    void replace(uint32_t path);
    void lose(uint32_t path, const std::string& why, int64_t now_ns);
    void send_fence(uint32_t path, uint32_t epoch);
    void answer_fence(const FenceFrame& fence);
    void changed() { actions_.wake = actions_.signal_notifier = true; }
    void note_carrier(int64_t now_ns) {
        if (!paths_.note_carrier(now_ns)) return;
        watchdog_.carrier_changed();
        changed();
    }
    void give_up_late_paths();
    void note_progress() { carried_ns_ = watchdog_.clock_ns(); }
    std::string why_stuck();
    std::string last_loss() const;
    void fail_suspect_path(OutMessage& message);
    // `silent_ns`: time without an arrival.
    void reduce_segments(uint32_t path, uint32_t epoch, int64_t silent_ns);
    void grow_slots(int direction, int64_t now_ns);
    void record_emptied(const SlotGrant& slot) { turnover_[slot.direction].bytes += slot.bytes; }
    std::string why_not_connected(uint32_t path, uint32_t epoch) const;
    void withdraw(uint32_t path, const std::string& why, int64_t now_ns);
    void quarantine_rail(bool ours, uint32_t rail, const std::string& why, int64_t now_ns);
    void count_remade(uint32_t path) {
        if (paths_[path].machine.times_up() > 0) ++counters_.paths_remade;
    }

    const bool dials_;
    const uint32_t peer_rank_;
    Outbox out_;
    Inbox in_;
    ReliableStream stream_;
    PathSet paths_;
    Counters counters_;
    Actions actions_;
    AckFrame pending_acks_;  // acknowledgements and grants for the next frame
    // Empty messages that the application has not read, and those of them whose acknowledgement
    // waits for that.
    size_t unread_empty_ = 0;
    std::deque<uint64_t> unacknowledged_empty_;
    uint32_t deferred_grants_ = 0;  // grants that were released since the last flush
    Watchdog watchdog_;
    const int64_t give_up_ns_;
    // By the watchdog's clock: last time of a path that was up, a delivery, or nothing to send.
    int64_t carried_ns_ = 0;
    std::string last_loss_;  // path that was lost last, with the reason
    int64_t last_loss_ns_ = 0;
    const uint64_t flight_bytes_;
    // Slots emptied by the application since `since_ns`, by direction.
    struct Turnover {
        uint64_t bytes = 0;  // of slots
        int64_t since_ns = 0;
        uint32_t growing = 0;  // slots that were requested
        bool full = false;     // there is no memory for more
    };
    std::array<Turnover, kDirections> turnover_{};
    std::deque<uint32_t> segments_to_offer_;
    std::set<uint32_t> unmapped_segments_;  // the peer has not confirmed their mapping
};

}  // namespace pipemorph
