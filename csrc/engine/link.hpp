// One link to a neighbour: both directions, one control connection, data paths beside it. What
// its events mean is for the `LinkCore` to say; here they are brought to it, and what it wants done
// is done.
//
// `Link` is the application's side: messages in and out, and the life of the link. It owns the core
// and the two others: `LinkControl` has the control connection and watches the peer, `LinkPaths`
// has the data paths and the memory that they reach. Each is the only one to touch what it has;
// what all three need is here.
//
// All state is behind one mutex, held for bookkeeping only: bytes are copied, checksummed, sent
// and received without it.
#pragma once

#include <condition_variable>
#include <mutex>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/link_control.hpp"
#include "engine/link_paths.hpp"
#include "os/clock.hpp"

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
    std::string path_trouble;     // what is or just was wrong with data paths; empty: nothing
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

class Link final : public std::enable_shared_from_this<Link> {
  public:
    struct Identity {
        uint32_t rank = 0;
        uint32_t peer_rank = 0;
        uint32_t link = 0;
        bool dials = false;
        Session session{};
    };

    Link(std::shared_ptr<Runtime> runtime, Identity identity);
    ~Link();

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
    using Lease = LinkPaths::Lease;
    std::optional<Lease> lease(int direction, uint64_t bytes) {
        return paths_.lease(direction, bytes);
    }
    void end_lease(const Lease& lease) { paths_.end_lease(lease); }
    std::vector<std::shared_ptr<Memory>> lease_memory() const { return paths_.lease_memory(); }
    bool sent(uint64_t ticket);
    // These two return without a result when `slice_ns` has passed before the deadline, so that
    // the caller can look after signals, and throw EngineTimeout after the deadline.
    bool wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout);
    std::optional<Arrived> receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                   double timeout);
    std::optional<Arrived> try_receive(const Key& key);
    bool arrived(const Key& key) const;
    // What the receive slots lie in; mapped for as long as anybody but the engine has the link.
    std::vector<std::shared_ptr<Memory>> slot_memory() const;
    // What the application has had copied out of a slot.
    void copied_in(uint64_t bytes) { paths_.copied_in(bytes); }
    // `at_once`: grant the slot again now. Otherwise the grant goes with the next frame, most of
    // the time the acknowledgement of the next message, which another thread sends. At most
    // two grants wait for that.
    void release(uint32_t slot, uint64_t serial, bool at_once = true);
    uint64_t send_slots(int direction) const;
    std::vector<SentRecord> drain_telemetry();
    LinkStats stats() const;
    void sever_data_path(uint32_t index) { paths_.sever(index); }
    void sever_control() { control_.sever(); }
    // Waits for acknowledgements until the deadline, says goodbye, lets go of everything. `hurry`:
    // asked now and then whether nobody can wait any longer.
    using Hurry = std::function<bool()>;
    void close(int64_t deadline_ns, const Hurry& hurry = {});
    // The same of several, side by side.
    static void close_all(const std::vector<std::shared_ptr<Link>>& links, int64_t deadline_ns,
                          const Hurry& hurry = {});

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
        std::string trouble;  // why it is not shared memory, where it should be
    };
    void set_terms(Terms terms);
    // The dialler's last word: the link is up on both sides. The acceptor is told by a frame, the
    // first on every control connection since one may break before it was read.
    void confirm();
    // The acceptor's: it is confirmed, or has ended before it could be (`why`). Not called where
    // the dialler may still come anew. No lock.
    std::function<void(const std::string& why)> on_settled;
    LinkControl& control() { return control_; }
    LinkPaths& paths() { return paths_; }
    void tick();
    // Nobody but the engine has it any more. If it has ended, its memory is given back.
    void let_go();
    size_t path_count() const;
    bool up() const;
    // Also a link that its acceptor does not know to be up.
    bool may_resume() const;
    void die(const std::string& why);

  private:
    friend class LinkControl;
    friend class LinkPaths;

    // Ending: nothing goes on any more, but a path's thread may still be in the middle of a copy.
    // The application is told when that is over, and may use its memory again.
    enum class State { connecting, up, reconnecting, ending, dead, closed };

    using Lock = std::unique_lock<std::mutex>;

    // --- For all three, locked. ---
    bool ended() const { return state_ == State::dead || state_ == State::closed; }
    bool over() const { return state_ == State::ending || ended(); }
    [[noreturn]] void throw_over() const;
    // What the core wants done.
    void act() { carry_out(core_.take_actions()); }
    // Acknowledgements that wait for the reader to be back take grants along, unless there is more
    // to say.
    void act_for_reader();
    // The same of an event that it has read itself, if it is that of a small message. What it waits
    // for goes first, and what it releases goes along.
    void act_for_message(uint64_t bytes);
    void changed();  // wake every waiter, ring the bell
    void wake_reader();
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
    // Where there is no memory for it the next tick ends the link. No lock.
    void finish(State state, const std::string& why) noexcept;

    void carry_out(const Actions& actions);
    bool reads_here() const { return reader_ && reader_->thread == std::this_thread::get_id(); }
    void give_back(uint32_t slot, uint64_t serial, bool at_once);
    bool await_reader();
    void leave_to_reactor(Lock& lock);
    bool read_for(Lock& lock, const Key& key, int64_t wait_ns);
    std::optional<Arrived> take(const Key& key);
    void wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns);
    // Parts of closing: whether this one is over. `wait`: a moment for that.
    bool leave(bool wait);
    void say_goodbye();
    bool was_heard(bool wait);
    bool is_closed();
    std::string nothing_arrived(const Key& key, double timeout) const;
    std::string without_name(const std::string& why) const;
    void look_after(int64_t now_ns);  // no lock
    struct Ending;
    bool begin_to_end(State state, const std::string& why);  // no lock
    void paths_closed(State state) noexcept;                 // no lock

    // --- Of all three. ---
    const std::shared_ptr<Runtime> runtime_;
    const Identity identity_;
    mutable std::mutex mu_;
    State state_ = State::connecting;
    std::string error_;        // to be told when it has ended
    std::string doom_;         // what has failed by halves: nothing is taken or said any more
    bool leaving_ = false;     // we said goodbye
    bool peer_left_ = false;   // the peer did
    bool never_came_ = false;  // not confirmed, and its dialler may still connect another
    std::string last_trouble_;
    Terms terms_;
    LinkCore core_;

    LinkControl control_;
    LinkPaths paths_;

    std::condition_variable changed_;
    bool let_go_ = false;

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
    bool reader_awaited_ = false;     // the control thread looks whether it is
};

}  // namespace pipemorph
