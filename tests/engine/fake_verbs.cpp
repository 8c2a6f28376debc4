#include "fake_verbs.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "check.hpp"
#include "fake_verbs_objects.hpp"

namespace fake {

using namespace pipemorph;

namespace {

constexpr uint32_t kRemoteAccessError = 10;
constexpr uint32_t kRetriesExceeded = 12;
constexpr uint32_t kReceiverNotReadyRetriesExceeded = 13;
constexpr uint8_t kForEver = 7;

// What the five bits of a receiver-not-ready timer mean, in units of 10 µs.
constexpr int64_t kReceiverNotReadyUnits[] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                              16,    24,   32,   48,    64,    96,    128,   192,
                                              256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                              4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};

void give(int fd) {
    const uint64_t one = 1;
    CHECK(::write(fd, &one, sizeof one) == sizeof one);
}

}  // namespace

Fabric* Fabric::current_ = nullptr;

Fabric::Fabric() {
    CHECK(current_ == nullptr);
    current_ = this;
}

Fabric::~Fabric() {
    current_ = nullptr;
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
    read(packet);
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

void Fabric::read(Packet& packet) {
    for (const abi::Sge& s : std::exchange(packet.unread, {})) {
        const uint8_t* const at = memory(s.lkey, s.address, s.length, 0);
        CHECK(at != nullptr);
        packet.payload.insert(packet.payload.end(), at, at + s.length);
    }
}

void Fabric::read_all_of(const Pair& pair) {
    for (Packet& packet : wire_)
        if (packet.from == pair.number) read(packet);
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
