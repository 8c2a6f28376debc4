// The data paths of a link, as its rules see them: which connections each has, what the peer has
// fenced, and which path may carry the next chunk. Pure state, no sockets, clocks or locks.
//
// A connection is known by its path and epoch. It is *current* until it is lost or a newer one
// takes its place; one that was replaced counts until it has been retired.
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
        std::string trouble;  // why it was lost last; empty once something got through again
        uint64_t chunks = 0;  // entrusted to it
        uint64_t bytes = 0;

        bool current = false;            // there is a connection of the machine's epoch
        std::vector<uint32_t> replaced;  // epochs of connections that are still to be retired
        std::vector<FenceFrame> fences;  // the peer's, not answered yet
        // The thread that serves a socket between two processes of one host.
        std::optional<uint32_t> local_thread;
        uint32_t received_epoch = 0;  // the last over which a chunk came in whole
        size_t segment_step = 0;      // with which it was dialled

        // Rails only.
        uint32_t our_rail = 0;
        uint32_t peer_rail = 0;
        bool offered = false;  // waits for the peer's answer
        int64_t offered_ns = 0;
        double bytes_per_second = 0.0;  // that it can carry; 0: not known
        int64_t measured_ns = 0;
        // What its connection has under way. `paced`: it says what was delivered, so it gets no
        // more than its window.
        Flow flow;
        bool paced = false;

        // The watchdog: of the chunks that were given to this epoch, one from then has arrived,
        // and with it all before.
        int64_t proved_ns = -1;
        bool giving_up = false;  // it was told to
    };

    // `most_under_way`: bytes, of all rails together.
    PathSet(uint32_t chunk_bytes, uint64_t most_under_way)
        : chunk_bytes_(chunk_bytes), most_under_way_(most_under_way) {}

    // Rails first. The acceptor does not know yet which rail is whose.
    void assign(const std::vector<std::pair<uint32_t, uint32_t>>& rails, Transport others,
                size_t count);
    // The link is up for the first time: its rails get a head start.
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
    // The dialling side: what to dial now. Every attempt has an epoch of its own, since the peer
    // may have taken one that was given up here.
    std::vector<Call> due(int64_t now_ns);
    void dial_failed(uint32_t path, uint32_t epoch, const std::string& why, int64_t now_ns);
    // A connection was made. Not if the peer has given it up, or there is a newer one.
    bool may_attach(uint32_t path, uint32_t epoch) const {
        return !paths_[path].machine.is_fenced(epoch) && epoch >= paths_[path].machine.epoch();
    }
    void attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                int64_t now_ns);
    // The current connection, if there is one, is to be retired. Returns its epoch.
    std::optional<uint32_t> replace(uint32_t path);
    // A queue pair of the current epoch: a connection that is not up yet.
    void hold(uint32_t path) { paths_[path].current = true; }
    bool is_current(uint32_t path, uint32_t epoch) const {
        return paths_[path].current && paths_[path].machine.epoch() == epoch;
    }
    void lose(uint32_t path, const std::string& why, int64_t now_ns);
    // Nothing can come over this connection any more. Whether it was one that was replaced.
    bool forget_replaced(uint32_t path, uint32_t epoch);

    // --- Fences ---
    void fenced_by_peer(const FenceFrame& fence);
    // Those that can be answered: no connection up to their epoch is left.
    std::vector<FenceFrame> answerable(uint32_t path);
    void fence_answered(uint32_t path, uint32_t epoch) {
        paths_[path].machine.fence_answered(epoch);
    }

    // --- Who carries ---
    bool may_carry(uint32_t path, uint32_t epoch, const Outbox& out, int64_t now_ns) const;
    // Whether its window has room for one more chunk.
    bool has_room(uint32_t path, int64_t now_ns);
    void entrusted(uint32_t path, size_t bytes, int64_t now_ns);
    void ran_out(uint32_t path) { paths_[path].flow.ran_out(); }
    // The connection says what was delivered, from now on.
    void pace(uint32_t path, uint32_t epoch);
    // It has no room for more bytes under way than that.
    void limit(uint32_t path, uint32_t epoch, uint64_t most) {
        if (is_current(path, epoch)) paths_[path].flow.limit(most);
    }
    void delivered(uint32_t path, uint32_t epoch, int64_t now_ns);
    // The receiver has a chunk that was given to it then.
    void proved(const OutMessage::Carrier& carrier);
    // Whether it may be what holds up a chunk.
    bool may_be_at_fault(const OutMessage::Carrier& carrier) const {
        return is_current(carrier.path, carrier.epoch) && !paths_[carrier.path].giving_up;
    }
    void give_up(uint32_t path) { paths_[path].giving_up = true; }
    void received(uint32_t path, uint32_t epoch) {
        Path& p = paths_[path];
        p.received_epoch = epoch;
        p.trouble.clear();
    }
    // Nothing of what this socket was given arrived, in one direction or the other, and not because
    // it was cut at once: perhaps something on the way drops large packets and says nothing.
    // Sockets are dialled with smaller segments from now on. Returns the others that send such
    // packets, to be given up.
    std::vector<uint32_t> lost_in_vain(uint32_t path, uint32_t epoch);
    // The most bytes of payload in a packet of a socket that is dialled now; 0: as the kernel
    // finds.
    uint32_t segment_bytes() const { return kSegments[segment_step_]; }
    // Bytes that one rail may have under way.
    uint64_t share_of_rail() const { return most_under_way_ / std::max(rails_, 1U); }
    // Both ends are on one host, as far as is known.
    bool within_a_host() const {
        return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
            return p.kind == Transport::shm || p.local_thread.has_value();
        });
    }
    // Not worth waking: another socket of its thread carries.
    bool stands_by(uint32_t path) const;
    void connected(uint32_t path, uint32_t epoch, int64_t now_ns);
    void suspected(uint32_t path, uint32_t epoch, bool suspicious) {
        paths_[path].machine.suspected(epoch, suspicious);
    }
    // Bytes per second while busy.
    void measured(uint32_t path, uint32_t epoch, double bytes_per_second, int64_t now_ns);
    // What carries may have changed. True: rails have handed over to sockets or the other way.
    bool note_carrier(int64_t now_ns);
    uint64_t times_lost() const {
        uint64_t n = 0;
        for (const Path& p : paths_) n += p.machine.times_lost();
        return n;
    }
    bool any_carries() const {
        return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) { return carries(p); });
    }
    // Without rails for so long that sockets carry from now on: true once.
    bool head_start_over(int64_t now_ns);

    // --- Rails ---
    // A port has come up: nobody waits out a pause.
    void hurry();
    void take(const OfferFrame& offer);
    void offered(uint32_t path, int64_t now_ns);
    // False: there was no offer.
    bool withdraw(uint32_t path);
    // For the peer's answer to an offer. It may have to wait for its kernel, too.
    static constexpr int64_t kConnectLimitNs = 3'000'000'000;
    // That nobody has answered in time.
    std::vector<uint32_t> unanswered(int64_t now_ns) const;
    void bar(bool ours, uint32_t rail, const std::string& why);
    std::string why_barred(uint32_t path) const { return why_barred(paths_[path]); }
    bool barred(uint32_t path) const { return barred(paths_[path]); }
    void set_trouble(uint32_t path, const std::string& why) { paths_[path].trouble = why; }
    void add_region(const RegionFrame& region);
    // Where a granted slot lies for a path's rail; nothing if the peer never said.
    const RegionFrame* region(uint32_t path, const SlotGrant& slot) const;

    // Only rails may carry, and none has since then; nothing where something may.
    std::optional<int64_t> only_rails_since() const;
    int64_t without_rail_since() const { return without_rail_since_ns_; }
    bool fell_back() const { return fell_back_; }
    uint64_t fallbacks() const { return fallbacks_; }
    uint64_t failbacks() const { return failbacks_; }
    // Nobody ran for so long: it does not count.
    void forgive(int64_t passed_ns, int64_t now_ns);

  private:
    std::string why_barred(const Path& path) const;
    bool barred(const Path& path) const;
    // What the peer has given up carries nothing, however long it takes to retire it here.
    static bool carries(const Path& path) {
        return path.machine.carries() && !path.machine.is_fenced(path.machine.epoch());
    }
    bool rails_carry() const;
    bool sockets_may_carry(int64_t now_ns) const;
    bool leave_to_emptier_rails(const Path& path) const;
    bool leave_to_other_rails(uint32_t path, const Outbox& out, int64_t now_ns) const;

    void begin(Path& path);

    const uint32_t chunk_bytes_;
    const uint64_t most_under_way_;
    std::vector<Path> paths_;
    uint32_t rails_ = 0;
    std::map<std::pair<uint32_t, uint32_t>, RegionFrame> peer_regions_;  // by rail and segment
    // Rails that may not touch all the slots: why, by rail. For as long as the link lives.
    std::map<uint32_t, std::string> barred_ours_;
    std::map<uint32_t, std::string> barred_peers_;
    int64_t without_rail_since_ns_ = 0;  // 0 while one carries
    // Tunnels take some 100 bytes of a packet's 1500; every network carries 576.
    static constexpr std::array<uint32_t, 3> kSegments{0, 1200, 536};
    size_t segment_step_ = 0;
    bool fell_back_ = false;
    uint64_t fallbacks_ = 0;
    uint64_t failbacks_ = 0;
};

}  // namespace pipemorph
