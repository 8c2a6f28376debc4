#include "engine/link.hpp"

#include <unistd.h>

#include <algorithm>

#include "os/clock.hpp"

namespace pipemorph {

Link::Link(std::shared_ptr<Runtime> runtime, Identity identity)
    : runtime_(std::move(runtime)),
      identity_(identity),
      core_({identity.dials, identity.peer_rank, runtime_->config.queues,
             runtime_->config.chunk_bytes, runtime_->config.flight_bytes,
             // As long as a connection may take to say that what it was given got through.
             std::max(runtime_->peer_deadline_ns / 2, kSecond)}),
      lease_pool_(std::make_shared<LeasePool>(runtime_->config.flight_bytes)),
      peer_(runtime_->peer_deadline_ns, steady_ns()) {}

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
    // A link that is ending has let go of its connections, and its core does not know.
    for (const uint32_t path : actions.withdraw)
        if (const auto offered = std::exchange(held_[path].offered, nullptr)) offered->close();
    for (const Actions::Fail& f : actions.fail)
        if (const auto path = current(f.path)) path->give_up(f.why);
    for (const Actions::Grow& what : actions.grow) start_to_grow(what);
    for (const Actions::Retire& what : actions.retire) start_to_retire(what);
    if (actions.flush) flush();
    if (actions.kick) kick_paths();
    if (actions.ring)
        changed();
    else if (actions.wake)
        changed_.notify_all();
    if (actions.dial)
        runtime_->control.post([self = shared_from_this()] {
            self->or_die_without_lock([&] { self->dial_paths(); });
        });
}

// Acknowledgements that wait for it to be back take grants along, unless there is more to say.
void Link::act_for_reader() {
    Actions actions = core_.take_actions();
    if (flush_due_ && !core_.stream().has_unwritten()) actions.flush = false;
    carry_out(actions);
}

void Link::changed() {
    changed_.notify_all();
    // Acknowledgements, for example, are none of its business.
    if (reader_ && (ended() || core_.in().has(reader_->key))) wake_reader();
    runtime_->ring();
}

// If it sleeps at a socket. What it has read itself it knows.
void Link::wake_reader() {
    if (!reader_ || reads_here() || std::exchange(reader_->woken, true)) return;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(reader_bell_.get(), &one, sizeof one);
}

void Link::wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns) {
    wait_ns(changed_, lock, std::min(deadline_ns - steady_ns(), slice_ns));
}

void Link::close(int64_t deadline_ns) {
    constexpr int64_t kSlice = 50 * kMillisecond;
    {
        Lock lock(mu_);
        while (!over() && core_.out().in_flight() > 0 && steady_ns() < deadline_ns)
            wait_slice(lock, deadline_ns, kSlice);
        if (!over()) {
            const size_t unsent = core_.out().in_flight();
            send_frame(ByeFrame{unsent == 0 ? "" : std::to_string(unsent) + " messages unsent"});
            leaving_ = true;
            // The peer closes the connection when it has read the goodbye.
            const int64_t patience = std::min(deadline_ns, steady_ns() + kSecond);
            while (!over() && control_ && steady_ns() < patience)
                wait_slice(lock, patience, kSlice);
        }
    }
    const std::string why = describe() + " is closed";
    finish(State::closed, why);
    Lock lock(mu_);
    while (!ended()) {
        wait_slice(lock, steady_ns() + kSlice, kSlice);
        if (over()) continue;
        // There was no memory for it. Now there may be some.
        lock.unlock();
        finish(State::closed, why);
        lock.lock();
    }
}

void Link::set_terms(Terms terms) {
    const Lock lock(mu_);
    terms_ = std::move(terms);
    make_paths();
}

void Link::make_paths() {
    // Over shared memory a path is a copying thread, not a socket.
    const bool shm = terms_.transport == Transport::shm;
    const size_t others =
        shm ? std::min<size_t>(terms_.sockets, runtime_->data_threads()) : terms_.sockets;
    core_.assign_paths(
        terms_.transport == Transport::rdma ? terms_.rails : decltype(terms_.rails){},
        shm ? Transport::shm : Transport::tcp, others);
    held_ = std::vector<Held>(core_.paths().size());
}

size_t Link::path_count() const {
    const Lock lock(mu_);
    return held_.size();
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
        // A link short of its rails may die of the peer's giving up first, which knows nothing of
        // the trouble at this end.
        const Lock lock(mu_);
        const int64_t now = steady_ns();
        // Rails that went with the peer only just now tell nothing.
        if (now - core_.paths().without_rail_since() > runtime_->peer_deadline_ns / 5)
            missing = missing_rail(now);
    }
    if (missing.empty())
        finish(State::dead, why);
    else
        finish(State::dead, why + "; " + missing);
}

// A reason as the peer is told it, which puts the link's name before it.
std::string Link::without_name(const std::string& why) const {
    const std::string name = describe() + " is dead: ";
    return why.starts_with(name) ? why.substr(name.size()) : why;
}

// Goes with the last of the paths: each is closed on its own thread, or that thread has ended.
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

// Whether it settles with that. Where it throws, nothing has begun to end but for paths that are
// closed already: it can be done anew.
bool Link::begin_to_end(State state, const std::string& why) {
    std::shared_ptr<Ending> ending;
    std::vector<std::shared_ptr<DataPath>> paths;
    std::shared_ptr<DataPath> kept;
    const Lock lock(mu_);
    if (over()) return false;
    // What only this end knows: the peer would look for it, and wait, in vain.
    if (state == State::dead && !peer_left_) {
        try {
            send_frame(ByeFrame{without_name(why), true});
            // The last word is said also where nothing else is any more.
            if (!doom_.empty()) write_frames();
        } catch (const std::exception&) {  // no memory: it has to find out by itself
        }
    }
    ending = std::make_shared<Ending>(Ending{shared_from_this(), state});
    for (const Held& held : held_) {
        paths.insert(paths.end(), held.connections.begin(), held.connections.end());
        if (held.offered) paths.push_back(held.offered);
    }
    for (const auto& path : paths) path->close(ending);
    if (control_)
        runtime_->control.post([self = shared_from_this(), connection = control_] {
            if (!connection->fd) return;
            self->runtime_->control.remove(connection->fd.get());
            const Lock held(self->mu_);
            connection->fd.reset();
        });
    // From here on nothing needs memory.
    const bool settles = !identity_.dials && state_ == State::connecting && !never_came_;
    ending->begun = true;
    state_ = State::ending;
    keep_words(error_, why);
    control_.reset();
    kept.swap(kept_);
    for (Held& held : held_) {
        held.connections.clear();
        held.offered.reset();
    }
    return settles;
}

void Link::paths_closed(State state) noexcept {
    const Lock lock(mu_);
    state_ = state;
    core_.abandon();
    changed();
}

void Link::let_go() {
    {
        const Lock lock(mu_);
        if (!ended() || std::exchange(let_go_, true)) return;
    }
    aside().post([self = shared_from_this()] { self->drop_memory(); });
}

void Link::drop_memory() {
    Inbox inbox;
    decltype(registrations_) registrations;
    decltype(peer_segments_) peer_segments;
    {
        const Lock lock(mu_);
        inbox = core_.drop_inbox();
        registrations.swap(registrations_);
        peer_segments.swap(peer_segments_);
    }
    // Somebody else may have a lease, which goes back to the pool.
    if (lease_pool_.use_count() == 1) lease_pool_->drop();
}

Hello Link::hello(Purpose purpose) const {
    Hello h;
    h.purpose = purpose;
    h.job = runtime_->config.job;
    h.from_rank = identity_.rank;
    h.to_rank = identity_.peer_rank;
    h.link = identity_.link;
    h.session = identity_.session;
    h.transport = terms_.transport;
    h.listen_port = runtime_->listen_port;
    return h;
}

void Link::protocol_error(const std::string& why) {
    die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) +
        " broke the protocol: " + why);
}

}  // namespace pipemorph
