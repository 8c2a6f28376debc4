// Data paths of a link: their connections, made and retired, the memory that they reach, and the
// interface of the link for them. Rails offer and answer queue pairs over the control connection.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/lease_pool.hpp"
#include "engine/runtime.hpp"
#include "path/rdma_path.hpp"
#include "protocol/link_core.hpp"

namespace pipemorph {

class Link;
struct LinkStats;
struct PathStats;

// Its state is behind the link's mutex. "Locked" functions are called with it, all others without.
class LinkPaths final : public PathHost {
  public:
    explicit LinkPaths(Link& link);

    // --- Memory. Any thread. ---
    // Memory for a payload, to be filled and then sent without a copy.
    struct Lease {
        uint8_t* data = nullptr;
        uint64_t bytes = 0;
        std::shared_ptr<void> hold;     // keeps `data` mapped, and on rails reserved
        std::optional<SlotGrant> slot;  // shared memory: the peer's slot that has `data`
    };
    // Leases memory; empty if none is free, or the link has none.
    std::optional<Lease> lease(int direction, uint64_t bytes);
    // Ends a lease without a message.
    void end_lease(const Lease& lease);
    // Memory of all leases, for as long as it is held: mapped slots of the peer, or memory
    // registered with the rails.
    std::vector<std::shared_ptr<Memory>> lease_memory() const;
    // Adds receive slots. `needed`: a caller waits for them; otherwise none are added if a rail
    // cannot reach the memory.
    bool make_room(int direction, const Inbox::Room& room, bool needed);
    // Post slow work to another thread.
    void start_to_grow(const Actions::Grow& what);
    void start_to_drop_memory();

    // --- Connections. ---
    // Fault injection, any thread.
    void sever(uint32_t index);
    // Reason to refuse an incoming connection, or an empty text. Control thread, as the next five.
    std::string may_attach(uint32_t path, uint32_t epoch) const;
    void attach(uint32_t path, uint32_t epoch, Fd fd, const ConnectionKeys& keys);
    void dial_paths();
    void check_rails(int64_t now_ns);
    void take_offer(const OfferFrame& offer);
    void take_answer(const AnswerFrame& answer);

    // --- The link's side, locked. ---
    size_t size() const { return connections_by_path_.size(); }
    // Sets the paths by the terms of the link.
    void assign();
    void notify();
    // Connections to notify, without standby ones, whose threads would find nothing to do.
    std::vector<std::shared_ptr<DataPath>> live() const;
    std::shared_ptr<DataPath> current(uint32_t index) const;
    // Connection that a thread of the application may read itself.
    std::shared_ptr<DataPath> first_live() const;
    void withdraw(uint32_t path);
    void start_to_retire(const Actions::Retire& what);
    // Closes each connection on its own thread; the last one releases `ending`. If it throws, some
    // are closed, and it can be repeated; then `drop_connections`. The result must not be destroyed
    // while the mutex is held.
    std::vector<std::shared_ptr<DataPath>> start_to_close(const std::shared_ptr<void>& ending);
    void drop_connections();
    // Text for errors, such as "1 of 2 data paths up (rxe0 port 1 DOWN: ...)"; empty without
    // current or recent errors.
    std::string text() const;
    // Text for a link that only rails may carry and that has none; else empty.
    std::string missing_rail(int64_t now_ns) const;
    void count(LinkStats& stats) const;

    // --- PathHost. Any thread. ---
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override;
    ChunkSink begin_chunk(const ChunkHeader& header) override;
    void finish_chunk(const ChunkSink& sink, bool intact) override;
    void refused() override;
    void stale_chunk() override;
    void copied_out(uint64_t bytes) override {
        bytes_copied_out_.fetch_add(bytes, std::memory_order_relaxed);
    }
    // Counts also copies by the application out of a slot.
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
    using Lock = std::unique_lock<std::mutex>;

    // Connections of one path. The core determines the current one.
    struct PathConnections {
        std::vector<std::shared_ptr<DataPath>> connections;  // not retired yet
        std::shared_ptr<RdmaPath> offered;                   // waits for the peer's answer
        EchoMeter rtt;
    };

    // This object, with a reference to the link.
    std::shared_ptr<PathHost> host();
    void grow_leases(uint64_t bytes);
    void grow(const Actions::Grow& what);
    void drop_memory();  // slow
    // Thread for slow work: that of queue pairs, if there are rails, so that the control thread
    // does not wait.
    Reactor& setup_reactor();

    Reactor& reactor_of(uint32_t index);
    void retire(Reactor& reactor, const Actions::Retire& what);  // those of this thread
    std::shared_ptr<DataPath> make_path(uint32_t index, uint32_t epoch, Fd fd,
                                        const ConnectionKeys& keys);  // locked
    PathStats describe(uint32_t index) const;                         // locked

    // Steps of connecting rails, on the control thread and on the rail's setup thread. The path
    // records the result.
    void offer_rail(uint32_t index, uint32_t epoch);
    void make_offer(uint32_t rail, uint32_t index, uint32_t epoch);
    void answer_offer(const OfferFrame& offer);
    void connect_offered(const std::shared_ptr<RdmaPath>& made, const AnswerFrame& answer);
    RdmaPath::Settings rdma_settings() const;

    Link& link_;
    std::mutex& mu_;
    LinkCore& core_;
    Runtime& runtime_;

    std::vector<PathConnections> connections_by_path_;  // by path
    const std::shared_ptr<LeasePool> lease_pool_;
    std::vector<std::shared_ptr<Registration>> registrations_;
    std::map<uint32_t, std::shared_ptr<Memory>> peer_segments_;
    uint64_t recoveries_seen_ = 0;
    // Counted without the lock, which would be costly for every chunk.
    std::atomic<uint64_t> bytes_copied_out_{0};
    std::atomic<uint64_t> bytes_copied_in_{0};
};

}  // namespace pipemorph
