// Link to a neighbour: both directions, one control connection, and data paths. `LinkCore` has the
// rules; this class reports events to it and carries out its actions.
//
// `Link` is the application's side: messages in and out, and the lifetime of the link. It owns the
// core and two more parts: `LinkControl` has the control connection and monitors the peer,
// `LinkPaths` has the data paths and the memory that they reach. Each part owns its state; shared
// state is here.
//
// All state is behind one mutex, held for bookkeeping only: bytes are copied, checksummed, sent and
// received without it.
#pragma once

#include <condition_variable>
#include <mutex>

#include "base/error.hpp"
#include "base/text.hpp"
#include "engine/link_control.hpp"
#include "engine/link_paths.hpp"
#include "os/clock.hpp"

namespace pipemorph {

// Current state of a data path.
struct PathStats {
    std::string kind;   // tcp, shm, rdma
    std::string rail;   // "rxe0 port 1"; empty for others
    std::string state;  // INIT, CONNECTING, UP, SUSPECT, FENCING, DOWN, COOLDOWN
    std::string last_error;
    uint32_t epoch = 0;
    uint64_t chunks = 0;  // assigned to it, including lost ones
    uint64_t bytes = 0;
    uint64_t times_lost = 0;
    std::optional<double> bytes_per_second;
    uint64_t window = 0;  // bytes that it may have under way; 0: the kernel decides
    std::optional<double> rtt_min;
    std::optional<double> rtt_mean;
    std::optional<double> rtt_p99;
};

struct LinkStats {
    std::string state;
    std::string transport;  // the current one
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
    uint64_t frames_refused = 0;  // their MAC was wrong
    std::string last_error;       // the last error, past or current; empty: none
    std::string path_errors;      // current or recent errors of data paths; empty: none
    std::optional<double> rtt_min;
    std::optional<double> rtt_mean;
    std::optional<double> rtt_p99;
    std::optional<double> clock_offset;
    uint64_t sends_in_flight = 0;
    uint64_t slots_granted = 0;
    uint64_t slots_in_use = 0;
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
    // `leased`: slot of the lease whose memory is `data`.
    uint64_t send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold,
                  const std::optional<SlotGrant>& leased = std::nullopt);
    using Lease = LinkPaths::Lease;
    std::optional<Lease> lease(int direction, uint64_t bytes) {
        return paths_.lease(direction, bytes);
    }
    void end_lease(const Lease& lease) { paths_.end_lease(lease); }
    std::vector<std::shared_ptr<Memory>> lease_memory() const { return paths_.lease_memory(); }
    bool sent(uint64_t ticket);
    // These two return without a result after `slice_ns`, so that the caller can handle signals,
    // and throw EngineTimeout after the deadline.
    bool wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout);
    std::optional<Arrived> receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                   double timeout);
    std::optional<Arrived> try_receive(const Key& key);
    bool arrived(const Key& key) const;
    // Memory of the receive slots, mapped as long as the application holds the link.
    std::vector<std::shared_ptr<Memory>> slot_memory() const;
    // Counts bytes that the application has copied out of a slot.
    void copied_in(uint64_t bytes) { paths_.copied_in(bytes); }
    // Releases a slot. `at_once`: grant it now. Otherwise the grant goes with the next frame,
    // usually the acknowledgement of the next message, which another thread sends. At most two
    // grants wait.
    void release(uint32_t slot, uint64_t serial, bool at_once = true);
    uint64_t send_slots(int direction) const;
    LinkStats stats() const;
    void sever_data_path(uint32_t index) { paths_.sever(index); }
    void sever_control() { control_.sever(); }
    // Waits for acknowledgements until the deadline, sends a goodbye and releases all memory.
    // `stop_waiting` is called regularly; true ends the wait.
    using StopWaiting = std::function<bool()>;
    void close(int64_t deadline_ns, const StopWaiting& stop_waiting = {});
    // Closes several links concurrently.
    static void close_all(const std::vector<std::shared_ptr<Link>>& links, int64_t deadline_ns,
                          const StopWaiting& stop_waiting = {});

    // --- The engine's side. Control thread. ---
    // Agreement of both ends.
    struct Terms {
        Transport transport = Transport::tcp;
        uint32_t sockets = 0;  // none if rdma is required
        // Pairs of our rail and the peer's. The acceptor knows only their number.
        std::vector<std::pair<uint32_t, uint32_t>> rails;
        // Address of the peer's engine. The acceptor dials it only to test whether it listens.
        Address address;
        std::string unix_name;
        std::string shm_error;  // reason for another transport than shared memory
    };
    void set_terms(Terms terms);
    // Confirms the link: it is up on both sides. The dialler sends the acceptor a frame, the first
    // on every control connection, since a connection may break before it was read.
    void confirm();
    // Acceptor: called when the link is confirmed, or has ended before (`why`), without the lock.
    // Not called if the dialler may still dial again.
    std::function<void(const std::string& why)> on_settled;
    LinkControl& control() { return control_; }
    LinkPaths& paths() { return paths_; }
    void tick();
    // Releases the memory of a link that has ended and that only the engine holds.
    void release_memory();
    size_t path_count() const;
    bool up() const;
    // True also for a link whose confirmation the acceptor lacks.
    bool may_resume() const;
    void die(const std::string& why);

  private:
    friend class LinkControl;
    friend class LinkPaths;

    // `ending`: the link has stopped, but a path's thread may still copy. `dead` or `closed`
    // follows, from which on the application may reuse its memory.
    enum class State { connecting, up, reconnecting, ending, dead, closed };

    using Lock = std::unique_lock<std::mutex>;

    // --- Used by all parts, locked. ---
    bool ended() const { return state_ == State::dead || state_ == State::closed; }
    bool over() const { return state_ == State::ending || ended(); }
    [[noreturn]] void throw_over() const;
    // Carries out the actions of the core.
    void run_actions() { carry_out(core_.take_actions()); }
    // Carries out actions; grants wait with the acknowledgements for the reader's return, unless
    // other frames must be sent.
    void run_actions_for_reader();
    // Carries out actions of a chunk. If the reader has read a small message itself, the flush
    // waits, so that the message is returned first and its grant joins the acknowledgement.
    void run_actions_for_message(uint64_t bytes);
    void changed();  // wake every waiter, signal the eventfd
    void wake_reader();
    // Runs an operation that must not end half done, on any thread. If it throws, the next tick
    // ends the link: ending needs memory, which may be what is missing.
    template <typename F>
    void or_die(F&& run) noexcept {
        try {
            run();
        } catch (const std::exception& e) {
            if (fatal_error_.empty()) keep_words(fatal_error_, e.what());
        }
    }
    // Runs as `or_die`, called without the lock.
    template <typename F>
    void or_die_without_lock(F&& run) noexcept {
        try {
            run();
        } catch (const std::exception& e) {
            const Lock lock(mu_);
            if (fatal_error_.empty()) keep_words(fatal_error_, e.what());
        }
    }
    // Ends the link; without memory, the next tick does so. No lock.
    void finish(State state, const std::string& why) noexcept;

    void carry_out(const Actions& actions);
    bool is_reader_thread() const {
        return reader_ && reader_->thread == std::this_thread::get_id();
    }
    void release_slot(uint32_t slot, uint64_t serial, bool at_once);
    bool await_reader();
    void return_to_reactor(Lock& lock);
    bool read_for(Lock& lock, const Key& key, int64_t wait_ns);
    std::optional<Arrived> take(const Key& key);
    void wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns);
    // Steps of closing: true if done. `wait`: wait a moment for it.
    bool try_goodbye(bool wait);
    void send_goodbye();
    bool is_goodbye_received(bool wait);
    bool is_closed();
    std::string nothing_arrived(const Key& key, double timeout) const;
    std::string without_name(const std::string& why) const;
    void check_health(int64_t now_ns);  // no lock
    struct Ending;
    bool begin_to_end(State state, const std::string& why);  // no lock
    void paths_closed(State state) noexcept;                 // no lock

    // --- State of all parts. ---
    const std::shared_ptr<Runtime> runtime_;
    const Identity identity_;
    mutable std::mutex mu_;
    State state_ = State::connecting;
    std::string error_;               // reason of the end
    std::string fatal_error_;         // failure of a half-done operation: the link stops
    bool goodbye_sent_ = false;       // we sent a goodbye
    bool peer_said_goodbye_ = false;  // the peer sent one
    bool never_confirmed_ = false;    // not confirmed; its dialler may still dial another link
    std::string last_error_;
    Terms terms_;
    LinkCore core_;

    LinkControl control_;
    LinkPaths paths_;

    std::condition_variable changed_;
    bool memory_released_ = false;

    // Thread that waits for a message and meanwhile reads the first path's socket itself.
    struct Reader {
        std::thread::id thread;
        Key key;
        bool woken = false;
    };
    std::optional<Reader> reader_;
    uint32_t waiting_ = 0;  // other threads that wait for messages
    Fd reader_notifier_;
    std::shared_ptr<DataPath> held_path_;  // the reader has returned, and may read it again soon
    bool reader_awaited_ = false;          // the control thread will check for its return
};

}  // namespace pipemorph
