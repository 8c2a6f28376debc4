#include "engine/runtime.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "base/error.hpp"
#include "os/clock.hpp"
#include "os/numa.hpp"
#include "os/processors.hpp"

namespace pipemorph {
namespace {

std::string read_boot_id() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    std::getline(file, id);
    return id;
}

// Copying and checksumming saturate a core each way. Stages compute on the same machine, so several
// threads run only where there are many cores. Beyond its quota of processor time, a container is
// stopped as a whole.
size_t data_thread_count() {
    const size_t cores = usable_processors();
    return cores >= 32 ? 4 : cores >= 8 ? 2 : 1;
}

void require(bool ok, const std::string& what) {
    if (!ok) throw EngineError(what);
}

}  // namespace

void Config::check() const {
    require(!secret.empty(), "secret must not be empty");
    require(job.size() <= 512, "job must be at most 512 bytes");
    require(queues >= 1 && queues <= 1024, "queues must be between 1 and 1024");
    require(sockets >= 1 && sockets <= 64, "sockets must be between 1 and 64");
    require(chunk_bytes >= 4096 && chunk_bytes <= (1U << 30),
            "chunk_bytes must be between 4096 and 2**30");
    require(flight_bytes >= chunk_bytes, "flight_bytes must be at least chunk_bytes");
    require(!require_rdma || transport == Transport::rdma, "require rdma contradicts transport " +
                                                               std::string(name_of(transport)) +
                                                               ": set it to rdma");
    require(integrity == Integrity::crc || transport != Transport::rdma,
            "integrity " + std::string(name_of(integrity)) +
                " contradicts transport rdma, whose payloads have no MAC: use integrity crc, or "
                "transport auto, shm or tcp");
    require(rdma.queue_pairs >= 1 && rdma.queue_pairs <= kMaxRails,
            "queue_pairs must be between 1 and " + std::to_string(kMaxRails));
    require(rdma.service_level <= 15, "service_level must be between 0 and 15");
    require(std::isfinite(peer_deadline) && peer_deadline >= 0.1 && peer_deadline <= 86400.0,
            "peer_deadline must be between 0.1 and 86400 seconds");
}

const char* name_of(Transport transport) {
    switch (transport) {
        case Transport::any:
            return "auto";
        case Transport::tcp:
            return "tcp";
        case Transport::shm:
            return "shm";
        case Transport::rdma:
            return "rdma";
    }
    return "?";
}

Runtime::Runtime(Config c)
    : config(std::move(c)),
      key(handshake_key(config.secret)),
      peer_deadline_ns(to_ns(config.peer_deadline)),
      boot_id(config.transport == Transport::tcp ? std::string() : read_boot_id()),
      control("pm-control"),
      notifier_(Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
    // Registered after libcrypto was loaded, so it runs before libcrypto is torn down, which
    // Python's ssl and hashlib may have requested for the process's end. MACs are computed until
    // then.
    static const bool registered = std::atexit(Reactor::halt_all) == 0;
    if (!registered) throw EngineError("atexit failed");
    if (!notifier_) throw EngineError("eventfd failed");
    const size_t threads = data_thread_count();
    for (size_t i = 0; i < threads; ++i)
        data_.push_back(std::make_unique<Reactor>("pm-data-" + std::to_string(i)));
    if (may_use_rdma()) rails = Rail::open_all(config.rdma, rails_error);
    if (config.transport == Transport::any && config.integrity != Integrity::crc)
        rails_error = "payloads over RDMA have no MAC, and integrity is " +
                      std::string(name_of(config.integrity));
    if (rails.size() > kMaxRails) rails.resize(kMaxRails);
    place();
    if (config.require_rdma && rails.empty())
        throw EngineError("rdma is required, but rank " + std::to_string(config.rank) +
                          " has no usable rail: " + rails_error);
}

// Places slots and data threads. Rails write slots, and the application copies them to the GPU, so
// they belong to the GPU's node if known, else to that of all rails.
void Runtime::place() {
    std::vector<int> nodes;
    for (const auto& rail : rails) nodes.push_back(rail->numa_node());
    memory_node = config.numa_node >= 0 ? config.numa_node : numa::common(nodes);
    for (auto& reactor : data_) reactor->post([node = memory_node] { numa::run_on(node); });
}

int Runtime::notifier() {
    // The first call signals it, since earlier events were not signalled.
    if (!notifier_watched_.exchange(true)) signal_notifier();
    return notifier_.get();
}

void Runtime::signal_notifier() {
    if (!notifier_watched_) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(notifier_.get(), &one, sizeof one);
}

std::vector<GidBytes> Runtime::rail_gids() const {
    std::vector<GidBytes> gids;
    for (uint32_t number = 0; number < rail_numbers(); ++number) {
        try {
            gids.push_back(rail(number)->address().gid);
        } catch (const EngineError&) {
            gids.emplace_back();
        }
    }
    return gids;
}

void Runtime::on_failure(const Reactor::Failed& failed) {
    control.on_failure(failed);
    for (auto& reactor : data_) reactor->on_failure(failed);
    for (const auto& rail : rails) {
        rail->reactor().on_failure(failed);
        rail->setup().on_failure(failed);
    }
}

void Runtime::stop() {
    control.stop();
    for (auto& reactor : data_) reactor->stop();
    for (const auto& rail : rails) rail->stop();
}

}  // namespace pipemorph
