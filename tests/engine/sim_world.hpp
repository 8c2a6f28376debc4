// A link between two ranks without sockets, threads or clocks: the product's LinkCore on both ends,
// and a network in between that does its worst, driven by a seed.
//
// The core has the rules. What carries out its actions is modelled here as engine/link_*.cpp does
// it: connections of paths, the FIFO of a path's thread and of the one that sets up its queue
// pairs, and the control connection. `test_engine_mutants.py` takes single rules out of the core,
// to show that the simulation notices.
//
// Two kinds of path. A *stream* (TCP) delivers chunks in order and the receiver puts them into the
// slot. A *one-sided* path (RDMA, and shared memory) writes into the slot without asking the
// receiver, in any order and in pieces, and tells of it afterwards; what was posted may land long
// after its sender has given the path up, until the receiver has retired its end.
#pragma once

#include <map>
#include <random>
#include <string>

#include "protocol/link_core.hpp"

namespace sim {

using namespace pipemorph;

constexpr uint32_t kChunkBytes = 8;

enum class Fault {
    sender_loses_path,    // completion error, missed deadline: the receiver knows nothing of it
    receiver_loses_path,  // end of stream, port down
    cut,                  // both notice, each in its own time; what was under way may be lost
    drop,                 // one chunk is lost, the sender's deadline will notice
    damage,               // one chunk's checksum will be wrong
    duplicate,            // one chunk comes twice
    half_dial,            // the acceptor takes a path that the dialler has given up
    control,              // the control connection breaks, in mid-frame or between two
    half_resume,          // the acceptor resumes on a connection that the dialler never gets
    suspect,              // a rail goes quiet; it comes back, or it is lost
    quarantine_rail,      // a larger slot that a rail cannot register: it carries nothing any more
    swallow,              // one chunk does not arrive, and its path looks as if it had
};
constexpr int kFaults = 12;

// What goes on once it has begun: nothing heals it but the link's own means.
enum class Persistent {
    swallow,   // no chunk arrives, and its path looks as if it had
    large,     // no whole chunk does; what is smaller gets through
    cut,       // every connection breaks with the first chunk that it is given
    no_paths,  // every connection breaks, and no other can be made
};
constexpr int kPersistent = 4;

struct Options {
    uint64_t seed = 0;
    int random_faults = 0;
    // From some step on, in one direction or in both. The link has to end in time, or deliver all.
    std::optional<Persistent> persistent;
    // One fault at one step, besides the random ones; the steps before it do not depend on it.
    std::optional<std::pair<uint64_t, Fault>> planned;
    bool trace = false;
};

// How often what happened, over all schedules of a run: a fault that never happens tests nothing.
struct Tally {
    uint64_t schedules = 0, steps = 0, messages = 0, grown = 0, leases = 0;
    uint64_t paths_lost = 0, half_dials = 0, controls_lost = 0, resumes = 0;
    uint64_t chunks_resent = 0, duplicates = 0, stale = 0, dropped = 0, damaged = 0;
    uint64_t fallbacks = 0, failbacks = 0, segments = 0, replaced = 0;
    uint64_t late = 0;           // messages that a path was given up for
    uint64_t slots_added = 0;    // by the receiver itself
    uint64_t full_windows = 0;   // a rail had as much under way as it may
    uint64_t late_writes = 0;    // landed after the sender had given the path up: allowed
    uint64_t fenced_writes = 0;  // would have landed after that, but for the fence
    uint64_t faults[kFaults] = {};
    uint64_t dead = 0;           // links that ended of a persistent fault
    uint64_t over_in_time = 0;   // that delivered everything in spite of it
    int64_t longest_to_die = 0;  // in patiences, x 100
    Tally& operator+=(const Tally& other);
};

// Plays one schedule to its end. Returns what went wrong, or nothing. `steps`: how many it took.
std::string play(const Options& options, Tally& tally, uint64_t* steps = nullptr);

}  // namespace sim
