// What all links of an engine share: settings, threads and the bell.
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
    // Of a link: the most that is staged for its rails at once, and up to which it adds receive
    // slots of its own accord.
    uint64_t flight_bytes = uint64_t{512} << 20;
    RailOptions rdma;
    bool require_rdma = false;  // never fall back to TCP
    int numa_node = -1;         // of the GPU whose tensors travel; -1: not known

    void check() const;  // throws EngineError naming the setting
};

const char* name_of(Transport transport);

class Runtime {
  public:
    explicit Runtime(Config config);

    void ring();
    // From the first call on it rings: a system call that nobody waits for is left out.
    int bell();
    Reactor& data(uint32_t path) { return *data_[path % data_.size()]; }
    size_t data_threads() const { return data_.size(); }
    bool may_use_rdma() const {
        const bool wanted =
            config.transport == Transport::any || config.transport == Transport::rdma;
        // A device writes into memory on its own: nobody could prove what it wrote.
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
    // By their numbers. A port that is down has none yet; it is looked up again when it is
    // connected.
    std::vector<GidBytes> rail_gids() const;
    // Who is told what a thread has thrown that nobody has dealt with.
    void on_failure(const Reactor::Failed& failed);
    void stop();

    const Config config;
    const Digest key;
    const int64_t peer_deadline_ns;
    std::string boot_id;       // empty: cannot be read, so "same host" cannot be proved
    uint16_t listen_port = 0;  // told to authenticated peers only
    std::vector<std::shared_ptr<Rail>> rails;
    std::string rails_trouble;  // why there are none, or fewer than there could be
    int memory_node = -1;       // NUMA node of slots and data threads; -1: wherever they fall

    Reactor control;

  private:
    void place();

    Fd bell_;
    std::atomic<bool> bell_watched_{false};
    std::vector<std::unique_ptr<Reactor>> data_;
};

}  // namespace pipemorph
