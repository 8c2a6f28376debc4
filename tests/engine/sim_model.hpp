// What the simulation is made of; sim_world.hpp says what it is.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <list>

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
    thread_local std::vector<std::shared_ptr<Memory>> kept;
    while (kept.size() <= number) kept.push_back(Memory::anonymous(4096));
    return kept[number];
}

// A chunk on its way. Holding the task keeps the payload alive, as a posted work request does.
struct Flight {
    ChunkTask task;
    uint32_t landed = 0;  // bytes of it in the slot, one-sided only
    bool dropped = false;
    bool damaged = false;
    bool repeated = false;  // one-sided: its notification will come twice
    bool copy = false;      // the second delivery of a chunk
};

// One epoch of one path, as both ends and the fabric between them see it.
struct Connection {
    uint32_t path = 0;
    uint32_t epoch = 0;
    bool one_sided = false;
    bool cut = false;
    bool attached[2] = {false, false};  // that end's memory can be reached
    bool started[2] = {false, false};   // that end's thread serves it
    bool given_up[2] = {false, false};  // that end sends nothing more
    bool retired[2] = {false, false};   // nothing can reach that end's slots any more
    bool overdue[2] = {false, false};   // that end's deadline for a lost chunk runs
    std::list<Flight> towards[2];       // flights to that end
    // Stream: the chunk that is being read at that end.
    struct Reading {
        ChunkSink sink;
        Flight flight;
        uint64_t done = 0;
    };
    std::optional<Reading> reading[2];
};
using ConnectionPointer = std::shared_ptr<Connection>;

struct PathEnd {  // Link::Path
    uint32_t epoch = 0;
    uint32_t fenced = 0;
    ConnectionPointer live;
    std::vector<ConnectionPointer> replaced;   // by a newer epoch, and not retired yet
    std::deque<std::function<void()>> thread;  // posted to the path's reactor
};

struct Sent {
    Key key;
    std::vector<uint8_t> content;
    uint64_t hash = 0;
    uint64_t id = 0;
    bool complete = false;  // at the receiver
    bool delivered = false;
    std::vector<uint8_t> destination;
    bool asked = false;
};

struct End {
    Outbox out;
    Inbox in;
    ReliableStream stream;
    std::vector<PathEnd> paths;
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
    std::vector<uint64_t> asked;
    uint64_t slot_bytes = 0;
    std::map<uint64_t, Sent> sent;
    uint64_t to_send = 0;
    struct Held {
        uint32_t slot;
        uint64_t serial;
    };
    std::vector<Held> held;

    explicit End(size_t queues) : out(queues, kChunkBytes) {}
};

class World {
  public:
    World(const Options& options, Tally& tally);
    uint64_t run();

  private:
    End& end(int side) { return ends_[size_t(side)]; }
    PathEnd& at(int side, uint32_t path) { return end(side).paths[path]; }
    template <typename... Args>
    void trace(const char* format, Args... args) const {
        if (!options_.trace) return;
        std::fprintf(stderr, format, args...);
        std::fputc('\n', stderr);
    }

    // --- The application ---
    void reserve(int side, uint32_t slots, uint64_t bytes);
    void post(int side);
    void send_empty(int side);
    Sent& pick(int side);
    void receive(int side);
    void give_back(int side, uint32_t slot, uint64_t serial);
    // Link::grant. Here the slot's memory becomes the sender's.
    void grant(int side, const SlotGrant& g);

    // --- The control connection ---
    void flush(int side);
    void deliver_control(int side);
    void read_control(int side);                // Link::read_control
    void handle(int side, const Frame& frame);  // Link::handle
    void whole(int side, uint64_t id);
    // The bytes under way are cut off somewhere; the ends notice now or when they meet again.
    void lose_control();
    void deliver_rest(int side);
    // Link::redial_control, Engine::resume_link, Link::attach_control. Whether it got that far.
    bool resume_control(bool half);

    // --- Paths: the rules of engine/link_*.cpp ---
    void dial(uint32_t path, bool half);  // Link::dial_paths and both ends' attach_data
    void attach(int side, const ConnectionPointer& c);
    // DataPath::retire: after this, no byte of the epoch can reach a slot of this end.
    void retire(int side, Connection& c);
    void stop_reading(int side, Connection& c);
    void send_fence(int side, uint32_t path, uint32_t epoch);
    void path_lost(int side, const ConnectionPointer& c);
    void fence_requested(int side, const FenceFrame& fence);
    void answer_fence(int side, const FenceFrame& fence);

    // --- Chunks ---
    void send_chunk(int side, uint32_t path);
    // What a write into `slot` for `serial` has to hold to, at the moment when it happens.
    void check_write(int side, const Flight& f) const;
    void move_chunk(int side, const ConnectionPointer& c);
    // One-sided: any of the writes moves on; its notification comes when all of it is there.
    void land(int side, const ConnectionPointer& c);
    // Stream: the first chunk is read, piece by piece, into where the inbox says.
    void read(int side, const ConnectionPointer& c);
    ChunkSink begin(int side, const Connection& c, const Flight& f);  // Link::begin_chunk
    void finish(int side, const ChunkSink& sink);                     // Link::finish_chunk

    // --- What happens next ---
    void act();
    // Forgets connections that nothing can come from any more.
    void tidy();
    Flight* some_flight(ConnectionPointer& which, int& towards);
    // Whether there was anything for this fault to happen to.
    bool inject(Fault fault);
    bool happen(Fault fault, int side, uint32_t path);

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
    std::vector<bool> one_sided_;
    std::vector<ConnectionPointer> connections_;
    uint64_t next_control_ = 0;
    int faults_left_ = 0;
    uint64_t undelivered_ = 0;
    bool sizes_change_ = false;  // of the receivers' slots, now and then
    std::optional<Fault> planned_left_;
};

}  // namespace sim
