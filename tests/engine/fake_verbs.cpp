#include "fake_verbs.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "check.hpp"

namespace fake {

using namespace pipemorph;

namespace {

Fabric* current = nullptr;

constexpr uint32_t kRemoteAccessError = 10;
constexpr uint32_t kRetriesExceeded = 12;
constexpr uint32_t kReceiverNotReadyRetriesExceeded = 13;
constexpr uint8_t kForEver = 7;

// What the five bits of a receiver-not-ready timer mean, in units of 10 µs.
constexpr int64_t kReceiverNotReadyUnits[] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                              16,    24,   32,   48,    64,    96,    128,   192,
                                              256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                              4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};

int semaphore() {
    return ::eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
}

void give(int fd) {
    const uint64_t one = 1;
    CHECK(::write(fd, &one, sizeof one) == sizeof one);
}

bool take(int fd) {
    uint64_t one = 0;
    return ::read(fd, &one, sizeof one) == sizeof one;
}

}  // namespace

struct Fabric::Context : abi::Context {
    std::deque<abi::AsyncEvent> events;
};

struct Fabric::Domain {
    Fabric::Context* context;
};

struct Fabric::Channel : abi::CompChannel {
    std::deque<abi::Cq*> events;
    int queues = 0;
};

struct Fabric::Queue : abi::Cq {
    size_t capacity = 0;
    bool armed = false;
    bool broken = false;
    unsigned int unacknowledged = 0;
    int pairs = 0;
    std::deque<abi::Wc> entries;
};

struct Fabric::Pair : abi::Qp {
    struct Sent {
        uint64_t id;
        uint64_t number;
        bool signaled;
        uint32_t opcode;
    };
    struct Posted {
        uint64_t id;
        abi::Sge sge;
    };
    std::string device;
    uint32_t state = 0;
    abi::QpAttr attr{};  // as far as it was set
    abi::QpCap cap{};
    std::deque<Sent> sent;
    std::deque<Posted> receives;
    uint64_t next_send = 0;
    int64_t blocked_since_ns = -1;  // nobody answers, or the receiver is not ready
    uint32_t blocked_status = 0;

    Fabric::Queue& queue() { return *static_cast<Fabric::Queue*>(recv_cq); }
};

// libibverbs' functions, each of them on the fabric that there is.
struct Calls {
    static std::unique_lock<std::recursive_mutex> lock() {
        CHECK(current != nullptr);
        return std::unique_lock(current->mu_);
    }

    static abi::Device** get_device_list(int* count) {
        const auto l = lock();
        *count = static_cast<int>(current->listed_.size());
        return current->listed_.data();
    }
    static abi::Context* open_device(abi::Device* device) {
        const auto l = lock();
        auto* context = new Fabric::Context;
        context->device = device;
        context->async_fd = semaphore();
        context->ops.poll_cq = poll_cq;
        context->ops.req_notify_cq = req_notify_cq;
        context->ops.post_send = post_send;
        context->ops.post_recv = post_recv;
        current->contexts_.insert(context);
        ++current->open_;
        return context;
    }
    static int close_device(abi::Context* c) {
        const auto l = lock();
        auto* context = static_cast<Fabric::Context*>(c);
        // With the context the kernel ends all that was made from it.
        std::erase_if(current->pairs_, [&](const auto& p) { return p->context == context; });
        ::close(context->async_fd);
        current->contexts_.erase(context);
        delete context;
        --current->open_;
        return 0;
    }
    static Device& described(const abi::Context* context) {
        for (Device& d : current->devices_)
            if (&d.device == context->device) return d;
        check::fail(__FILE__, __LINE__, "no such device");
    }
    static int query_port(abi::Context* context, uint8_t port, abi::PortAttr* out) {
        const auto l = lock();
        const Device& device = described(context);
        if (port < 1 || port > device.ports.size()) return EINVAL;
        *out = {};
        out->state = device.ports[port - 1] ? abi::kPortActive : abi::kPortDown;
        out->active_mtu = 5;
        out->link_layer = abi::kLinkLayerEthernet;
        return 0;
    }
    static ssize_t query_gid_table(abi::Context* context, abi::GidEntry* out, size_t count,
                                   uint32_t, size_t) {
        const auto l = lock();
        const Device& device = described(context);
        const auto at =
            std::find(current->listed_.begin(), current->listed_.end(), context->device);
        const size_t n = std::min(count, device.ports.size());
        for (size_t i = 0; i < n; ++i) {
            out[i] = {};
            out[i].gid.raw[10] = out[i].gid.raw[11] = 0xff;
            out[i].gid.raw[12] = 10;
            out[i].gid.raw[14] = static_cast<uint8_t>(i + 1);
            out[i].gid.raw[15] = static_cast<uint8_t>(at - current->listed_.begin() + 1);
            out[i].port = static_cast<uint32_t>(i + 1);
            out[i].type = abi::kGidRoceV2;
            out[i].netdev_ifindex = 1;
        }
        return static_cast<ssize_t>(n);
    }
    static abi::Pd* alloc_pd(abi::Context* context) {
        const auto l = lock();
        ++current->open_;
        return reinterpret_cast<abi::Pd*>(
            new Fabric::Domain{static_cast<Fabric::Context*>(context)});
    }
    static int dealloc_pd(abi::Pd* pd) {
        const auto l = lock();
        delete reinterpret_cast<Fabric::Domain*>(pd);
        --current->open_;
        return 0;
    }
    static abi::Mr* reg_mr(abi::Pd* pd, void* address, size_t length, int access) {
        auto* context = reinterpret_cast<Fabric::Domain*>(pd)->context;
        errno = current->ask("reg_mr", context->device);
        if (errno != 0) return nullptr;
        const auto l = lock();
        errno = ENOMEM;
        if (!described(context).registers) return nullptr;
        const uint32_t key = current->next_key_++;
        auto* mr = new abi::Mr{context, pd, address, length, 0, key, key};
        current->regions_[key] = {mr, access};
        ++current->open_;
        return mr;
    }
    static int dereg_mr(abi::Mr* mr) {
        const auto l = lock();
        current->regions_.erase(mr->lkey);
        delete mr;
        --current->open_;
        return 0;
    }
    static abi::CompChannel* create_comp_channel(abi::Context* context) {
        const auto l = lock();
        auto* channel = new Fabric::Channel;
        channel->context = context;
        channel->fd = semaphore();
        ++current->open_;
        return channel;
    }
    static int destroy_comp_channel(abi::CompChannel* c) {
        const auto l = lock();
        auto* channel = static_cast<Fabric::Channel*>(c);
        if (channel->queues > 0) return EBUSY;
        ::close(channel->fd);
        delete channel;
        --current->open_;
        return 0;
    }
    static abi::Cq* create_cq(abi::Context* context, int entries, void* user,
                              abi::CompChannel* channel, int) {
        const auto l = lock();
        auto* queue = new Fabric::Queue;
        queue->context = context;
        queue->channel = channel;
        queue->user_context = user;
        queue->capacity = static_cast<size_t>(entries);
        if (channel != nullptr) ++static_cast<Fabric::Channel*>(channel)->queues;
        current->queues_.insert(queue);
        ++current->open_;
        return queue;
    }
    static int destroy_cq(abi::Cq* cq) {
        const auto l = lock();
        auto* queue = static_cast<Fabric::Queue*>(cq);
        // The real one would wait for the acknowledgements, for ever.
        if (queue->pairs > 0 || queue->unacknowledged > 0) return EBUSY;
        if (queue->channel != nullptr) {
            auto* channel = static_cast<Fabric::Channel*>(queue->channel);
            --channel->queues;
            std::erase(channel->events, cq);
        }
        current->queues_.erase(queue);
        delete queue;
        --current->open_;
        return 0;
    }
    static int get_cq_event(abi::CompChannel* c, abi::Cq** cq, void** user) {
        if (!take(c->fd)) return -1;
        const auto l = lock();
        auto* channel = static_cast<Fabric::Channel*>(c);
        if (channel->events.empty()) return -1;
        *cq = channel->events.front();
        *user = (*cq)->user_context;
        channel->events.pop_front();
        ++static_cast<Fabric::Queue*>(*cq)->unacknowledged;
        return 0;
    }
    static void ack_cq_events(abi::Cq* cq, unsigned int count) {
        const auto l = lock();
        static_cast<Fabric::Queue*>(cq)->unacknowledged -= count;
    }
    static abi::Qp* create_qp(abi::Pd* pd, abi::QpInitAttr* init) {
        auto* context = reinterpret_cast<Fabric::Domain*>(pd)->context;
        errno = current->ask("create_qp", context->device);
        if (errno != 0) return nullptr;
        const auto l = lock();
        auto pair = std::make_unique<Fabric::Pair>();
        pair->context = context;
        pair->pd = pd;
        pair->send_cq = init->send_cq;
        pair->recv_cq = init->recv_cq;
        pair->cap = init->cap;
        pair->number = current->next_pair_++;
        pair->device = context->device->name;
        ++pair->queue().pairs;
        ++current->open_;
        current->pairs_.push_back(std::move(pair));
        return current->pairs_.back().get();
    }
    static int modify_qp(abi::Qp* qp, abi::QpAttr* attr, int mask) {
        auto* pair = static_cast<Fabric::Pair*>(qp);
        if (const int error = current->ask("modify_qp", pair->context->device, attr->state))
            return error;
        const auto l = lock();
        if (attr->state == abi::kQpError) {
            current->to_error(*pair);
            return 0;
        }
        if (attr->state != pair->state + 1) return EINVAL;
        pair->state = attr->state;
        const auto set = [&](auto field, int bit) {
            if (mask & bit) pair->attr.*field = attr->*field;
        };
        set(&abi::QpAttr::port, abi::kSetPort);
        set(&abi::QpAttr::access, abi::kSetAccess);
        set(&abi::QpAttr::destination_qp, abi::kSetDestinationQp);
        set(&abi::QpAttr::rq_psn, abi::kSetRqPsn);
        set(&abi::QpAttr::sq_psn, abi::kSetSqPsn);
        set(&abi::QpAttr::min_rnr_timer, abi::kSetMinRnrTimer);
        set(&abi::QpAttr::timeout, abi::kSetTimeout);
        set(&abi::QpAttr::retry_count, abi::kSetRetryCount);
        set(&abi::QpAttr::rnr_retry, abi::kSetRnrRetry);
        current->run();
        return 0;
    }
    static int destroy_qp(abi::Qp* qp) {
        auto* pair = static_cast<Fabric::Pair*>(qp);
        if (const int error = current->ask("destroy_qp", pair->context->device)) return error;
        const auto l = lock();
        --pair->queue().pairs;
        --current->open_;
        std::erase_if(current->pairs_, [&](const auto& p) { return p.get() == pair; });
        return 0;
    }
    static int get_async_event(abi::Context* c, abi::AsyncEvent* out) {
        if (!take(c->async_fd)) return -1;
        const auto l = lock();
        auto* context = static_cast<Fabric::Context*>(c);
        if (context->events.empty()) return -1;
        *out = context->events.front();
        context->events.pop_front();
        return 0;
    }

    static int poll_cq(abi::Cq* cq, int count, abi::Wc* out) {
        const auto l = lock();
        auto& entries = static_cast<Fabric::Queue*>(cq)->entries;
        int n = 0;
        for (; n < count && !entries.empty(); ++n) {
            out[n] = entries.front();
            entries.pop_front();
        }
        return n;
    }
    static int req_notify_cq(abi::Cq* cq, int) {
        const auto l = lock();
        static_cast<Fabric::Queue*>(cq)->armed = true;
        return 0;
    }
    static int post_send(abi::Qp* qp, abi::SendWr* first, abi::SendWr** bad) {
        const auto l = lock();
        auto* pair = static_cast<Fabric::Pair*>(qp);
        for (abi::SendWr* wr = first; wr != nullptr; wr = wr->next) {
            *bad = wr;
            if (pair->state != abi::kQpReadyToSend && pair->state != abi::kQpError) return EINVAL;
            if (pair->sent.size() >= pair->cap.max_send_wr) return ENOMEM;
            const uint64_t number = pair->next_send++;
            pair->sent.push_back({wr->id, number, (wr->flags & abi::kSignaled) != 0, wr->opcode});
            if (pair->state == abi::kQpError) continue;
            Fabric::Packet packet{
                pair->number,  pair->attr.destination_qp, number,        wr->opcode,
                wr->immediate, wr->rdma.address,          wr->rdma.rkey, {}};
            for (int i = 0; i < wr->sge_count; ++i) {
                const abi::Sge& s = wr->sges[i];
                const uint8_t* at = current->memory(s.lkey, s.address, s.length, 0);
                if (at == nullptr) return EINVAL;
                packet.payload.insert(packet.payload.end(), at, at + s.length);
            }
            current->wire_.push_back(std::move(packet));
        }
        if (pair->state == abi::kQpError) current->to_error(*pair);
        current->run();
        return 0;
    }
    static int post_recv(abi::Qp* qp, abi::RecvWr* first, abi::RecvWr** bad) {
        const auto l = lock();
        auto* pair = static_cast<Fabric::Pair*>(qp);
        for (abi::RecvWr* wr = first; wr != nullptr; wr = wr->next) {
            *bad = wr;
            if (pair->receives.size() >= pair->cap.max_recv_wr || wr->sge_count != 1) return ENOMEM;
            pair->receives.push_back({wr->id, wr->sges[0]});
        }
        if (pair->state == abi::kQpError) current->to_error(*pair);
        current->run();
        return 0;
    }
};

Fabric::Fabric() {
    CHECK(current == nullptr);
    current = this;
}

Fabric::~Fabric() {
    current = nullptr;
}

const Verbs& Fabric::verbs() {
    static const Verbs all = [] {
        Verbs v{};
        v.get_device_list = Calls::get_device_list;
        v.free_device_list = [](abi::Device**) {};
        v.open_device = Calls::open_device;
        v.close_device = Calls::close_device;
        v.query_port = Calls::query_port;
        v.query_gid_table = Calls::query_gid_table;
        v.alloc_pd = Calls::alloc_pd;
        v.dealloc_pd = Calls::dealloc_pd;
        v.reg_mr = Calls::reg_mr;
        v.dereg_mr = Calls::dereg_mr;
        v.create_comp_channel = Calls::create_comp_channel;
        v.destroy_comp_channel = Calls::destroy_comp_channel;
        v.create_cq = Calls::create_cq;
        v.destroy_cq = Calls::destroy_cq;
        v.get_cq_event = Calls::get_cq_event;
        v.ack_cq_events = Calls::ack_cq_events;
        v.create_qp = Calls::create_qp;
        v.modify_qp = Calls::modify_qp;
        v.destroy_qp = Calls::destroy_qp;
        v.get_async_event = Calls::get_async_event;
        v.ack_async_event = [](abi::AsyncEvent*) {};
        v.wc_status_str = [](uint32_t) { return "failed work"; };
        v.event_type_str = [](uint32_t type) {
            return type == abi::kEventCqError ? "CQ error" : "asynchronous event";
        };
        v.fork_init = [] { return 0; };
        return v;
    }();
    return all;
}

Device& Fabric::add(const char* name, std::vector<bool> ports) {
    const std::lock_guard lock(mu_);
    Device& added = devices_.emplace_back();
    added.ports = std::move(ports);
    std::strcpy(added.device.name, name);
    listed_.push_back(&added.device);
    return added;
}

void Fabric::intercept(std::function<int(const Call&)> before) {
    const std::lock_guard lock(mu_);
    before_ = std::move(before);
}

int Fabric::ask(const char* name, const abi::Device* device, uint32_t state) {
    std::function<int(const Call&)> before;
    {
        const std::lock_guard lock(mu_);
        before = before_;
    }
    return before ? before({name, device->name, state}) : 0;
}

void Fabric::hold() {
    const std::lock_guard lock(mu_);
    held_ = true;
}

bool Fabric::land() {
    const std::lock_guard lock(mu_);
    return land_one();
}

void Fabric::flow() {
    const std::lock_guard lock(mu_);
    held_ = false;
    run();
}

size_t Fabric::under_way() {
    const std::lock_guard lock(mu_);
    return wire_.size();
}

void Fabric::run() {
    while (!held_ && land_one()) {
    }
}

// Packets of one queue pair land in their order, so behind one that waits all others do.
bool Fabric::land_one() {
    std::set<uint32_t> waiting;
    for (auto it = wire_.begin(); it != wire_.end();) {
        if (waiting.contains(it->from)) {
            ++it;
            continue;
        }
        Packet packet = std::move(*it);
        const Landing landing = land(packet);
        if (landing == Landing::waits) {
            *it = std::move(packet);
            waiting.insert(it->from);
            ++it;
            continue;
        }
        it = wire_.erase(it);
        if (landing == Landing::done) return true;
    }
    return false;
}

// A sender that is gone does not call its packets back, and does not send them again.
Fabric::Landing Fabric::land(Packet& packet) {
    Pair* from = find(packet.from);
    const bool sends = from != nullptr && from->state == abi::kQpReadyToSend;
    const auto wait = [&](uint32_t status) {
        if (!sends) return Landing::dropped;
        if (from->blocked_since_ns < 0 || from->blocked_status != status)
            from->blocked_since_ns = now_ns_;
        from->blocked_status = status;
        return Landing::waits;
    };
    Pair* to = find(packet.to);
    if (to == nullptr || to->attr.destination_qp != packet.from ||
        (to->state != abi::kQpReadyToReceive && to->state != abi::kQpReadyToSend))
        return wait(kRetriesExceeded);
    if (to->receives.empty()) {
        ++not_ready_;
        return wait(kReceiverNotReadyRetriesExceeded);
    }
    abi::Wc wc{};
    uint8_t* at = nullptr;
    if (packet.opcode == abi::kSend) {
        const abi::Sge& into = to->receives.front().sge;
        wc.opcode = abi::kWcRecv;
        if (packet.payload.size() <= into.length)
            at = memory(into.lkey, into.address, packet.payload.size(), abi::kLocalWrite);
    } else {
        wc.opcode = abi::kWcRecvWriteWithImmediate;
        wc.immediate = packet.immediate;
        at = memory(packet.rkey, packet.address, packet.payload.size(), abi::kRemoteWrite);
    }
    if (at == nullptr) {
        if (sends) acknowledge(*from, packet.number, kRemoteAccessError);
        abi::AsyncEvent event{};
        event.element.qp = to;
        event.type = abi::kEventQpAccessError;
        raise(*static_cast<Context*>(to->context), event);
        to_error(*to);
        return Landing::done;
    }
    if (!packet.payload.empty()) std::memcpy(at, packet.payload.data(), packet.payload.size());
    wc.id = to->receives.front().id;
    wc.bytes = static_cast<uint32_t>(packet.payload.size());
    to->receives.pop_front();
    complete(*to, wc);
    if (sends) acknowledge(*from, packet.number, abi::kWcSuccess);
    return Landing::done;
}

uint8_t* Fabric::memory(uint32_t key, uint64_t address, size_t bytes, int access) {
    static uint8_t nothing = 0;
    if (bytes == 0) return &nothing;
    const auto it = regions_.find(key);
    if (it == regions_.end() || (it->second.second & access) != access) return nullptr;
    const abi::Mr& mr = *it->second.first;
    const auto begin = reinterpret_cast<uint64_t>(mr.address);
    if (address < begin || bytes > mr.length || address - begin > mr.length - bytes) return nullptr;
    return static_cast<uint8_t*>(mr.address) + (address - begin);
}

void Fabric::complete(Pair& pair, abi::Wc wc) {
    Queue& queue = pair.queue();
    if (queue.broken) return;
    CHECK(queue.entries.size() < queue.capacity);
    wc.qp_number = pair.number;
    queue.entries.push_back(wc);
    if (!std::exchange(queue.armed, false) || queue.channel == nullptr) return;
    static_cast<Channel*>(queue.channel)->events.push_back(&queue);
    give(queue.channel->fd);
}

// The peer's word on a packet, and with it on all before it.
void Fabric::acknowledge(Pair& pair, uint64_t number, uint32_t status) {
    pair.blocked_since_ns = -1;
    while (!pair.sent.empty() && pair.sent.front().number <= number) {
        const Pair::Sent sent = pair.sent.front();
        const bool last = sent.number == number;
        pair.sent.pop_front();
        if (!sent.signaled && (!last || status == abi::kWcSuccess)) continue;
        abi::Wc wc{};
        wc.id = sent.id;
        wc.status = last ? status : abi::kWcSuccess;
        complete(pair, wc);
    }
    if (status != abi::kWcSuccess) to_error(pair);
}

void Fabric::to_error(Pair& pair) {
    pair.state = abi::kQpError;
    const auto flush = [&](uint64_t id) {
        abi::Wc wc{};
        wc.id = id;
        wc.status = abi::kWcFlushed;
        complete(pair, wc);
    };
    for (const auto& sent : std::exchange(pair.sent, {})) flush(sent.id);
    for (const auto& posted : std::exchange(pair.receives, {})) flush(posted.id);
}

void Fabric::elapse(int64_t ns) {
    const std::lock_guard lock(mu_);
    now_ns_ += ns;
    for (const auto& pair : pairs_) {
        if (pair->blocked_since_ns < 0 || pair->state != abi::kQpReadyToSend) continue;
        const abi::QpAttr& a = pair->attr;
        int64_t patience = (a.retry_count + 1) * (int64_t{4096} << a.timeout);
        if (pair->blocked_status == kReceiverNotReadyRetriesExceeded) {
            if (a.rnr_retry == kForEver) continue;
            const Pair* to = find(a.destination_qp);
            if (to == nullptr) continue;
            patience =
                a.rnr_retry * kReceiverNotReadyUnits[to->attr.min_rnr_timer & 31] * int64_t{10'000};
        }
        if (now_ns_ - pair->blocked_since_ns < patience) continue;
        std::erase_if(wire_, [&](const Packet& p) { return p.from == pair->number; });
        if (!pair->sent.empty())
            acknowledge(*pair, pair->sent.front().number, pair->blocked_status);
    }
    run();
}

void Fabric::break_completion_queues(const std::string& device) {
    const std::lock_guard lock(mu_);
    for (Queue* queue : queues_) {
        if (queue->context->device->name != device) continue;
        queue->broken = true;
        queue->entries.clear();
        abi::AsyncEvent event{};
        event.element.cq = queue;
        event.type = abi::kEventCqError;
        raise(*static_cast<Context*>(queue->context), event);
    }
}

bool Fabric::raise(const std::string& device, uint8_t port, uint32_t type) {
    const std::lock_guard lock(mu_);
    for (const auto& pair : pairs_) {
        if (pair->device != device || pair->attr.port != port) continue;
        abi::AsyncEvent event{};
        event.element.qp = pair.get();
        event.type = type;
        raise(*static_cast<Context*>(pair->context), event);
        return true;
    }
    return false;
}

void Fabric::raise(Context& context, const abi::AsyncEvent& event) {
    context.events.push_back(event);
    give(context.async_fd);
}

Fabric::Pair* Fabric::find(uint32_t number) {
    for (const auto& pair : pairs_)
        if (pair->number == number) return pair.get();
    return nullptr;
}

uint64_t Fabric::not_ready() {
    const std::lock_guard lock(mu_);
    return not_ready_;
}

size_t Fabric::queue_pairs(const std::string& device) {
    const std::lock_guard lock(mu_);
    return static_cast<size_t>(std::count_if(
        pairs_.begin(), pairs_.end(), [&](const auto& pair) { return pair->device == device; }));
}

int Fabric::open_objects() {
    const std::lock_guard lock(mu_);
    return open_;
}

}  // namespace fake
