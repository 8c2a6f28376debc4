#include "engine/link.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

namespace pipemorph {
namespace {

// Longest wait of a closing thread before it checks all links again.
constexpr int64_t kClosingSlice = 20 * kMillisecond;

}  // namespace

Link::Link(std::shared_ptr<Runtime> runtime, Identity identity)
    : runtime_(std::move(runtime)),
      identity_(identity),
      core_({identity.dials, identity.peer_rank, runtime_->config.queues,
             runtime_->config.chunk_bytes, runtime_->config.flight_bytes,
             // Time that a connection may take to confirm a delivery.
             std::max(runtime_->peer_deadline_ns / 2, kSecond),
             std::max(runtime_->peer_deadline_ns, 2 * kSecond)}),
      control_(*this),
      paths_(*this) {}

Link::~Link() = default;

std::string Link::describe() const {
    const uint32_t low = std::min(identity_.rank, identity_.peer_rank);
    const uint32_t high = std::max(identity_.rank, identity_.peer_rank);
    return "link " + std::to_string(identity_.link) + " (rank " + std::to_string(low) + " <-> " +
           std::to_string(high) + ")";
}

Transport Link::transport() const {
    const Lock lock(mu_);
    return terms_.transport;
}

bool Link::alive() const {
    const Lock lock(mu_);
    return !ended();
}

std::string Link::error() const {
    const Lock lock(mu_);
    return ended() ? error_ : std::string();
}

void Link::throw_over() const {
    throw EngineError(error_);
}

void Link::carry_out(const Actions& actions) {
    // An ending link has dropped its connections, but its core still has them.
    for (const uint32_t path : actions.withdraw) paths_.withdraw(path);
    for (const Actions::Fail& f : actions.fail)
        if (const auto path = paths_.current(f.path)) path->give_up(f.why);
    for (const Actions::Grow& what : actions.grow) paths_.start_to_grow(what);
    for (const Actions::Retire& what : actions.retire) paths_.start_to_retire(what);
    if (actions.flush) control_.flush();
    if (actions.notify) paths_.notify();
    if (actions.signal_notifier)
        changed();
    else if (actions.wake)
        changed_.notify_all();
    if (actions.dial)
        runtime_->control.post([self = shared_from_this()] {
            self->or_die_without_lock([&] { self->paths_.dial_paths(); });
        });
}

void Link::run_actions_for_reader() {
    Actions actions = core_.take_actions();
    if (control_.flush_is_due() && !core_.stream().has_unwritten()) actions.flush = false;
    carry_out(actions);
}

void Link::run_actions_for_message(uint64_t bytes) {
    Actions actions = core_.take_actions();
    if (is_reader_thread() && bytes <= DataPath::kSmall && std::exchange(actions.flush, false))
        control_.postpone_flush();
    carry_out(actions);
}

void Link::changed() {
    changed_.notify_all();
    // The reader is woken for its own message only, not for acknowledgements, for example.
    if (reader_ && (ended() || core_.in().has(reader_->key))) wake_reader();
    runtime_->signal_notifier();
}

// Wakes a reader that sleeps at a socket, unless this thread is the reader.
void Link::wake_reader() {
    if (!reader_ || is_reader_thread() || std::exchange(reader_->woken, true)) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(reader_notifier_.get(), &one, sizeof one);
}

void Link::wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns) {
    wait_ns(changed_, lock, std::min(deadline_ns - steady_ns(), slice_ns));
}

void Link::close(int64_t deadline_ns, const StopWaiting& stop_waiting) {
    close_all({shared_from_this()}, deadline_ns, stop_waiting);
}

// Closes on this thread alone: there may be no memory for others.
void Link::close_all(const std::vector<std::shared_ptr<Link>>& links, int64_t deadline_ns,
                     const StopWaiting& stop_waiting) {
    // Links for which `done` is not true in time. `done` waits a moment for the first of them.
    const auto wait_for = [&](int64_t until_ns, bool (Link::*done)(bool wait)) {
        auto waiting = links;
        do {
            bool wait = true;
            std::erase_if(waiting, [&](const auto& link) {
                const bool is_done = (*link.*done)(wait);
                wait = wait && is_done;
                return is_done;
            });
        } while (!waiting.empty() && steady_ns() < until_ns && !(stop_waiting && stop_waiting()));
        return waiting;
    };
    for (const auto& link : wait_for(deadline_ns, &Link::try_goodbye)) link->send_goodbye();
    // The peer closes the connection when it has read the goodbye.
    const int64_t patience = std::min(deadline_ns, steady_ns() + kSecond);
    wait_for(patience, &Link::is_goodbye_received);
    for (const auto& link : links)
        while (!link->is_closed()) {
        }
}

// True if all messages are acknowledged and the goodbye is sent.
bool Link::try_goodbye(bool wait) {
    {
        Lock lock(mu_);
        if (!over() && wait && core_.out().in_flight() > 0)
            wait_slice(lock, steady_ns() + kClosingSlice, kClosingSlice);
        if (over()) return true;
        if (core_.out().in_flight() > 0) return false;
    }
    send_goodbye();
    return true;
}

void Link::send_goodbye() {
    const Lock lock(mu_);
    if (over() || goodbye_sent_) return;
    const size_t unsent = core_.out().in_flight();
    control_.send_frame(ByeFrame{unsent == 0 ? "" : std::to_string(unsent) + " messages unsent"});
    goodbye_sent_ = true;
}

bool Link::is_goodbye_received(bool wait) {
    Lock lock(mu_);
    if (!over() && control_.connected() && wait)
        wait_slice(lock, steady_ns() + kClosingSlice, kClosingSlice);
    return over() || !control_.connected();
}

bool Link::is_closed() {
    finish(State::closed, describe() + " is closed");
    Lock lock(mu_);
    // If there was no memory for the end, there may be some now.
    if (!ended()) wait_slice(lock, steady_ns() + kClosingSlice, kClosingSlice);
    return ended();
}

void Link::set_terms(Terms terms) {
    const Lock lock(mu_);
    terms_ = std::move(terms);
    last_error_ = terms_.shm_error;
    paths_.assign();
}

void Link::confirm() {
    {
        const Lock lock(mu_);
        if (state_ != State::connecting) return;
        state_ = State::up;
        core_.start(steady_ns());
        control_.begin();
        changed();
    }
    if (identity_.dials) or_die_without_lock([this] { paths_.dial_paths(); });
}

void Link::tick() {
    or_die_without_lock([this] { check_health(steady_ns()); });
}

void Link::check_health(int64_t now) {
    control_.check_health(now);
    std::string stuck;
    {
        const Lock lock(mu_);
        if (state_ != State::up || !control_.connected() || !fatal_error_.empty()) return;
        stuck = core_.check_flow(now);
        run_actions();
    }
    if (!stuck.empty()) {
        die(describe() + " is dead: " + stuck);
        return;
    }
    paths_.check_rails(now);
    if (identity_.dials) paths_.dial_paths();
}

size_t Link::path_count() const {
    const Lock lock(mu_);
    return paths_.size();
}

bool Link::up() const {
    const Lock lock(mu_);
    return state_ == State::up || state_ == State::reconnecting;
}

bool Link::may_resume() const {
    const Lock lock(mu_);
    return !over();
}

void Link::die(const std::string& why) {
    std::string missing;
    {
        // The peer may give up first on a link without rails, and its reason lacks the errors of
        // this end.
        const Lock lock(mu_);
        const int64_t now = steady_ns();
        // Rails that were lost just now, with the peer, are no cause.
        if (now - core_.paths().without_rail_since() > runtime_->peer_deadline_ns / 5)
            missing = paths_.missing_rail(now);
    }
    if (missing.empty())
        finish(State::dead, why);
    else
        finish(State::dead, why + "; " + missing);
}

// Reason for the peer, without the link's name, which the peer adds.
std::string Link::without_name(const std::string& why) const {
    const std::string name = describe() + " is dead: ";
    return why.starts_with(name) ? why.substr(name.size()) : why;
}

// Destroyed with the last path: each is closed on its own thread, or that thread has ended.
struct Link::Ending {
    std::shared_ptr<Link> link;
    State state;
    bool begun = false;

    ~Ending() {
        if (begun) link->paths_closed(state);
    }
};

void Link::finish(State state, const std::string& why) noexcept {
    or_die_without_lock([&] {
        if (begin_to_end(state, why) && on_settled) on_settled(why);
    });
}

// Begins the end; true if `on_settled` must be called. If it throws, only some paths are closed,
// and it can be repeated.
bool Link::begin_to_end(State state, const std::string& why) {
    std::shared_ptr<Ending> ending;
    std::vector<std::shared_ptr<DataPath>> paths;
    std::shared_ptr<DataPath> held_path;
    const Lock lock(mu_);
    if (over()) return false;
    // Without the reason of this end, the peer would try to reconnect.
    if (state == State::dead && !peer_said_goodbye_) {
        try {
            control_.send_frame(ByeFrame{without_name(why), true});
            // A failed link still writes its last frame.
            if (!fatal_error_.empty()) control_.write_frames();
        } catch (const std::exception&) {  // no memory: the peer finds out by itself
        }
    }
    ending = std::make_shared<Ending>(Ending{shared_from_this(), state});
    paths = paths_.start_to_close(ending);
    control_.start_to_close();
    // No step from here on needs memory.
    const bool settles = !identity_.dials && state_ == State::connecting && !never_confirmed_;
    ending->begun = true;
    state_ = State::ending;
    keep_words(error_, why);
    control_.drop();
    held_path.swap(held_path_);
    paths_.drop_connections();
    return settles;
}

void Link::paths_closed(State state) noexcept {
    const Lock lock(mu_);
    state_ = state;
    core_.abandon();
    changed();
}

void Link::release_memory() {
    {
        const Lock lock(mu_);
        if (!ended() || std::exchange(memory_released_, true)) return;
    }
    paths_.start_to_drop_memory();
}

// --- Sending ------------------------------------------------------------------------------------

uint64_t Link::send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold,
                    const std::optional<SlotGrant>& leased) {
    std::vector<std::shared_ptr<DataPath>> live;
    uint64_t id = 0;
    bool alone = false;
    {
        const Lock lock(mu_);
        if (ended()) throw_over();
        alone = info.bytes <= DataPath::kSmall;
        info.posted_ns = wall_ns();
        const int64_t now_wall = info.posted_ns;
        const int64_t now = steady_ns();
        std::shared_ptr<OutMessage> message;
        try {
            message = core_.enqueue(std::move(info), data, std::move(hold), leased);
        } catch (const EngineError& e) {
            throw EngineError(describe() + ": " + e.what());
        }
        id = message->info.id;
        // The message is posted. An error now would make the caller send it again, or release its
        // slot.
        or_die([&] {
            core_.posted(*message, now_wall, now);
            Actions actions = core_.take_actions();
            if (std::exchange(actions.notify, false)) live = paths_.live();
            alone = alone && core_.out().ready_chunks() == 1;
            carry_out(actions);
        });
    }
    or_die_without_lock([&] {
        if (alone && !live.empty() && live.front()->send_inline()) return;
        // Notified without the lock, for which the woken threads would wait.
        for (const auto& path : live) path->notify();
    });
    return id;
}

bool Link::sent(uint64_t ticket) {
    const Lock lock(mu_);
    switch (core_.out().ticket(ticket)) {
        case Outbox::Ticket::done:
            return true;
        case Outbox::Ticket::failed:
            throw EngineError(describe() + ": " + core_.out().failure(ticket));
        case Outbox::Ticket::unknown:
            throw EngineError(describe() + ": there is no ticket " + std::to_string(ticket));
        case Outbox::Ticket::abandoned:
            throw_over();
        case Outbox::Ticket::in_flight:
            break;
    }
    if (ended()) throw_over();
    return false;
}

bool Link::wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    for (;;) {
        if (sent(ticket)) return true;
        Lock lock(mu_);
        if (core_.out().ticket(ticket) != Outbox::Ticket::in_flight || ended()) continue;
        const int64_t now = steady_ns();
        if (now >= deadline_ns)
            throw EngineTimeout(describe() + ": " + core_.out().describe(ticket) +
                                ", not acknowledged by rank " +
                                std::to_string(identity_.peer_rank) + " within " +
                                format_seconds(timeout) + "; " + append_comma(paths_.text()) +
                                "link is " + (state_ == State::up ? "up" : "reconnecting"));
        if (now >= slice_end) return false;
        wait_slice(lock, deadline_ns, slice_end - now);
    }
}

uint64_t Link::send_slots(int direction) const {
    const Lock lock(mu_);
    return core_.out().credits(direction);
}

// --- Receiving ----------------------------------------------------------------------------------

void Link::reserve(int direction, uint32_t slots, uint64_t slot_bytes) {
    std::vector<Inbox::Room> missing;
    {
        const Lock lock(mu_);
        if (ended()) throw_over();
        missing = core_.in().missing(direction, slots, slot_bytes);
    }
    for (const Inbox::Room& room : missing) paths_.make_room(direction, room, true);
}

std::string Link::nothing_arrived(const Key& key, double timeout) const {
    const auto direction = static_cast<int>(key.direction);
    std::string s = describe() + ": nothing arrived for " + key.describe() + " within " +
                    format_seconds(timeout) + "; ";
    if (const auto progress = core_.in().progress(key))
        s += std::to_string(progress->chunks) + " of " + std::to_string(progress->of) +
             " chunks are here; ";
    s += append_comma(paths_.text());
    s += state_ == State::up ? "link is up, " : "link is reconnecting (" + last_error_ + "), ";
    const uint32_t slots = core_.in().slots(direction);
    return s + std::to_string(slots - core_.in().slots_in_use(direction)) + " of " +
           std::to_string(slots) + " slots free";
}

std::optional<Arrived> Link::take(const Key& key) {
    auto message = core_.take(key);
    if (message && message->info.bytes == 0) or_die([this] { run_actions_for_reader(); });
    return message;
}

std::vector<std::shared_ptr<Memory>> Link::slot_memory() const {
    const Lock lock(mu_);
    return core_.in().segments();
}

std::optional<Arrived> Link::receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                     double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    Lock lock(mu_);
    for (;;) {
        if (auto message = take(key)) return message;
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

// Waits for a message by reading the socket from which it will most likely arrive. Otherwise a data
// thread would have to wake for it, and then wake this one. False: another thread reads, or there
// is no such socket.
bool Link::read_for(Lock& lock, const Key& key, int64_t wait_ns) {
    if (reader_) return false;
    const std::shared_ptr<DataPath> path = paths_.first_live();
    if (!path) return false;
    if (!reader_notifier_)
        reader_notifier_ = Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
    if (!reader_notifier_) return false;
    if (control_.flush_is_due() && core_.is_short_of_slots(static_cast<int>(key.direction)))
        control_.flush();
    const auto held_path = std::exchange(held_path_, nullptr);
    reader_ = {std::this_thread::get_id(), key, false};
    lock.unlock();
    if (held_path && held_path != path) held_path->return_to_reactor();
    const bool read = path->read_inline(reader_notifier_.get(), wait_ns);
    if (held_path == path && !read) path->return_to_reactor();
    lock.lock();
    const bool woken = reader_->woken;
    if (woken) {
        uint64_t count;
        [[maybe_unused]] const ssize_t n = ::read(reader_notifier_.get(), &count, sizeof count);
    }
    reader_.reset();
    // Its message may have arrived while the lock was free and this thread did not sleep. An ending
    // link must not hold a path, which holds the link.
    if (!read || over()) return read || woken;
    held_path_ = path;
    if (core_.in().has(key) && waiting_ == 0 && await_reader()) return true;
    // This thread may not return soon, or others wait.
    return_to_reactor(lock);
    if (control_.flush_is_due()) control_.flush();
    return true;
}

// Messages often arrive in sequence, so the reader holds the socket and its acknowledgements for a
// moment. If it does not return, the control thread handles both. False: there is no memory for
// that.
bool Link::await_reader() {
    constexpr int64_t kMoment = kMillisecond / 2;
    if (reader_awaited_) return true;
    try {
        runtime_->control.post_within(kMoment, [weak = weak_from_this()] {
            const auto self = weak.lock();
            if (!self) return;
            Lock lock(self->mu_);
            self->reader_awaited_ = false;
            if (self->control_.flush_is_due()) self->control_.flush();
            if (!self->reader_) self->return_to_reactor(lock);
        });
    } catch (const std::bad_alloc&) {
        return false;
    }
    reader_awaited_ = true;
    return true;
}

void Link::return_to_reactor(Lock& lock) {
    const auto held_path = std::exchange(held_path_, nullptr);
    if (!held_path) return;
    lock.unlock();
    held_path->return_to_reactor();
    lock.lock();
}

std::optional<Arrived> Link::try_receive(const Key& key) {
    Lock lock(mu_);
    auto message = take(key);
    if (!message) return_to_reactor(lock);
    // Messages that arrived before the link's end are valid.
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
    release_slot(slot, serial, at_once);
}

void Link::release_slot(uint32_t slot, uint64_t serial, bool at_once) {
    or_die([&] {
        core_.release(slot, serial, at_once);
        run_actions_for_reader();
    });
}

// --- Statistics ---------------------------------------------------------------------------------

LinkStats Link::stats() const {
    const Lock lock(mu_);
    LinkStats s;
    switch (state_) {
        case State::connecting:
            s.state = "connecting";
            break;
        case State::up:
            s.state = "up";
            break;
        case State::reconnecting:
            s.state = "reconnecting";
            break;
        case State::ending:
            s.state = "ending";
            break;
        case State::dead:
            s.state = "dead";
            break;
        case State::closed:
            s.state = "closed";
            break;
    }
    const PathSet& paths = core_.paths();
    s.transport =
        name_of(paths.rails() > 0 && paths.fell_back() ? Transport::tcp : terms_.transport);
    s.fallbacks = paths.fallbacks();
    s.failbacks = paths.failbacks();
    paths_.count(s);
    const LinkCore::Counters& counters = core_.counters();
    s.messages_sent = core_.out().messages_sent;
    s.messages_received = counters.messages_received;
    s.bytes_sent = core_.out().bytes_sent;
    s.bytes_received = counters.bytes_received;
    s.chunks_resent = core_.out().chunks_resent;
    s.duplicate_chunks = counters.duplicate_chunks;
    s.stale_chunks = counters.stale_chunks;
    s.reconnects = counters.paths_remade;
    s.last_error = last_error_;
    control_.count(s);
    s.sends_in_flight = core_.out().in_flight();
    for (int d = 0; d < kDirections; ++d) {
        s.slots_granted += core_.in().slots(d);
        s.slots_in_use += core_.in().slots_in_use(d);
    }
    return s;
}

}  // namespace pipemorph
