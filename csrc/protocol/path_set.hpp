// State of a link's data paths: their connections, the peer's fences, and the choice of the path
// for the next chunk. Pure state, no sockets, clocks or locks.
//
// A connection is identified by path and epoch. It is *current* until it is lost or a newer one
// replaces it; a replaced connection counts until it is retired.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "protocol/flow.hpp"
#include "protocol/outbox.hpp"
#include "protocol/path_state.hpp"
#include "wire/frames.hpp"

namespace pipemorph {

class PathSet {
  public:
    struct Path {
        Transport kind = Transport::tcp;
        PathMachine machine;
        std::string last_error;  // reason of the last loss; empty once something got through again
        uint64_t chunks = 0;     // assigned to it
        uint64_t bytes = 0;

        bool current = false;            // there is a connection of the machine's epoch
        std::vector<uint32_t> replaced;  // epochs of connections that must be retired
        std::vector<FenceFrame> fences;  // the peer's fences without an answer
        // Thread that serves a socket between two processes of one host.
        std::optional<uint32_t> local_thread;
        uint32_t received_epoch = 0;  // the last epoch over which a complete chunk arrived
        size_t segment_step = 0;      // step of `kSegments` with which it was dialled

        // Rails only.
        uint32_t our_rail = 0;
        uint32_t peer_rail = 0;
        bool offered = false;  // waits for the peer's answer
        int64_t offered_ns = 0;
        double bytes_per_second = 0.0;  // capacity; 0: unknown
        int64_t measured_ns = 0;
        // Chunks under way on its connection. `paced`: it reports deliveries, so it is limited to
        // its window.
        Flow flow;
        bool paced = false;

        // Watchdog: assignment time of the newest chunk of this epoch that has arrived, and with it
        // all earlier ones.
        int64_t proved_ns = -1;
        bool giving_up = false;  // its end was requested
    };

    // `most_under_way`: bytes of all rails together.
    PathSet(uint32_t chunk_bytes, uint64_t most_under_way)
        : chunk_bytes_(chunk_bytes), most_under_way_(most_under_way) {}

    // Sets the paths, rails first. The acceptor learns the pairs of rails from offers.
    void assign(const std::vector<std::pair<uint32_t, uint32_t>>& rails, Transport others,
                size_t count);
    // Starts the head start of the rails: the link is up for the first time.
    void start(int64_t now_ns);

    size_t size() const { return paths_.size(); }
    uint32_t rails() const { return rails_; }
    const Path& operator[](size_t path) const { return paths_[path]; }
    std::vector<Path>::const_iterator begin() const { return paths_.begin(); }
    std::vector<Path>::const_iterator end() const { return paths_.end(); }

    // --- Connections ---
    struct Call {
        uint32_t path = 0;
        uint32_t epoch = 0;
    };
    // Dialling side: connections to dial now. Every attempt has a new epoch, since the peer may
    // have accepted one that was given up here.
    std::vector<Call> due(int64_t now_ns);
    void dial_failed(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns);
    // True if a new connection may attach: the peer has not fenced its epoch, and there is no newer
    // one.
    bool may_attach(uint32_t path, uint32_t epoch) const {
        return !paths_[path].machine.is_fenced(epoch) && epoch >= paths_[path].machine.epoch();
    }
    void attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                int64_t now_ns);
    // Replaces the current connection, if any, and returns its epoch: it must be retired.
    std::optional<uint32_t> replace(uint32_t path);
    // Makes a queue pair of the current epoch current, before it is up.
    void hold(uint32_t path) { paths_[path].current = true; }
    bool is_current(uint32_t path, uint32_t epoch) const {
        return paths_[path].current && paths_[path].machine.epoch() == epoch;
    }
    void lose(uint32_t path, const std::string& why, int64_t now_ns);
    // Removes a retired connection. True if it was a replaced one.
    bool forget_replaced(uint32_t path, uint32_t epoch);

    // --- Fences ---
    void fenced_by_peer(const FenceFrame& fence);
    // Fences that can be answered: all connections up to their epoch are retired.
    std::vector<FenceFrame> answerable(uint32_t path);
    void fence_answered(uint32_t path, uint32_t epoch) {
        paths_[path].machine.fence_answered(epoch);
    }

    // --- Who carries ---
    bool may_carry(uint32_t path, uint32_t epoch, const Outbox& out, int64_t now_ns) const;
    // True if its window has room for one more chunk.
    bool has_room(uint32_t path, int64_t now_ns);
    void chunk_assigned(uint32_t path, size_t bytes, int64_t now_ns);
    void ran_out(uint32_t path) { paths_[path].flow.ran_out(); }
    // Limits a connection to its window: it reports deliveries from now on.
    void pace(uint32_t path, uint32_t epoch);
    // Limits the bytes under way to the connection's memory.
    void limit(uint32_t path, uint32_t epoch, uint64_t most) {
        if (is_current(path, epoch)) paths_[path].flow.limit(most);
    }
    void delivered(uint32_t path, uint32_t epoch, int64_t now_ns);
    // Records that the receiver has a chunk of this assignment.
    void proved(const OutMessage::Carrier& carrier);
    // True if this connection may be the reason of a late chunk.
    bool may_be_at_fault(const OutMessage::Carrier& carrier) const {
        return is_current(carrier.path, carrier.epoch) && !paths_[carrier.path].giving_up;
    }
    void give_up(uint32_t path) { paths_[path].giving_up = true; }
    void received(uint32_t path, uint32_t epoch) {
        Path& p = paths_[path];
        p.received_epoch = epoch;
        p.last_error.clear();
    }
    // Reduces the segment size of new sockets after one that delivered nothing in a direction,
    // although it was not cut at once: the network may silently drop large packets. Returns the
    // other sockets with such packets, which must be given up.
    std::vector<uint32_t> reduce_segments(uint32_t path, uint32_t epoch);
    // Most bytes of payload in a packet of a socket that is dialled now; 0: the kernel decides.
    uint32_t segment_bytes() const { return kSegments[segment_step_]; }
    // Bytes under way that a rail may have.
    uint64_t share_of_rail() const { return most_under_way_ / std::max(rails_, 1U); }
    // True if both ends are known to be on one host.
    bool within_a_host() const {
        return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
            return p.kind == Transport::shm || p.local_thread.has_value();
        });
    }
    // True if another socket of its thread carries, so that it need not be notified.
    bool is_standby(uint32_t path) const;
    void connected(uint32_t path, uint32_t epoch, int64_t now_ns);
    void suspected(uint32_t path, uint32_t epoch, bool suspicious) {
        paths_[path].machine.suspected(epoch, suspicious);
    }
    // Records bytes per second while busy.
    void measured(uint32_t path, uint32_t epoch, double bytes_per_second, int64_t now_ns);
    // Updates the carrier. True: rails have handed over to sockets, or sockets to rails.
    bool note_carrier(int64_t now_ns);
    uint64_t times_lost() const {
        uint64_t n = 0;
        for (const Path& p : paths_) n += p.machine.times_lost();
        return n;
    }
    bool any_carries() const {
        return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) { return carries(p); });
    }
    // True once, when the head start of the rails is over and sockets carry from now on.
    bool head_start_over(int64_t now_ns);

    // --- Rails ---
    // Ends all pauses, since a port has come up.
    void reset_backoff();
    void take(const OfferFrame& offer);
    void offered(uint32_t path, int64_t now_ns);
    // Withdraws an offer. False: there was none.
    bool withdraw(uint32_t path);
    // Time for the peer's answer to an offer, in which it may wait for its kernel.
    static constexpr int64_t kConnectLimitNs = 3'000'000'000;
    // Paths whose offer has had no answer in time.
    std::vector<uint32_t> unanswered(int64_t now_ns) const;
    void quarantine(bool ours, uint32_t rail, const std::string& why);
    std::string quarantine_reason(uint32_t path) const { return quarantine_reason(paths_[path]); }
    bool quarantined(uint32_t path) const { return quarantined(paths_[path]); }
    void set_last_error(uint32_t path, const std::string& why) { paths_[path].last_error = why; }
    void add_region(const RegionFrame& region);
    // Region of a granted slot for a path's rail; null if the peer has not sent it.
    const RegionFrame* region(uint32_t path, const SlotGrant& slot) const;

    // Time since which no rail has carried, if only rails may; else empty.
    std::optional<int64_t> only_rails_since() const;
    int64_t without_rail_since() const { return without_rail_since_ns_; }
    bool fell_back() const { return fell_back_; }
    uint64_t fallbacks() const { return fallbacks_; }
    uint64_t failbacks() const { return failbacks_; }
    // Excludes a pause of this process from the time without rails.
    void discount_pause(int64_t passed_ns, int64_t now_ns);

  private:
    std::string quarantine_reason(const Path& path) const;
    bool quarantined(const Path& path) const;
    // True if the path is up. A connection that the peer has given up does not carry.
    static bool carries(const Path& path) {
        return path.machine.carries() && !path.machine.is_fenced(path.machine.epoch());
    }
    bool rails_carry() const;
    bool sockets_may_carry(int64_t now_ns) const;
    bool defers_to_emptier_rails(const Path& path) const;
    bool defers_to_faster_rails(uint32_t path, const Outbox& out, int64_t now_ns) const;

    void begin(Path& path);

    const uint32_t chunk_bytes_;
    const uint64_t most_under_way_;
    std::vector<Path> paths_;
    uint32_t rails_ = 0;
    std::map<std::pair<uint32_t, uint32_t>, RegionFrame> peer_regions_;  // by rail and segment
    // Rails that cannot reach all slots, with the reason, by rail. Permanent.
    std::map<uint32_t, std::string> quarantined_ours_;
    std::map<uint32_t, std::string> quarantined_peers_;
    int64_t without_rail_since_ns_ = 0;  // 0 while a rail carries
    // Segment sizes: tunnels take some 100 bytes of a packet's 1500; every network carries 576.
    static constexpr std::array<uint32_t, 3> kSegments{0, 1200, 536};
    size_t segment_step_ = 0;
    bool fell_back_ = false;
    uint64_t fallbacks_ = 0;
    uint64_t failbacks_ = 0;
};

}  // namespace pipemorph
