// What a link receives: slots granted, messages out.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/copy.hpp"
#include "os/numa.hpp"

namespace pipemorph {
void Link::reserve(int direction, uint32_t slots, uint64_t slot_bytes) {
    std::vector<Inbox::Room> missing;
    {
        const Lock lock(mu_);
        if (ended()) throw_over();
        missing = core_.in().missing(direction, slots, slot_bytes);
    }
    for (const Inbox::Room& room : missing) make_room(direction, room, true);
}

// Where queue pairs are made, if there are any: the control thread should not have to wait.
Reactor& Link::aside() {
    return runtime_->rails.empty() ? runtime_->control : runtime_->rails.front()->setup();
}

void Link::start_to_grow(const Actions::Grow& what) {
    aside().post([self = shared_from_this(), what] { self->grow(what); });
}

void Link::grow(const Actions::Grow& what) {
    bool there = false;
    try {
        there = make_room(what.direction, what.room, false);
    } catch (const std::exception&) {  // no memory, or the link has ended: it goes on with less
    }
    const Lock lock(mu_);
    core_.grown(what.direction, there);
}

bool Link::make_room(int direction, const Inbox::Room& room, bool needed) {
    const Transport carries = transport();
    const bool shared = carries == Transport::shm;
    const bool rdma = carries == Transport::rdma;
    // Page-aligned slots: two never share a page, so neither do their copies.
    const uint64_t bytes = (room.bytes + 4095) / 4096 * 4096 * room.slots;
    const numa::OnNode here(runtime_->memory_node);
    // Prefaulting takes a while, so it is done without the lock.
    auto memory = shared ? Memory::shareable(bytes) : Memory::anonymous(bytes);
    // So does registering: once per rail, for as long as the link lives.
    std::vector<std::shared_ptr<Registration>> registered(rdma ? runtime_->rails.size() : 0);
    std::vector<std::string> trouble(registered.size());
    for (size_t rail = 0; rail < registered.size(); ++rail) {
        try {
            registered[rail] = std::make_shared<Registration>(
                runtime_->rails[rail]->device(), memory, abi::kLocalWrite | abi::kRemoteWrite);
        } catch (const EngineError& e) {
            if (!needed) return false;
            trouble[rail] = e.what();
        }
    }
    const Lock lock(mu_);
    if (ended()) throw_over();
    // Nothing is granted any more, and the application is told when it has ended.
    if (over()) return false;
    const bool all_barred =
        std::all_of(registered.begin(), registered.end(), [](const auto& r) { return !r; });
    if (rdma && all_barred && core_.paths().size() == core_.paths().rails())
        throw EngineError(describe() + ": rdma is required, and " + trouble.front());
    const uint32_t segment = core_.add_room(direction, room, std::move(memory), shared);
    const int64_t now = steady_ns();
    for (uint32_t number = 0; rdma && number < runtime_->rail_numbers(); ++number) {
        const size_t rail = number % registered.size();
        if (!registered[rail]) {
            core_.add_region({number, segment, 0, 0, 0}, trouble[rail], now);
            continue;
        }
        const Registration& r = *registered[rail];
        core_.add_region(
            {number, segment, reinterpret_cast<uint64_t>(r.data()), r.size(), r.rkey()}, {}, now);
    }
    for (auto& r : registered)
        if (r) registrations_.push_back(std::move(r));
    if (!shared) core_.grant_room(segment);
    act();
    return true;
}

std::string Link::nothing_arrived(const Key& key, double timeout) const {
    const auto direction = static_cast<int>(key.direction);
    std::string s = describe() + ": nothing arrived for " + key.describe() + " within " +
                    seconds_text(timeout) + "; ";
    if (const auto progress = core_.in().progress(key))
        s += std::to_string(progress->chunks) + " of " + std::to_string(progress->of) +
             " chunks are here; ";
    s += before_more(paths_text());
    s += state_ == State::up ? "link is up, " : "link is reconnecting (" + last_trouble_ + "), ";
    const uint32_t slots = core_.in().slots(direction);
    return s + std::to_string(slots - core_.in().slots_in_use(direction)) + " of " +
           std::to_string(slots) + " slots free";
}

std::vector<std::shared_ptr<Memory>> Link::slot_memory() const {
    const Lock lock(mu_);
    return core_.in().segments();
}

// Takes a message out of the mailbox. If its destination was posted too late for it to be put
// there, it is copied now, by the caller's thread and without the lock.
std::optional<Arrived> Link::take(Lock& lock, const Key& key, const Copies& copies) {
    auto message = core_.take(key);
    if (!message || !message->copy_to) return message;
    Arrived& a = *message;
    const Destination to = std::move(*a.copy_to);
    a.copy_to.reset();
    const bool fits = to.bytes == a.info.bytes;
    lock.unlock();
    if (fits && to.bytes > 0) {
        if (copies) copies(to.bytes);
        copy_past_caches(to.data, a.data, to.bytes);
        copied_in(to.bytes);
    }
    lock.lock();
    if (a.slot) give_back(*a.slot, a.serial, true);
    a.slot.reset();
    a.data = to.data;
    a.keep = to.hold;
    if (!fits)
        throw EngineError(describe() + ": " + key.describe() + " has " +
                          std::to_string(a.info.bytes) + " bytes, the destination posted for it " +
                          std::to_string(to.bytes));
    return message;
}

void Link::post_receive(const Key& key, Destination destination) {
    const Lock lock(mu_);
    if (ended() && !core_.in().has(key)) throw_over();
    if (!core_.post_receive(key, std::move(destination)))
        throw EngineError(describe() + ": a destination is posted for " + key.describe() +
                          " already, and its message has not been received yet");
}

std::optional<Arrived> Link::receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                     double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    Lock lock(mu_);
    for (;;) {
        if (auto message = take(lock, key)) return message;
        if (ended()) throw_over();
        const int64_t now = steady_ns();
        if (now >= deadline_ns) throw EngineTimeout(nothing_arrived(key, timeout));
        if (now >= slice_end) return std::nullopt;
        const int64_t wait = std::min(deadline_ns, slice_end) - now;
        if (read_for(lock, key, wait)) continue;
        ++waiting_;
        wait_slice(lock, deadline_ns, slice_end - now);
        --waiting_;
    }
}

// Waits for a message by reading the socket that it will most likely come from, where a data thread
// would have to be woken for that, and would then have to wake this one. False: somebody else does,
// or there is no such socket.
bool Link::read_for(Lock& lock, const Key& key, int64_t wait_ns) {
    if (reader_) return false;
    std::shared_ptr<DataPath> path;
    for (uint32_t i = 0; i < held_.size() && !path; ++i)
        if (!core_.paths().stands_by(i)) path = current(i);
    if (!path) return false;
    if (!reader_bell_)
        reader_bell_ = Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
    if (!reader_bell_) return false;
    if (flush_due_ && core_.is_short_of_slots(static_cast<int>(key.direction))) flush();
    const auto kept = std::exchange(kept_, nullptr);
    reader_ = {std::this_thread::get_id(), key, false};
    lock.unlock();
    if (kept && kept != path) kept->leave_to_reactor();
    const bool read = path->read_here(reader_bell_.get(), wait_ns);
    if (kept == path && !read) path->leave_to_reactor();
    lock.lock();
    if (reader_->woken) {
        uint64_t count;
        [[maybe_unused]] const ssize_t n = ::read(reader_bell_.get(), &count, sizeof count);
    }
    reader_.reset();
    // Nobody reads the paths of a link that ends, and it must not hold what holds it.
    if (!read || over()) return read;
    kept_ = path;
    if (core_.in().has(key) && waiting_ == 0 && await_reader()) return true;
    // It may wait for long, or others do.
    leave_to_reactor(lock);
    if (flush_due_) flush();
    return true;
}

// Messages often come one after the other, so it keeps the socket and its acknowledgements for a
// moment. If it does not come back, the control thread sees to both. False: nobody can, since there
// is no memory for that.
bool Link::await_reader() {
    constexpr int64_t kMoment = kMillisecond / 2;
    if (reader_awaited_) return true;
    try {
        runtime_->control.post_within(kMoment, [weak = weak_from_this()] {
            const auto self = weak.lock();
            if (!self) return;
            Lock lock(self->mu_);
            self->reader_awaited_ = false;
            if (self->flush_due_) self->flush();
            if (!self->reader_) self->leave_to_reactor(lock);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    reader_awaited_ = true;
    return true;
}

void Link::leave_to_reactor(Lock& lock) {
    const auto kept = std::exchange(kept_, nullptr);
    if (!kept) return;
    lock.unlock();
    kept->leave_to_reactor();
    lock.lock();
}

std::optional<Arrived> Link::try_receive(const Key& key, const Copies& copies) {
    Lock lock(mu_);
    auto message = take(lock, key, copies);
    if (!message) leave_to_reactor(lock);
    // What had arrived before the link died is still good.
    if (!message && ended()) throw_over();
    return message;
}

bool Link::arrived(const Key& key) const {
    const Lock lock(mu_);
    if (core_.in().has(key)) return true;
    if (ended()) throw_over();
    return false;
}

void Link::release(uint32_t slot, uint64_t serial, bool at_once) {
    const Lock lock(mu_);
    give_back(slot, serial, at_once);
}

void Link::give_back(uint32_t slot, uint64_t serial, bool at_once) {
    or_die([&] {
        core_.release(slot, serial, at_once);
        act_for_reader();
    });
}

}  // namespace pipemorph
