// One link to a neighbour: both directions, one control connection, data paths beside it. What
// its events mean is for the `LinkCore` to say; here they are brought to it, and what it wants done
// is done.
//
// All state is behind one mutex, held for bookkeeping only: bytes are copied, checksummed, sent
// and received without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/dial.hpp"
#include "engine/lease_pool.hpp"
#include "os/clock.hpp"
#include "path/rdma_path.hpp"
#include "protocol/link_core.hpp"
#include "protocol/peer_watch.hpp"

namespace pipemorph {

// One data path, as it is now.
struct PathStats {
    std::string kind;   // tcp, shm, rdma
    std::string rail;   // "rxe0 port 1"; empty for others
    std::string state;  // INIT, CONNECTING, UP, SUSPECT, FENCING, DOWN, COOLDOWN
    std::string trouble;
    uint32_t epoch = 0;
    uint64_t chunks = 0;  // entrusted to it, some perhaps in vain
    uint64_t bytes = 0;
    uint64_t times_lost = 0;
    std::optional<double> bytes_per_second;
    uint64_t window = 0;  // bytes that it may have under way; 0: it is not for the engine to say
    std::optional<double> rtt_min;
    std::optional<double> rtt_mean;
    std::optional<double> rtt_p99;
};

struct LinkStats {
    std::string state;
    std::string transport;  // what carries now
    std::vector<PathStats> paths;
    uint64_t fallbacks = 0;  // from the last rail to TCP
    uint64_t failbacks = 0;  // and back
    uint64_t messages_sent = 0;
    uint64_t messages_received = 0;
    uint64_t bytes_sent = 0;
    uint64_t bytes_received = 0;
    uint64_t bytes_copied_out = 0;  // by the engine, from memory to memory
    uint64_t bytes_copied_in = 0;
    uint64_t chunks_resent = 0;
    uint64_t duplicate_chunks = 0;
    uint64_t stale_chunks = 0;
    uint64_t reconnects = 0;
    uint64_t frames_refused = 0;  // their seal was wrong
    std::string trouble;          // the last, over now or not; empty: there was none
    std::optional<double> rtt_min;
    std::optional<double> rtt_mean;
    std::optional<double> rtt_p99;
    std::optional<double> clock_offset;
    uint64_t sends_in_flight = 0;
    uint64_t slots_granted = 0;
    uint64_t slots_in_use = 0;
    uint64_t slots_added = 0;    // of those granted, by the engine itself
    uint64_t late_messages = 0;  // a path was given up for each
};

class Link final : public PathHost, public std::enable_shared_from_this<Link> {
  public:
    struct Identity {
        uint32_t rank = 0;
        uint32_t peer_rank = 0;
        uint32_t link = 0;
        bool dials = false;
        Session session{};
    };

    Link(std::shared_ptr<Runtime> runtime, Identity identity);
    ~Link() override;

    const Identity& identity() const { return identity_; }
    std::string describe() const;

    // --- The application's side. Any thread. ---
    Transport transport() const;
    bool alive() const;
    std::string error() const;  // empty while alive
    void reserve(int direction, uint32_t slots, uint64_t slot_bytes);
    // `leased`: the slot of the lease that `data` is the memory of.
    uint64_t send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold,
                  const std::optional<SlotGrant>& leased = std::nullopt);
    // Memory for a payload, to be filled and then sent.
    struct Lease {
        // Where it is not in place, memory of our own, sent as any other. There is none before it
        // is asked for: who does not want it has not paid for it.
        uint8_t* memory();

        uint8_t* data = nullptr;
        uint64_t bytes = 0;
        bool in_place = false;          // nothing has to be copied any more
        std::shared_ptr<void> hold;     // keeps `data` mapped, and over rails from others
        std::optional<SlotGrant> slot;  // the peer's, that it is in over shared memory
    };
    Lease lease(int direction, uint64_t bytes);
    // It is not sent after all.
    void end_lease(const Lease& lease);
    bool sent(uint64_t ticket);
    // These two return without a result when `slice_ns` has passed before the deadline, so that
    // the caller can look after signals, and throw EngineTimeout after the deadline.
    bool wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout);
    std::optional<Arrived> receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                   double timeout);
    // `copies`: told before so many bytes are copied, without the lock.
    using Copies = std::function<void(uint64_t bytes)>;
    std::optional<Arrived> try_receive(const Key& key, const Copies& copies = {});
    void post_receive(const Key& key, Destination destination);
    bool arrived(const Key& key) const;
    // What the receive slots lie in; mapped for as long as anybody but the engine has the link.
    std::vector<std::shared_ptr<Memory>> slot_memory() const;
    // Where leases may be, and for as long: the peer's slots, as far as they are mapped here, or
    // what is registered for them with the rails.
    std::vector<std::shared_ptr<Memory>> lease_memory() const;
    // `at_once`: grant the slot again now. Otherwise the grant goes with the next frame, most of
    // the time the acknowledgement of the next message, which another thread sends. At most
    // two grants wait for that.
    void release(uint32_t slot, uint64_t serial, bool at_once = true);
    uint64_t send_slots(int direction) const;
    std::vector<SentRecord> drain_telemetry();
    LinkStats stats() const;
    void sever_data_path(uint32_t index);
    void sever_control();
    // Waits for acknowledgements until the deadline, says goodbye, lets go of everything.
    void close(int64_t deadline_ns);

    // --- The engine's side. Control thread. ---
    // What both ends agreed on.
    struct Terms {
        Transport transport = Transport::tcp;
        uint32_t sockets = 0;  // none if rdma is required
        // For every rail of the link: ours and the peer's. The acceptor knows only how many.
        std::vector<std::pair<uint32_t, uint32_t>> rails;
        // Of the peer's engine. The acceptor dials it only to see whether anybody is left.
        Address address;
        std::string unix_name;
    };
    void set_terms(Terms terms);
    // A control connection is authenticated; `peer_received` says where to resume.
    void attach_control(Fd fd, const ConnectionKeys& keys, uint32_t epoch, uint64_t peer_received);
    // The dialler's last word: the link is up on both sides. The acceptor is told by a frame, the
    // first on every control connection since one may break before it was read.
    void confirm();
    // The acceptor's: it is confirmed, or has ended before it could be (`why`). Not called where
    // the dialler may still come anew. No lock.
    std::function<void(const std::string& why)> on_settled;
    uint32_t control_epoch() const;
    uint64_t control_received() const;
    // For an incoming data connection: why not, or nothing.
    std::string may_attach_data(uint32_t path, uint32_t epoch) const;
    void attach_data(uint32_t path, uint32_t epoch, Fd fd, const ConnectionKeys& keys);
    void tick();
    // Nobody but the engine has it any more. If it has ended, its memory is given back.
    void let_go();
    size_t path_count() const;
    bool up() const;
    // Also a link that its acceptor does not know to be up.
    bool may_resume() const;
    void die(const std::string& why);

    // --- PathHost. Any thread. ---
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override;
    ChunkSink begin_chunk(const ChunkHeader& header) override;
    void finish_chunk(const ChunkSink& sink, bool intact) override;
    void refused() override;
    void stale_chunk() override;
    void copied_out(uint64_t bytes) override {
        bytes_copied_out_.fetch_add(bytes, std::memory_order_relaxed);
    }
    // Also what the application has had copied out of a slot.
    void copied_in(uint64_t bytes) override {
        bytes_copied_in_.fetch_add(bytes, std::memory_order_relaxed);
    }
    void path_lost(uint32_t path, uint32_t epoch, const std::string& why) override;
    void protocol_error(const std::string& why) override;
    std::optional<Segment> next_segment_to_offer() override;
    void segment_offered(uint32_t number, uint64_t bytes, Fd fd) override;
    std::shared_ptr<Memory> peer_segment(uint32_t number) override;
    std::optional<RemoteSlot> remote_slot(uint32_t path, const SlotGrant& slot) override;
    std::optional<uint32_t> payload_key(const VerbsDevice& device, const uint8_t* data) override {
        return lease_pool_->key(device, data);
    }
    bool claim_staging(uint64_t bytes) override { return lease_pool_->claim(bytes); }
    void disclaim_staging(uint64_t bytes) override { lease_pool_->disclaim(bytes); }
    void path_up(uint32_t path, uint32_t epoch) override;
    void path_suspect(uint32_t path, uint32_t epoch, bool suspicious) override;
    void path_measured(uint32_t path, uint32_t epoch, double bytes_per_second,
                       std::optional<int64_t> rtt_ns) override;
    void path_stuck(const std::string& why) override;
    Pace pace(uint32_t path, uint32_t epoch) override;
    void path_limited(uint32_t path, uint32_t epoch, uint64_t most) override;
    Pace chunk_delivered(uint32_t path, uint32_t epoch) override;

  private:
    // Ending: nothing goes on any more, but a path's thread may still be in the middle of a copy.
    // The application is told when that is over, and may use its memory again.
    enum class State { connecting, up, reconnecting, ending, dead, closed };

    struct Connection {
        Connection(Fd connected, const ConnectionKeys& keys)
            : fd(std::move(connected)), says(keys.ours), hears(keys.theirs) {}

        Fd fd;
        Sealer says;
        Sealer hears;
        std::vector<uint8_t> in;
        std::vector<uint8_t> out;
        size_t out_done = 0;
        bool watching_write = false;
        Reactor::Watch watch;  // control thread
    };

    // The connections of one path. The core says which of them is current.
    struct Held {
        std::vector<std::shared_ptr<DataPath>> connections;  // not retired yet
        std::shared_ptr<RdmaPath> offered;                   // waits for the peer's answer
        EchoMeter rtt;
    };

    using Lock = std::unique_lock<std::mutex>;

    bool ended() const { return state_ == State::dead || state_ == State::closed; }
    bool over() const { return state_ == State::ending || ended(); }
    // Whether the peer is missed. An acceptor's link that is not confirmed is, too: its dialler may
    // think that it is up, and come back.
    bool without_control() const {
        return !control_ &&
               (state_ == State::reconnecting || (state_ == State::connecting && !identity_.dials));
    }
    [[noreturn]] void throw_over() const;
    void act() { carry_out(core_.take_actions()); }
    void act_for_reader();
    void carry_out(const Actions& actions);
    void changed();  // wake every waiter, ring the bell
    void wake_reader();
    bool reads_here() const { return reader_ && reader_->thread == std::this_thread::get_id(); }
    void give_back(uint32_t slot, uint64_t serial, bool at_once);
    bool await_reader();
    void leave_to_reactor(Lock& lock);
    bool read_for(Lock& lock, const Key& key, int64_t wait_ns);
    std::optional<Arrived> take(Lock& lock, const Key& key, const Copies& copies = {});
    // `needed`: somebody waits for it. Otherwise there is none, also if only a rail cannot reach
    // it. No lock.
    bool make_room(int direction, const Inbox::Room& room, bool needed);
    void grow_leases(uint64_t bytes);  // no lock; where nobody has to wait for it
    Reactor& aside();
    void start_to_grow(const Actions::Grow& what);
    void grow(const Actions::Grow& what);  // no lock; where nobody has to wait for it
    void wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns);
    std::string nothing_arrived(const Key& key, double timeout) const;

    // Control connection (lock held unless said otherwise).
    void flush() noexcept;
    void write_frames();
    void send_frame(const Frame& frame);
    void send_confirm();
    void send_last_words(Connection& connection);
    void send_ping(int64_t now_ns);
    void watch_write();
    void on_control(const std::shared_ptr<Connection>& connection, uint32_t events);  // no lock
    bool read_control(const std::shared_ptr<Connection>& connection);                 // no lock
    void handle(Frame frame);                                                         // no lock
    void refuse_frame(const std::shared_ptr<Connection>& connection);                 // no lock
    void control_lost(const std::shared_ptr<Connection>& connection,
                      const std::string& why);  // no lock
    void confirmed(Transport transport);        // no lock
    std::string refused_text() const;
    void look_after(int64_t now_ns);  // no lock
    void seek_peer();                 // no lock
    void redial_control();            // no lock
    void probe_peer();                // no lock
    Hello hello(Purpose purpose) const;

    // Paths.
    // What a link cannot do by halves, on whatever thread. Where it fails, the next tick ends the
    // link: that needs memory, which may be what there is none of.
    template <typename F>
    void or_die(F&& run) noexcept {
        try {
            run();
        } catch (const std::exception& e) {
            if (doom_.empty()) keep_words(doom_, e.what());
        }
    }
    // The same, called without the lock.
    template <typename F>
    void or_die_without_lock(F&& run) noexcept {
        try {
            run();
        } catch (const std::exception& e) {
            const Lock lock(mu_);
            if (doom_.empty()) keep_words(doom_, e.what());
        }
    }
    void kick_paths();
    std::vector<std::shared_ptr<DataPath>> live_paths() const;
    std::shared_ptr<DataPath> current(uint32_t index) const;
    void dial_paths();  // no lock
    void start_to_retire(const Actions::Retire& what);
    void retire(Reactor& reactor, const Actions::Retire& what);  // no lock; that thread's own
    void make_paths();
    Reactor& reactor_of(uint32_t index);
    // On the control thread, and the rest of each where the rail makes its queue pairs. What came
    // of it is noted in the path.
    void offer_rail(uint32_t index, uint32_t epoch);                 // no lock
    void make_offer(uint32_t rail, uint32_t index, uint32_t epoch);  // no lock
    void take_offer(const OfferFrame& offer);                        // no lock
    void answer_offer(const OfferFrame& offer);                      // no lock
    void take_answer(const AnswerFrame& answer);                     // no lock
    void connect_offered(const std::shared_ptr<RdmaPath>& made,
                         const AnswerFrame& answer);  // no lock
    void look_after_rails(int64_t now_ns);
    PathStats describe(uint32_t index) const;
    std::string paths_text() const;
    std::string missing_rail(int64_t now_ns) const;
    RdmaPath::Settings rdma_settings() const;
    std::shared_ptr<DataPath> make_path(uint32_t index, uint32_t epoch, Fd fd,
                                        const ConnectionKeys& keys);
    std::string without_name(const std::string& why) const;
    void drop_memory();  // no lock; it may take a while
    struct Ending;
    // Where there is no memory for it the next tick ends the link.
    void finish(State state, const std::string& why) noexcept;  // no lock
    bool begin_to_end(State state, const std::string& why);     // no lock
    void paths_closed(State state) noexcept;                    // no lock

    const std::shared_ptr<Runtime> runtime_;
    const Identity identity_;

    mutable std::mutex mu_;
    std::condition_variable changed_;
    State state_ = State::connecting;
    bool let_go_ = false;
    std::string error_;  // to be told when it has ended
    std::string doom_;   // what has failed by halves: nothing is taken or said any more
    Terms terms_;

    LinkCore core_;
    const std::shared_ptr<LeasePool> lease_pool_;
    EchoMeter echo_;

    // A thread that waits for a message and meanwhile reads the first path's socket itself.
    struct Reader {
        std::thread::id thread;
        Key key;
        bool woken = false;
    };
    std::optional<Reader> reader_;
    uint32_t waiting_ = 0;  // threads that wait for messages beside it
    Fd reader_bell_;
    std::shared_ptr<DataPath> kept_;  // it has left it, and may be back in a moment

    std::shared_ptr<Connection> control_;
    bool flush_due_ = false;       // frames wait for the reader to be back
    bool reader_awaited_ = false;  // the control thread looks whether it is
    uint32_t control_epoch_ = 0;
    bool leaving_ = false;     // we said goodbye
    bool never_came_ = false;  // not confirmed, and its dialler may still connect another
    bool peer_left_ = false;   // the peer did
    PeerWatch peer_;
    std::string last_trouble_;

    std::vector<Held> held_;  // by path
    std::vector<std::shared_ptr<Registration>> registrations_;
    uint64_t recoveries_seen_ = 0;
    std::map<uint32_t, std::shared_ptr<Memory>> peer_segments_;

    uint64_t reconnects_ = 0;
    uint64_t frames_refused_ = 0;
    // Without the lock: one more for every chunk would be felt.
    std::atomic<uint64_t> bytes_copied_out_{0};
    std::atomic<uint64_t> bytes_copied_in_{0};
};

}  // namespace pipemorph
