// The rules of a link: what its events mean, and what is to be done about them. No sockets,
// threads, clocks or locks, so that a simulation can drive exactly what a job runs.
//
// Whoever owns a core reports events to it, one at a time, with the time where it matters, and then
// carries out what `take_actions` returns.
#pragma once

#include <set>

#include "protocol/inbox.hpp"
#include "protocol/outbox.hpp"
#include "protocol/path_set.hpp"
#include "protocol/reliable.hpp"
#include "protocol/watchdog.hpp"

namespace pipemorph {

// What a link has to do, in this order.
struct Actions {
    // Offers of queue pairs to let go of, by path.
    std::vector<uint32_t> withdraw;
    // Connections to be given up, on their own thread: their rail is barred, or what they were
    // given does not arrive.
    struct Fail {
        uint32_t path = 0;
        std::string why;
    };
    std::vector<Fail> fail;
    // Slots to be added, since the application empties them faster than they come round; then
    // `grown`.
    struct Grow {
        int direction = 0;
        Inbox::Room room;
    };
    std::vector<Grow> grow;
    // On the path's own thread, so that no byte can reach a slot after the event that follows:
    // retire all its connections up to this epoch and say so with `retired`; again in a moment
    // while one of them cannot be.
    struct Retire {
        uint32_t path = 0;
        uint32_t epoch = 0;
    };
    std::vector<Retire> retire;
    bool flush = false;  // there are control frames to write
    bool kick = false;   // there may be something to send on the paths
    bool wake = false;   // somebody may wait for this
    bool ring = false;   // ... and somebody may watch the bell
    bool dial = false;   // ask `due`
};

class LinkCore {
  public:
    struct Settings {
        bool dials = false;
        uint32_t peer_rank = 0;
        size_t queues = 1;
        uint32_t chunk_bytes = 0;
        // Bytes of memory for what is under way at once: the most that is staged for the rails
        // here, and up to which a direction's receive slots are added to.
        uint64_t flight_bytes = uint64_t{512} << 20;
        // Nothing counts as late sooner.
        int64_t patience_ns = 5'000'000'000;
        // For so long a link without any path, or of which nothing gets through, goes on.
        int64_t give_up_ns = 10'000'000'000;
    };
    struct Counters {
        uint64_t messages_received = 0;
        uint64_t bytes_received = 0;
        uint64_t duplicate_chunks = 0;
        uint64_t stale_chunks = 0;
        uint64_t paths_remade = 0;
        uint64_t late_messages = 0;  // a path was given up for each
        uint64_t slots_added = 0;    // that nobody had reserved
    };

    explicit LinkCore(const Settings& settings);

    Actions take_actions() { return std::exchange(actions_, {}); }

    const Outbox& out() const { return out_; }
    const Inbox& in() const { return in_; }
    const PathSet& paths() const { return paths_; }
    const Counters& counters() const { return counters_; }
    // Numbering and keeping control frames is the connection's business, too.
    ReliableStream& stream() { return stream_; }
    const ReliableStream& stream() const { return stream_; }
    std::vector<SentRecord> drain_telemetry() { return out_.telemetry.drain(); }

    // --- Setting up ---
    void assign_paths(const std::vector<std::pair<uint32_t, uint32_t>>& rails, Transport others,
                      size_t count) {
        paths_.assign(rails, others, count);
    }
    void start(int64_t now_ns) { paths_.start(now_ns); }
    void send(const Frame& frame);
    // All that there is to write is about to be written: into the stream with what has waited for
    // that, in one frame.
    void collect();
    // Of the slots of this direction the peer can have no more than one, because grants wait.
    bool is_short_of_slots(int direction) const;

    // --- The application ---
    // Where it throws nothing was posted. Otherwise `posted` has to follow.
    std::shared_ptr<OutMessage> enqueue(MessageInfo info, const uint8_t* data,
                                        std::shared_ptr<void> hold, int64_t now_ns,
                                        const std::optional<SlotGrant>& leased = std::nullopt) {
        return out_.post(std::move(info), data, std::move(hold), now_ns, leased);
    }
    void posted(const OutMessage& message, int64_t now_wall_ns, int64_t now_ns);
    // Both.
    std::shared_ptr<OutMessage> post(MessageInfo info, const uint8_t* data,
                                     std::shared_ptr<void> hold, int64_t now_wall_ns,
                                     int64_t now_ns,
                                     const std::optional<SlotGrant>& leased = std::nullopt) {
        auto message = enqueue(std::move(info), data, std::move(hold), now_ns, leased);
        posted(*message, now_wall_ns, now_ns);
        return message;
    }
    // A slot of the peer's that the application fills before it posts the message.
    std::optional<SlotGrant> lease(int direction, uint64_t bytes) {
        return out_.lease(direction, bytes);
    }
    // It does not post it after all.
    void end_lease(const SlotGrant& slot);
    std::optional<Arrived> take(const Key& key);
    // `at_once`: grant the slot again now. Otherwise the grant goes with the next frame, but at
    // most two wait for that.
    void release(uint32_t slot, uint64_t serial, bool at_once);
    // Slots that are granted by `grant_room`, or when the peer has mapped them (`shared`).
    uint32_t add_room(int direction, const Inbox::Room& room, std::shared_ptr<Memory> memory,
                      bool shared);
    // Where one of our rails can be written to. A rail without bytes is barred: `trouble` says why.
    void add_region(const RegionFrame& region, const std::string& trouble, int64_t now_ns);
    void grant_room(uint32_t segment) { grant(in_.grant_segment(segment)); }
    // Shared memory: the next segment that the peer is still to be shown.
    std::optional<uint32_t> next_segment_to_offer();
    // The link is over: lets go of what is the application's. Nothing is left to be done.
    void abandon() noexcept { out_.abandon(); }
    // And nobody has any of what is in there.
    Inbox drop_inbox() { return std::exchange(in_, Inbox()); }

    // --- The peer's frames ---
    // Grants, messages, acknowledgements, fences and regions. Others need more than rules.
    static bool handles(const Frame& frame);
    // Returns what broke the protocol, or nothing.
    std::string handle(Frame& frame, int64_t now_wall_ns, int64_t now_ns);
    void mapped(uint32_t segment);

    // --- Paths ---
    std::vector<PathSet::Call> due(int64_t now_ns) { return paths_.due(now_ns); }
    void dial_failed(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns) {
        paths_.dial_failed(path, epoch, why, now_ns);
    }
    // A connection that carries from now on. `local_thread`: its thread, if it is a socket between
    // two processes of one host. False: it is of no use.
    bool attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                int64_t now_ns);
    // It can write nowhere any more. False: that was known.
    bool path_lost(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns);
    // After `Actions::retire`, for the epochs that could be.
    void retired(uint32_t path, const std::vector<uint32_t>& epochs, int64_t now_ns);

    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall_ns,
                                        int64_t now_ns);
    // From now on the connection says what was delivered, and gets no more than a window.
    void pace(uint32_t path, uint32_t epoch) { paths_.pace(path, epoch); }
    // It has no room for more bytes under way than that.
    void limit(uint32_t path, uint32_t epoch, uint64_t most) { paths_.limit(path, epoch, most); }
    // The oldest chunk that it has under way was.
    void delivered(uint32_t path, uint32_t epoch, int64_t now_ns) {
        paths_.delivered(path, epoch, now_ns);
    }
    ChunkSink begin_chunk(const ChunkHeader& header);
    // The bytes of the message that this has completed; 0: of none.
    uint64_t finish_chunk(const ChunkSink& sink, bool intact, int64_t now_wall_ns);
    // A chunk of a fenced epoch came in and was dropped.
    void stale_chunk() { ++counters_.stale_chunks; }

    // --- Rails ---
    // The dialler has made a queue pair for a path that was due, or could not (`trouble`). True:
    // it was offered.
    bool offer(uint32_t path, uint32_t epoch, const QpAddress& qp, std::string trouble,
               int64_t now_ns);
    // The acceptor: whether a queue pair is wanted for this offer.
    bool take_offer(const OfferFrame& offer);
    // It has connected one, or could not. True: the connection is current.
    bool answer(const OfferFrame& offer, const QpAddress& qp, std::string trouble, int64_t now_ns);
    // The dialler: whether what it offered is to be connected to this answer.
    bool take_answer(const AnswerFrame& answer, int64_t now_ns);
    // It is, or could not be. True: the connection is current.
    bool connected(uint32_t path, uint32_t epoch, std::string trouble, int64_t now_ns);
    // A probe was acknowledged. False: it is too late.
    bool path_up(uint32_t path, uint32_t epoch, int64_t now_ns);
    void path_suspect(uint32_t path, uint32_t epoch, bool suspicious, int64_t now_ns);
    void path_measured(uint32_t path, uint32_t epoch, double bytes_per_second, int64_t now_ns) {
        paths_.measured(path, epoch, bytes_per_second, now_ns);
    }
    // `recovered`: a port has come up since the last time.
    void look_after_rails(bool recovered, int64_t now_ns);

    // --- Long links ---
    // A frame of the peer's came in.
    void heard(int64_t now_ns) { watchdog_.heard(now_ns); }
    void echoed(int64_t rtt_ns, int64_t now_ns) { watchdog_.echoed(rtt_ns, now_ns); }
    // Now and then: what is late, and are there enough slots? Returns why the link has to end: it
    // has something to send and its paths get nothing through, whatever is tried.
    std::string look_after_flow(int64_t now_ns);
    // What is wrong with the paths although they may be up, or was in the last half minute; empty:
    // nothing.
    std::string path_trouble(int64_t now_ns) const;
    // After `Actions::grow`: the slots are there, or there is no memory for more of them.
    void grown(int direction, bool there);

    void forgive(int64_t passed_ns, int64_t now_ns) { paths_.forgive(passed_ns, now_ns); }

  private:
    void send_empty_messages(int64_t now_wall_ns, int64_t now_ns);
    void acknowledge(uint64_t message);
    void acknowledge_empty(uint64_t message);
    void grant(const std::vector<SlotGrant>& grants);
    void replace(uint32_t path);
    void lose(uint32_t path, const std::string& why, int64_t now_ns);
    void send_fence(uint32_t path, uint32_t epoch);
    void answer_fence(const FenceFrame& fence);
    void changed() { actions_.wake = actions_.ring = true; }
    void note_carrier(int64_t now_ns) {
        if (!paths_.note_carrier(now_ns)) return;
        watchdog_.carrier_changed();
        changed();
    }
    void give_up_late_paths();
    void note_progress() { carried_ns_ = watchdog_.clock_ns(); }
    std::string why_stuck();
    std::string last_loss() const;
    void blame(OutMessage& message);
    // `silent_ns`: for so long nothing had arrived.
    void lost_in_vain(uint32_t path, uint32_t epoch, int64_t silent_ns);
    void grow_slots(int direction, int64_t now_ns);
    void emptied(const SlotGrant& slot) { turnover_[slot.direction].bytes += slot.bytes; }
    std::string why_not_connected(uint32_t path, uint32_t epoch) const;
    void withdraw(uint32_t path, const std::string& why, int64_t now_ns);
    void bar_rail(bool ours, uint32_t rail, const std::string& why, int64_t now_ns);
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
    AckFrame waiting_;  // to be collected
    // Empty messages that the application has not taken, and of those the ones whose
    // acknowledgement waits for that.
    size_t untaken_empty_ = 0;
    std::deque<uint64_t> unacknowledged_empty_;
    uint32_t held_back_ = 0;  // grants that were released since the last flush
    Watchdog watchdog_;
    const int64_t give_up_ns_;
    // By its clock: when a path was up last, or something got through, or nothing was to be sent.
    int64_t carried_ns_ = 0;
    std::string last_loss_;  // which path was lost last, and why
    int64_t last_loss_ns_ = 0;
    const uint64_t flight_bytes_;
    // What the application has emptied since then, by direction.
    struct Turnover {
        uint64_t bytes = 0;  // of slots
        int64_t since_ns = 0;
        uint32_t growing = 0;  // slots that were asked for
        bool full = false;     // there is no more memory
    };
    std::array<Turnover, kDirections> turnover_{};
    std::deque<uint32_t> segments_to_offer_;
    std::set<uint32_t> unmapped_segments_;  // the peer has not said that it mapped them
};

}  // namespace pipemorph
