// Rail: one RNIC port that links may use, opened once per engine, with a progress thread.
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
    // Names such as "mlx5_0" or "mlx5_0:2" (port). Empty: every card's first active port.
    std::vector<std::string> devices;
    int gid_index = -1;  // -1: the best one, determined at every connection
    uint8_t traffic_class = 0;
    uint8_t service_level = 0;
    // Queue pairs of a link over each pair of rails. One is a single flow, which takes one path
    // through a fabric; several use several paths, at the price of staging memory for each.
    uint32_t queue_pairs = 1;
    bool wanted = false;           // rdma was requested: report why there is none
    const Verbs* verbs = nullptr;  // instead of the system's libibverbs
};

// Open device and its protection domain. All objects made from it keep it open.
class VerbsDevice {
  public:
    VerbsDevice(const Verbs& verbs, abi::Device* device);  // throws EngineError
    ~VerbsDevice();
    VerbsDevice(const VerbsDevice&) = delete;
    VerbsDevice& operator=(const VerbsDevice&) = delete;

    const Verbs& verbs;
    const std::string name;
    // True if the kernel has removed the device, after ending all objects made from it.
    bool removed() const;

    abi::Context* context = nullptr;
    abi::Pd* pd = nullptr;
};

// Memory that the device may read and write, until the last reference is dropped.
class Registration {
  public:
    // Throws EngineError, with advice if the memlock limit is too low.
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

// Current address of a port.
struct PortAddress {
    GidBytes gid{};
    uint32_t gid_index = 0;
    uint16_t lid = 0;
    uint8_t mtu = 0;  // as verbs count: 1 is 256 bytes, 5 is 4096
    bool infiniband = false;
};

// User of a rail, which is notified of its failures on the rail's thread.
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
    // Opens the rails that the options name, or else one port of every card. `errors` gets the
    // reason for each unusable one, and is not empty if there is no rail.
    static std::vector<std::shared_ptr<Rail>> open_all(const RailOptions& options,
                                                       std::string& errors);
    // Opens rails with a given library and sysfs.
    static std::vector<std::shared_ptr<Rail>> open_all(const Verbs& verbs,
                                                       const RailOptions& options,
                                                       std::string& errors,
                                                       const std::string& sysfs);

    Rail(std::shared_ptr<VerbsDevice> device, uint8_t port, const RailOptions& options);
    ~Rail();

    std::string describe() const;  // "rxe0 port 1"
    const std::string& device_name() const { return device_->name; }
    uint8_t port() const { return port_; }
    const RailOptions& options() const { return options_; }
    const std::shared_ptr<VerbsDevice>& device() const { return device_; }
    Reactor& reactor() { return reactor_; }
    // Thread that makes and connects queue pairs. The kernel may take a second for each, when it
    // resolves a neighbour that does not answer, and no other work should wait for that.
    Reactor& setup() { return setup_; }
    // Node of its card; numa::kNowhere if unknown.
    int numa_node() const { return numa_node_; }

    // Queries the device, since port state and GIDs change. Throws EngineError if the port is not
    // active or has no usable GID.
    PortAddress address() const;

    // Staging memory for a queue pair, registered once and reused by later ones.
    std::shared_ptr<Registration> borrow_staging(size_t bytes);
    void return_staging(std::shared_ptr<Registration> staging) noexcept;

    void watch(const std::shared_ptr<RailUser>& user);
    // Counter that rises when a port comes up or its GIDs change: a reason to retry at once.
    uint64_t recoveries() const { return recoveries_.load(); }
    void start();  // listens for asynchronous events
    void stop();

  private:
    void on_async();
    std::vector<std::shared_ptr<RailUser>> users();
    void report_failure(const std::string& why);
    template <typename Queue>
    void report_queue_failure(const Queue* queue, const std::string& why);
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

// PCI address of the card, such as "0000:3b:00", which its ports share; empty without a PCI bus.
std::string card_of(const std::string& device, const std::string& sysfs);

}  // namespace pipemorph
