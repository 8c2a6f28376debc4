// A rail: one RNIC port that links may use, opened once per engine, with a progress thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "os/memory.hpp"
#include "os/reactor.hpp"
#include "verbs/gid.hpp"
#include "verbs/library.hpp"

namespace pipemorph {

struct RailOptions {
    // "mlx5_0" or "mlx5_0:2" (port). Empty: every card's first active port.
    std::vector<std::string> devices;
    int gid_index = -1;  // -1: the best one, looked up at every connection
    uint8_t traffic_class = 0;
    uint8_t service_level = 0;
    // Of a link over each pair of rails. One is one flow, which goes one way through a fabric that
    // spreads flows; several use several ways, for the price of staging memory each.
    uint32_t queue_pairs = 1;
    bool wanted = false;           // somebody asked for rdma: say why there is none
    const Verbs* verbs = nullptr;  // in place of the system's libibverbs
};

// An open device and its protection domain. Everything made from it keeps it open.
class VerbsDevice {
  public:
    VerbsDevice(const Verbs& verbs, abi::Device* device);  // throws EngineError
    ~VerbsDevice();
    VerbsDevice(const VerbsDevice&) = delete;
    VerbsDevice& operator=(const VerbsDevice&) = delete;

    const Verbs& verbs;
    const std::string name;
    // The kernel has taken it away, and ended all that was made from it before it said so.
    bool removed() const;

    abi::Context* context = nullptr;
    abi::Pd* pd = nullptr;
};

// Memory that the device may read and write; given up with the last reference.
class Registration {
  public:
    // Throws EngineError, with advice if it is for want of memlock.
    Registration(std::shared_ptr<VerbsDevice> device, std::shared_ptr<Memory> memory, int access);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

    uint8_t* data() const { return memory_->data(); }
    size_t size() const { return memory_->size(); }
    const VerbsDevice& device() const { return *device_; }
    uint32_t lkey() const { return mr_->lkey; }
    uint32_t rkey() const { return mr_->rkey; }

  private:
    std::shared_ptr<VerbsDevice> device_;
    std::shared_ptr<Memory> memory_;
    abi::Mr* mr_;
};

// Where a port can be reached right now.
struct PortAddress {
    GidBytes gid{};
    uint32_t gid_index = 0;
    uint16_t lid = 0;
    uint8_t mtu = 0;  // as verbs count: 1 is 256 bytes, 5 is 4096
    bool infiniband = false;
};

// What lives on a rail and has to hear of its troubles. On the rail's thread.
class RailUser {
  public:
    virtual ~RailUser() = default;
    virtual void rail_failed(const std::string& why) = 0;
    virtual bool uses(const abi::Qp* qp) const = 0;
    virtual bool uses(const abi::Cq* cq) const = 0;
    virtual const GidBytes& local_gid() const = 0;
};

class Rail : public std::enable_shared_from_this<Rail> {
  public:
    // The rails that the options name, or else one port of every card. Those that cannot be used
    // are left out, and `trouble` says of each why; if nothing is left it says so in any case.
    static std::vector<std::shared_ptr<Rail>> open_all(const RailOptions& options,
                                                       std::string& trouble);
    // The same with the library and the sysfs that are given.
    static std::vector<std::shared_ptr<Rail>> open_all(const Verbs& verbs,
                                                       const RailOptions& options,
                                                       std::string& trouble,
                                                       const std::string& sysfs);

    Rail(std::shared_ptr<VerbsDevice> device, uint8_t port, const RailOptions& options);
    ~Rail();

    std::string describe() const;  // "rxe0 port 1"
    const std::string& device_name() const { return device_->name; }
    uint8_t port() const { return port_; }
    const RailOptions& options() const { return options_; }
    const std::shared_ptr<VerbsDevice>& device() const { return device_; }
    Reactor& reactor() { return reactor_; }
    // Where queue pairs are made and connected. That may take the kernel a second each, when it
    // looks for a neighbour that does not answer, and nobody else should have to wait for it.
    Reactor& setup() { return setup_; }
    // Where its card is; numa::kNowhere if that is not known.
    int numa_node() const { return numa_node_; }

    // Asks the device: port state and GIDs change. Throws EngineError if the port is not active
    // or has no usable GID.
    PortAddress address() const;

    // Staging memory for a queue pair, registered once and used again by later ones.
    std::shared_ptr<Registration> borrow_staging(size_t bytes);
    void give_back(std::shared_ptr<Registration> staging) noexcept;

    void watch(const std::shared_ptr<RailUser>& user);
    // Rises whenever a port came up or its GIDs changed: worth trying again at once.
    uint64_t recoveries() const { return recoveries_.load(); }
    void start();  // listens for asynchronous events
    void stop();

  private:
    void on_async();
    std::vector<std::shared_ptr<RailUser>> users();
    void trouble(const std::string& why);
    template <typename Queue>
    void trouble_of(const Queue* queue, const std::string& why);
    void check_addresses();

    const std::shared_ptr<VerbsDevice> device_;
    const uint8_t port_;
    const RailOptions options_;
    std::atomic<uint64_t> recoveries_{0};
    std::mutex mu_;
    std::vector<std::shared_ptr<Registration>> staging_;
    std::vector<std::weak_ptr<RailUser>> users_;
    const int numa_node_;
    Reactor reactor_;
    Reactor setup_;
};

// "0000:3b:00": what two ports of one card have in common; empty if the device is on no PCI bus.
std::string card_of(const std::string& device, const std::string& sysfs);

}  // namespace pipemorph
