// What the simulation is made of; sim_world.hpp says what it is.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <set>

#include "os/clock.hpp"
#include "sim_world.hpp"

namespace sim {

constexpr uint64_t kSlotBytes = 4 * kChunkBytes;
constexpr int kLow = 0;  // dials

struct Violation {
    std::string why;
};

[[noreturn]] inline void fail(std::string why) {
    throw Violation{std::move(why)};
}

inline void require(bool holds, const char* what) {
    if (!holds) fail(what);
}

inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

// Small and fast: a schedule asks it a few thousand times.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(mixed(seed + 0x9e3779b97f4a7c15ULL)) {}
    uint32_t operator()(uint32_t below) {
        state += 0x9e3779b97f4a7c15ULL;
        return static_cast<uint32_t>((mixed(state) >> 32) * below >> 32);
    }
};

inline uint64_t hash(const uint8_t* data, size_t n) {
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < n; ++i) h = (h ^ data[i]) * 1099511628211ULL;
    return h;
}

// A slot segment costs four system calls; thousands of schedules share theirs.
inline std::shared_ptr<Memory> slot_memory(size_t number) {
    thread_local std::vector<std::shared_ptr<Memory>> pool;
    while (pool.size() <= number) pool.push_back(Memory::anonymous(4096));
    return pool[number];
}

// A chunk on its way. Holding the task keeps the payload alive, as a posted work request does.
struct Flight {
    ChunkTask task;
    uint32_t landed = 0;  // bytes of it in the slot, one-sided only
    bool dropped = false;
    bool damaged = false;
    bool repeated = false;  // one-sided: its notification will come twice
    bool copy = false;      // the second delivery of a chunk
    bool swallowed = false;
    bool acknowledged = false;  // rails: by the receiver's card
};

// One epoch of one path, as both ends and the fabric between them see it.
struct Connection {
    uint32_t path = 0;
    uint32_t epoch = 0;
    Transport kind = Transport::tcp;
    bool cut = false;
    bool half = false;                   // the dialler's queue pair will not connect
    int64_t stalled_until_ns = 0;        // the acceptor's kernel takes so long for its queue pair
    bool attached[2] = {false, false};   // that end's memory can be reached
    bool held[2] = {false, false};       // LinkPaths::Held::connections: that end has to retire it
    bool started[2] = {false, false};    // that end's thread serves it
    bool up[2] = {false, false};         // rails: a probe was acknowledged
    bool fenced[2] = {false, false};     // that end knows that the other has given it up
    bool suspected[2] = {false, false};  // rails: nothing has completed for a while
    bool given_up[2] = {false, false};   // that end sends nothing more
    bool retired[2] = {false, false};    // nothing can reach that end's slots any more
    bool overdue[2] = {false, false};    // that end's deadline for a lost chunk runs
    std::list<Flight> towards[2];        // flights to that end
    std::deque<uint64_t> under_way[2];   // rails: bytes of the chunks that that end's card has
    std::deque<uint32_t> segments[2];    // shared memory: shown to that end, not mapped yet
    // Stream: the chunk that is being read at that end.
    struct Reading {
        ChunkSink sink;
        Flight flight;
        uint64_t done = 0;
    };
    std::optional<Reading> reading[2];

    bool one_sided() const { return kind != Transport::tcp; }
};
using ConnectionPointer = std::shared_ptr<Connection>;

// What is posted to the threads that serve a path.
struct Threads {
    std::deque<std::function<void()>> data;   // the path's reactor
    std::deque<std::function<void()>> setup;  // where its rail makes queue pairs
};

struct Sent {
    Key key;
    std::vector<uint8_t> content;
    uint64_t hash = 0;
    uint64_t id = 0;
    bool complete = false;  // at the receiver
    bool delivered = false;
};

struct End {
    LinkCore core;
    std::vector<Threads> threads;    // by path
    std::set<uint32_t> quarantined;  // rails that are known not to reach all slots of both ends
    // The control connection: a number says which; 0 is none.
    uint64_t control = 0;
    std::vector<uint8_t> outgoing;  // written, on its way to the peer
    std::vector<uint8_t> incoming;  // read, not a whole frame yet
    struct Use {
        uint64_t serial = 0;
        bool open = false;  // granted, and its message is not whole yet
    };
    std::vector<Use> slots;  // what the fabric may write into
    // What was reserved: last, the most in each place, and what there is in all.
    uint64_t largest = 0;
    std::vector<uint64_t> peaks;
    uint64_t slot_bytes = 0;
    uint64_t added_bytes = 0;  // what was added later
    std::map<uint64_t, Sent> sent;
    uint64_t to_send = 0;
    struct Held {
        uint32_t slot;
        uint64_t serial;
    };
    std::vector<Held> held;
    // Shared memory: slots of the peer's that it fills before it posts their messages.
    struct Leased {
        SlotGrant slot;
        Sent message;
    };
    std::vector<Leased> leased;

    explicit End(const LinkCore::Settings& settings) : core(settings) {}
};

class World {
  public:
    World(const Options& options, Tally& tally);
    uint64_t run();

  private:
    End& end(int side) { return ends_[size_t(side)]; }
    LinkCore& core(int side) { return end(side).core; }
    Threads& threads(int side, uint32_t path) { return end(side).threads[path]; }
    // Link::act
    void act(int side);
    template <typename... Args>
    void trace(const char* format, Args... args) const {
        if (!options_.trace) return;
        std::fprintf(stderr, format, args...);
        std::fputc('\n', stderr);
    }

    // --- The application ---
    // One of the rails cannot register the memory: `quarantined`.
    void reserve(int side, uint32_t slots, uint64_t bytes,
                 std::optional<uint32_t> quarantined = std::nullopt);
    void add_slots(int side, const Inbox::Room& room, std::optional<uint32_t> quarantined);
    void grow(int side, const Actions::Grow& what);  // LinkPaths::grow
    void post(int side);
    void post(int side, Sent m, const std::optional<SlotGrant>& leased);
    bool lease(int side, Sent& m);
    uint8_t* slot_of(int side, const SlotGrant& slot);
    // Posts what is in a leased slot, or gives the slot back.
    void end_lease(int side);
    Sent& pick(int side);
    void receive(int side);
    void give_back(int side, uint32_t slot, uint64_t serial);
    // The other end may write to this slot from now on.
    void granted(int side, const SlotGrant& g);

    // --- The control connection ---
    void flush(int side);
    void deliver_control(int side);
    void read_control(int side);          // LinkControl::read
    void handle(int side, Frame& frame);  // LinkControl::handle
    void whole(int side, uint64_t id);
    // The bytes under way are cut off somewhere; the ends notice now or when they meet again.
    void lose_control();
    void deliver_rest(int side);
    // LinkControl::redial, Engine::resume_link, LinkControl::attach. Whether it got that far.
    bool resume_control(bool half);

    // --- Paths ---
    // LinkPaths::dial_paths and both ends' attach. Whether anything was due.
    bool dial(bool half);
    void attach(int side, const ConnectionPointer& c);
    void offer(const ConnectionPointer& c, bool half);
    void answer_offer(const OfferFrame& offer);
    void connect_offered(const AnswerFrame& answer);
    ConnectionPointer find(uint32_t path, uint32_t epoch) const;
    // The one that the core counts on.
    ConnectionPointer current(int side, uint32_t path);
    void start(int side, const ConnectionPointer& c);
    void give_up(int side, Connection& c);
    // Actions::retire
    void retire_up_to(int side, const Actions::Retire& what);
    // DataPath::retire: after this, no byte of the epoch can reach a slot of this end.
    void retire(int side, Connection& c);
    void stop_reading(int side, Connection& c);
    void path_lost(int side, const ConnectionPointer& c);

    // --- Chunks ---
    void send_chunk(int side, uint32_t path);
    // A rail's probe was acknowledged, or it has come back from its silence.
    void look_after_rail(int side, const ConnectionPointer& c);
    // Who must not have been given a chunk.
    void check_carrier(int side, const Connection& c);
    bool carries(int side, const Connection& c) const;
    // What a write into `slot` for `serial` has to hold to, at the moment when it happens.
    void check_write(int side, const Flight& f) const;
    // The receiver's card has it: the sender's completes it.
    void acknowledge(int from, const ConnectionPointer& c, Flight& f);
    void move_chunk(int side, const ConnectionPointer& c);
    // One-sided: any of the writes moves on; its notification comes when all of it is there.
    void land(int side, const ConnectionPointer& c);
    // Stream: the first chunk is read, piece by piece, into where the inbox says.
    void read(int side, const ConnectionPointer& c);
    ChunkSink begin(int side, const Flight& f);                     // LinkPaths::begin_chunk
    void finish(int side, const ChunkSink& sink, const Flight& f);  // LinkPaths::finish_chunk

    // --- What happens next ---
    void step();
    // Engine::tick
    void tick();
    void run_next(std::deque<std::function<void()>>& thread);
    // Forgets connections that nothing can come from any more.
    void tidy();
    Flight* some_flight(ConnectionPointer& which, int& towards);
    // Whether there was anything for this fault to happen to.
    bool inject(Fault fault);
    bool happen(Fault fault, int side, uint32_t path);
    bool bar_a_rail(int side);

    bool persists(int towards) const { return persists_ && (afflicted_ & (1 << towards)) != 0; }
    void begin_to_persist();
    void check_patience(int side);

    // --- The end ---
    bool over() const;
    // Lets everything that is still under way arrive, then counts.
    void settle();
    void count();
    std::string stuck() const;

    const Options& options_;
    Tally& tally_;
    Random random_;  // what happens
    Random chaos_;   // what goes wrong
    std::deque<End> ends_;
    std::vector<Transport> kinds_;  // of the paths
    uint32_t rails_ = 0;            // how many of them are rails; they come first
    uint32_t local_threads_ = 0;    // 0: the ends are not on one host
    std::vector<ConnectionPointer> connections_;
    int64_t now_ = kSecond;
    uint64_t next_control_ = 0;
    int faults_left_ = 0;
    uint64_t undelivered_ = 0;
    uint64_t flight_bytes_ = 0;  // LinkCore::Settings
    int64_t rtt_ = 0;            // as the echoes say
    bool leases_ = false;        // over shared memory
    bool leases_last_ = false;   // until everything that was posted has been acknowledged
    bool sizes_change_ = false;  // of the receivers' slots, now and then
    std::optional<Fault> planned_left_;
    int64_t patience_ = 0;  // LinkCore::Settings
    // The persistent fault, if there is one.
    uint64_t persists_from_ = 0;  // step
    bool persists_ = false;
    int afflicted_ = 0;  // bits: towards which ends
    int64_t persists_since_ns_ = 0;
    int64_t progress_ns_ = 0;  // when a chunk was whole last
    std::string dead_;         // why
};

}  // namespace sim
