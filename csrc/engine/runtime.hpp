// Resources shared by all links of an engine: settings, threads and the application's eventfd.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "os/reactor.hpp"
#include "verbs/rail.hpp"
#include "wire/handshake.hpp"

namespace pipemorph {

struct Config {
    std::string job;
    uint32_t rank = 0;
    std::vector<uint8_t> secret;
    std::string host = "0.0.0.0";
    uint16_t port = 0;
    uint32_t queues = 8;
    uint32_t sockets = 4;
    uint32_t chunk_bytes = 1 << 20;
    Transport transport = Transport::any;
    Integrity integrity = Integrity::crc;  // of payloads; without rails unless crc
    double peer_deadline = 10.0;
    // Bytes of a link: limit of the staging for its rails, and of the receive slots that it adds by
    // itself.
    uint64_t flight_bytes = uint64_t{512} << 20;
    RailOptions rdma;
    bool require_rdma = false;  // never fall back to TCP
    int numa_node = -1;         // of the GPU whose tensors are sent; -1: unknown

    void check() const;  // throws EngineError naming the setting
};

const char* name_of(Transport transport);

class Runtime {
  public:
    explicit Runtime(Config config);

    void signal_notifier();
    // Returns the eventfd, which is signalled from the first call on: earlier signals would be
    // useless system calls.
    int notifier();
    Reactor& data(uint32_t path) { return *data_[path % data_.size()]; }
    size_t data_threads() const { return data_.size(); }
    bool may_use_rdma() const {
        const bool wanted =
            config.transport == Transport::any || config.transport == Transport::rdma;
        // A device writes to memory by itself, so its writes cannot be authenticated.
        return wanted && config.integrity == Integrity::crc;
    }
    // A link has `queue_pairs` of each rail, so a rail has as many numbers: its place among the
    // rails, that plus their number, and so on. Peers know each other's rails by these.
    uint32_t rail_numbers() const {
        return static_cast<uint32_t>(
            std::min<size_t>(rails.size() * config.rdma.queue_pairs, kMaxRails));
    }
    const std::shared_ptr<Rail>& rail(uint32_t number) const {
        return rails[number % rails.size()];
    }
    // GIDs by rail number. A port that is down has none yet; a connection looks it up again.
    std::vector<GidBytes> rail_gids() const;
    // Sets the function that gets the unhandled exceptions of all threads.
    void on_failure(const Reactor::Failed& failed);
    void stop();

    const Config config;
    const Digest key;
    const int64_t peer_deadline_ns;
    std::string boot_id;       // empty: unreadable, so "same host" cannot be proved
    uint16_t listen_port = 0;  // sent to authenticated peers only
    std::vector<std::shared_ptr<Rail>> rails;
    std::string rails_error;  // reason for no rails, or fewer than possible
    int memory_node = -1;     // NUMA node of slots and data threads; -1: any

    Reactor control;

  private:
    void place();

    Fd notifier_;
    std::atomic<bool> notifier_watched_{false};
    std::vector<std::unique_ptr<Reactor>> data_;
};

}  // namespace pipemorph
