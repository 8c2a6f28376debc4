#include "verbs/rail.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "os/numa.hpp"

namespace pipemorph {
namespace {

constexpr size_t kMaxGids = 512;
constexpr uint8_t kMaxPorts = 16;

void set_nonblocking(int fd) {
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

std::string memlock_text() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
    if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
    return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

std::string first_word(const std::string& path) {
    std::ifstream in(path);
    std::string word;
    in >> word;
    return word;
}

// True for text such as "0000:3b:00.1": domain, bus, device, function.
bool is_pci_address(const std::string& s) {
    const size_t n = s.size();
    if (n < 12 || s[n - 2] != '.' || s[n - 5] != ':' || s[n - 8] != ':') return false;
    return std::count(s.begin(), s.end(), ':') == 2 &&
           s.find_first_not_of("0123456789abcdef:.") == std::string::npos;
}

const char* port_state_text(uint32_t state) {
    constexpr const char* kNames[] = {"without state", "down", "initializing", "armed", "active"};
    return state < std::size(kNames) ? kNames[state] : "in an unknown state";
}

GidInfo to_info(const abi::GidEntry& e) {
    GidInfo info;
    std::memcpy(info.gid.data(), e.gid.raw, info.gid.size());
    info.index = e.index;
    info.type = e.type == abi::kGidRoceV2   ? GidInfo::Type::roce_v2
                : e.type == abi::kGidRoceV1 ? GidInfo::Type::roce_v1
                                            : GidInfo::Type::infiniband;
    info.has_netdev = e.netdev_ifindex != 0;
    return info;
}

bool port_active(const VerbsDevice& device, uint8_t port, bool& exists) {
    abi::PortAttr attr{};
    exists = device.verbs.query_port(device.context, port, &attr) == 0;
    return exists && attr.state == abi::kPortActive;
}

// Throws EngineError for a device without the kind of queue pairs that rails need.
void require_reliable_connections(const VerbsDevice& device) {
    const Verbs& v = device.verbs;
    const std::string lacks = device.name + " has no reliable connections as rails need them: ";
    // Its queue pairs are connected by TCP, not by addresses of queue pairs.
    if (device.context->device->transport_type == abi::kTransportIwarp)
        throw EngineError(lacks + "it is an iWARP device");
    abi::Cq* const cq = v.create_cq(device.context, 1, nullptr, nullptr, 0);
    if (cq == nullptr)
        throw EngineError(device.name + " is out of completion queues: " + std::strerror(errno));
    abi::QpInitAttr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {1, 1, 1, 1, 0};
    init.type = abi::kQpReliable;
    abi::Qp* const qp = v.create_qp(device.pd, &init);
    const int error = errno;
    if (qp != nullptr) v.destroy_qp(qp);
    v.destroy_cq(cq);
    if (qp == nullptr) throw EngineError(lacks + std::strerror(error) + " (EFA devices have none)");
}

}  // namespace

std::string card_of(const std::string& device, const std::string& sysfs) {
    // Soft-RoCE has no device of its own; its parent is a network device.
    const std::string base = sysfs + "/class/infiniband/" + device;
    std::string link = base + "/device";
    if (const std::string parent = first_word(base + "/parent"); !parent.empty())
        link = sysfs + "/class/net/" + parent + "/device";
    char real[PATH_MAX];
    if (::realpath(link.c_str(), real) == nullptr) return {};
    std::istringstream parts(real);
    std::string last;
    for (std::string part; std::getline(parts, part, '/');)
        if (is_pci_address(part)) last = part;
    return last.substr(0, last.find('.'));
}

VerbsDevice::VerbsDevice(const Verbs& v, abi::Device* device) : verbs(v), name(device->name) {
    context = verbs.open_device(device);
    if (context == nullptr)
        throw EngineError(name + " cannot be opened: " + std::strerror(errno) +
                          " (does /dev/infiniband/" + device->uverbs_name +
                          " exist here, and may this user write to it?)");
    pd = verbs.alloc_pd(context);
    if (pd == nullptr) {
        const std::string why = std::strerror(errno);
        verbs.close_device(context);
        throw EngineError(name + " is out of protection domains: " + why);
    }
    set_nonblocking(context->async_fd);
    // A forked child closes the engine's descriptors (os/fd.hpp), but not this device: it also
    // inherits the driver's mappings, each of which keeps the device's file open, and only
    // libibverbs has their addresses.
}

VerbsDevice::~VerbsDevice() {
    verbs.dealloc_pd(pd);
    verbs.close_device(context);
}

bool VerbsDevice::removed() const {
    pollfd events{context->async_fd, 0, 0};
    return ::poll(&events, 1, 0) == 1;  // no events were requested, so it is its end
}

Registration::Registration(std::shared_ptr<VerbsDevice> device, std::shared_ptr<Memory> memory,
                           int access)
    : device_(std::move(device)), memory_(std::move(memory)) {
    mr_ = device_->verbs.reg_mr(device_->pd, memory_->data(), memory_->size(), access);
    if (mr_ != nullptr) return;
    const int error = errno;
    std::string why = "registering " + std::to_string(memory_->size()) + " bytes with " +
                      device_->name + " failed: " + std::strerror(error);
    if (error == ENOMEM || error == EPERM || error == EAGAIN)
        why += "; the memlock limit is " + memlock_text() +
               ". Raise it where the process is started (ulimit -l unlimited; for pods "
               "LimitMEMLOCK=infinity in the unit of the container runtime: Kubernetes has no "
               "field for it, and the IPC_LOCK capability helps only root)";
    throw EngineError(why);
}

Registration::~Registration() {
    if (device_->verbs.dereg_mr(mr_) == 0) return;
    // The device may still write there, so the memory must never be reused.
    static_cast<void>(new std::shared_ptr<Memory>(std::move(memory_)));
}

std::vector<std::shared_ptr<Rail>> Rail::open_all(const RailOptions& options, std::string& errors) {
    const Verbs* verbs = options.verbs != nullptr ? options.verbs : load_verbs(errors);
    if (verbs == nullptr) return {};
    return open_all(*verbs, options, errors, "/sys");
}

std::vector<std::shared_ptr<Rail>> Rail::open_all(const Verbs& verbs, const RailOptions& options,
                                                  std::string& errors, const std::string& sysfs) {
    std::vector<std::shared_ptr<Rail>> rails;
    const auto complain = [&](const std::string& what) {
        errors += (errors.empty() ? "" : "; ") + what;
    };
    int count = 0;
    abi::Device** list = verbs.get_device_list(&count);
    if (list == nullptr || count == 0) {
        complain("this machine has no RDMA devices");
        if (list != nullptr) verbs.free_device_list(list);
        return rails;
    }
    std::vector<abi::Device*> found(list, list + count);
    std::sort(found.begin(), found.end(), [](const abi::Device* a, const abi::Device* b) {
        return std::strcmp(a->name, b->name) < 0;
    });
    std::set<std::string> cards;
    const auto try_port = [&](const std::shared_ptr<VerbsDevice>& device, uint8_t port) {
        require_reliable_connections(*device);
        auto rail = std::make_shared<Rail>(device, port, options);
        // A low limit of locked memory fails here, before the rail is in use.
        rail->return_staging(rail->borrow_staging(size_t{1} << 20));
        rails.push_back(std::move(rail));
    };
    const auto add = [&](abi::Device* raw, uint8_t only) {
        try {
            auto device = std::make_shared<VerbsDevice>(verbs, raw);
            if (only != 0) {
                try_port(device, only);
                return;
            }
            for (uint8_t port = 1; port <= kMaxPorts; ++port) {
                bool exists = false;
                const bool active = port_active(*device, port, exists);
                if (!exists) break;
                const std::string what = device->name + " port " + std::to_string(port);
                const std::string card = card_of(device->name, sysfs);
                if (!active)
                    complain(what + " is not active");
                else if (!card.empty() && cards.contains(card))
                    complain(what + " is not used: another port of card " + card + " is");
                else {
                    // Each rail has its own context, since only one reader gets an event.
                    try_port(std::make_shared<VerbsDevice>(verbs, raw), port);
                    if (!card.empty()) cards.insert(card);
                }
            }
        } catch (const EngineError& e) {
            complain(e.what());
        }
    };
    if (options.devices.empty()) {
        for (abi::Device* device : found) add(device, 0);
    } else {
        for (const std::string& wanted : options.devices) {
            const size_t colon = wanted.find(':');
            const std::string name = wanted.substr(0, colon);
            const int port = colon == std::string::npos ? 1 : std::atoi(wanted.c_str() + colon + 1);
            const auto at = std::find_if(found.begin(), found.end(),
                                         [&](const abi::Device* d) { return name == d->name; });
            if (at == found.end() || port < 1 || port > kMaxPorts)
                complain("there is no RDMA device " + wanted);
            else
                add(*at, static_cast<uint8_t>(port));
        }
    }
    verbs.free_device_list(list);
    if (rails.empty() && errors.empty()) errors = "no RDMA port is active";
    for (const auto& rail : rails) rail->start();
    return rails;
}

Rail::Rail(std::shared_ptr<VerbsDevice> device, uint8_t port, const RailOptions& options)
    : device_(std::move(device)),
      port_(port),
      options_(options),
      numa_node_(numa::node_of("/sys/class/infiniband/" + device_->name + "/device")),
      reactor_("pm-" + device_->name.substr(0, 12)),
      setup_("pm-" + device_->name.substr(0, 6) + "-setup") {}

Rail::~Rail() = default;

std::string Rail::describe() const {
    return device_->name + " port " + std::to_string(port_);
}

void Rail::start() {
    reactor_.post([this] {
        numa::run_on(numa_node_);
        reactor_.add(device_->context->async_fd, EPOLLIN, [this](uint32_t) { on_async(); });
    });
}

void Rail::stop() {
    setup_.stop();
    reactor_.stop();
}

PortAddress Rail::address() const {
    const Verbs& v = device_->verbs;
    abi::PortAttr attr{};
    if (const int error = v.query_port(device_->context, port_, &attr); error != 0)
        throw EngineError(describe() + " cannot be queried: " + std::strerror(error));
    if (attr.state != abi::kPortActive)
        throw EngineError(describe() + " is " + port_state_text(attr.state));
    PortAddress out;
    out.lid = attr.lid;
    out.mtu = static_cast<uint8_t>(attr.active_mtu);
    out.infiniband = attr.link_layer == abi::kLinkLayerInfiniband;

    std::vector<abi::GidEntry> entries(kMaxGids);
    const ssize_t n = v.query_gid_table(device_->context, entries.data(), entries.size(), 0,
                                        sizeof(abi::GidEntry));
    if (n < 0)
        throw EngineError(describe() +
                          ": its GIDs cannot be read: " + std::strerror(static_cast<int>(-n)));
    std::vector<GidInfo> table;
    for (ssize_t i = 0; i < n; ++i) {
        const abi::GidEntry& e = entries[static_cast<size_t>(i)];
        if (e.port != port_) continue;
        if (options_.gid_index >= 0 && e.index != static_cast<uint32_t>(options_.gid_index))
            continue;
        table.push_back(to_info(e));
    }
    const auto best = best_gid(table);
    if (!best && !out.infiniband)
        throw EngineError(describe() +
                          (options_.gid_index >= 0
                               ? " has no GID with index " + std::to_string(options_.gid_index)
                               : " has no GID: give its network device an address"));
    if (best) {
        out.gid = best->gid;
        out.gid_index = best->index;
    }
    return out;
}

std::shared_ptr<Registration> Rail::borrow_staging(size_t bytes) {
    {
        const std::lock_guard lock(mu_);
        auto best = staging_.end();
        for (auto it = staging_.begin(); it != staging_.end(); ++it)
            if ((*it)->size() >= bytes &&
                (best == staging_.end() || (*it)->size() < (*best)->size()))
                best = it;
        if (best != staging_.end()) {
            auto found = std::move(*best);
            staging_.erase(best);
            return found;
        }
    }
    const numa::OnNode here(numa_node_);
    return std::make_shared<Registration>(device_, Memory::anonymous(bytes), abi::kLocalWrite);
}

void Rail::return_staging(std::shared_ptr<Registration> staging) noexcept {
    const std::lock_guard lock(mu_);
    try {
        staging_.push_back(std::move(staging));
    } catch (const std::bad_alloc&) {  // the next user registers new memory
    }
}

void Rail::watch(const std::shared_ptr<RailUser>& user) {
    const std::lock_guard lock(mu_);
    std::erase_if(users_, [](const auto& u) { return u.expired(); });
    users_.push_back(user);
}

std::vector<std::shared_ptr<RailUser>> Rail::users() {
    std::vector<std::shared_ptr<RailUser>> out;
    const std::lock_guard lock(mu_);
    for (const auto& weak : users_)
        if (auto user = weak.lock()) out.push_back(std::move(user));
    return out;
}

void Rail::report_failure(const std::string& why) {
    for (const auto& user : users()) user->rail_failed(why);
}

template <typename Queue>
void Rail::report_queue_failure(const Queue* queue, const std::string& why) {
    for (const auto& user : users())
        if (user->uses(queue)) user->rail_failed(why);
}

// Fails users whose own GID is gone: peers cannot answer to that address.
void Rail::check_addresses() {
    const auto affected = users();
    if (affected.empty()) return;
    GidBytes now{};
    std::string why;
    try {
        now = address().gid;
        why = "the GID of " + describe() + " changed to " + gid_text(now);
    } catch (const EngineError& e) {
        why = e.what();
    }
    for (const auto& user : affected)
        if (user->local_gid() != now) user->rail_failed(why);
}

void Rail::on_async() {
    const Verbs& v = device_->verbs;
    abi::AsyncEvent event{};
    while (v.get_async_event(device_->context, &event) == 0) {
        const uint32_t type = event.type;
        const int port = event.element.port;
        const abi::Qp* qp = event.element.qp;
        const abi::Cq* cq = event.element.cq;
        const bool of_qp = type == abi::kEventQpFatal || type == abi::kEventQpRequestError ||
                           type == abi::kEventQpAccessError;
        const bool of_port = type == abi::kEventPortActive || type == abi::kEventPortError ||
                             type == abi::kEventGidChange || type == abi::kEventLidChange;
        // Acknowledged first: the destruction of its object waits for that.
        v.ack_async_event(&event);
        const std::string what = describe() + ": " + v.event_type_str(type);
        if (of_qp)
            report_queue_failure(qp, what);
        else if (type == abi::kEventCqError)
            report_queue_failure(cq, what);
        else if (type == abi::kEventDeviceFatal)
            report_failure(what);
        else if (of_port && port == port_) {
            if (type == abi::kEventPortError)
                report_failure(what);
            else if (type != abi::kEventPortActive)
                check_addresses();
            if (type != abi::kEventPortError) recoveries_.fetch_add(1);
        }
    }
    if (!device_->removed()) return;
    reactor_.remove(device_->context->async_fd);  // it stays readable
    report_failure(describe() + ": the device was removed");
}

}  // namespace pipemorph
