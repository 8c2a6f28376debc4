#include "engine/engine.hpp"

#include <algorithm>
#include <future>

#include "base/text.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kTick = 50 * kMillisecond;
constexpr int64_t kSlice = 100 * kMillisecond;

std::string random_name() {
    std::array<uint8_t, 16> bytes;
    fill_random(bytes);
    std::string name = "pipemorph-";
    char hex[3];
    for (const uint8_t b : bytes) {
        std::snprintf(hex, sizeof hex, "%02x", b);
        name += hex;
    }
    return name;
}

}  // namespace

Engine::Engine(Config config)
    : runtime_([&] {
          config.check();
          return std::make_shared<Runtime>(std::move(config));
      }()) {
    const Config& c = runtime_->config;
    runtime_->on_failure([this](const std::string& what) { fail(what); });
    const auto on_connection = [this](const std::shared_ptr<PendingConnection>& g) { decide(g); };
    const auto addresses = resolve(c.host, c.port, true);
    tcp_ = std::make_unique<Listener>(*runtime_, refusals_, addresses.front(), on_connection);
    runtime_->listen_port = tcp_->port();
    if (!runtime_->boot_id.empty()) {
        unix_name_ = random_name();
        unix_ = std::make_unique<Listener>(*runtime_, refusals_, abstract_unix(unix_name_),
                                           on_connection);
    }
    runtime_->control.post([this] {
        tcp_->start();
        if (unix_) unix_->start();
        tick();
    });
}

Engine::~Engine() {
    close(0.0);
}

std::vector<std::string> Engine::rails() const {
    std::vector<std::string> out;
    for (const auto& rail : runtime_->rails) out.push_back(rail->describe());
    return out;
}

void Engine::check_open() const {
    if (closed_) throw EngineError("the engine is closed");
    if (!failure_.empty()) throw EngineError(failure_);
}

// Ends all links after an exception of a thread, whose work is half done. The process continues and
// gets the reason.
void Engine::fail(const std::string& what) {
    const std::string why =
        "the engine of " + format_rank(runtime_->config.rank) + " failed: " + what;
    std::vector<std::shared_ptr<Link>> links;
    {
        const std::lock_guard lock(mu_);
        if (failure_.empty()) failure_ = why;
        for (const auto& [_, link] : links_) links.push_back(link);
        changed_.notify_all();
    }
    for (const auto& link : links) link->die(link->describe() + " is dead: " + why);
}

std::shared_ptr<Link> Engine::find(const Name& name) const {
    const std::lock_guard lock(mu_);
    const auto it = links_.find(name);
    return it == links_.end() ? nullptr : it->second;
}

void Engine::tick() {
    std::vector<std::shared_ptr<Link>> links;
    {
        const std::lock_guard lock(mu_);
        if (closed_) return;
        for (const auto& [_, link] : links_) links.push_back(link);
    }
    for (const auto& link : links) {
        link->tick();
        // The references here and in links_.
        if (link.use_count() == 2) link->release_memory();
    }
    // Without links the tick can be slower.
    runtime_->control.after(links.empty() ? 4 * kTick : kTick, [this] { tick(); });
}

// --- Accepting --------------------------------------------------------------------------------

std::shared_ptr<Link> Engine::accept(uint32_t peer_rank, uint32_t link, double timeout,
                                     const Interrupted& interrupted) {
    const int64_t deadline = steady_ns() + to_ns(timeout);
    std::unique_lock lock(mu_);
    check_open();
    const Name name{peer_rank, link};
    for (const Waiter& w : waiters_)
        if (w.name == name)
            throw EngineError("link " + std::to_string(link) + " from " + format_rank(peer_rank) +
                              " is being accepted already");
    if (const auto it = links_.find(name); it != links_.end() && it->second->up())
        throw EngineError(it->second->describe() + " is up already");
    const auto waiter = waiters_.insert(waiters_.end(), {name, nullptr, {}});
    struct Leave {
        std::list<Waiter>& list;
        std::list<Waiter>::iterator at;
        ~Leave() { list.erase(at); }
    } leave{waiters_, waiter};
    runtime_->control.post([this] { retry_parked(); });
    for (;;) {
        if (waiter->link) return waiter->link;
        check_open();
        if (!waiter->error.empty()) throw EngineError(waiter->error);
        const int64_t remaining_ns = deadline - steady_ns();
        if (remaining_ns <= 0) {
            std::string message = "link " + std::to_string(link) + ": " + format_rank(peer_rank) +
                                  " did not connect to " + format_rank(runtime_->config.rank) +
                                  " (port " + std::to_string(port()) + ") within " +
                                  format_seconds(timeout);
            const auto refused = refusals_.list();
            if (!refused.empty()) message += "; last refused: " + refused.back();
            if (const auto it = links_.find(name); it != links_.end())
                if (const std::string why = it->second->error(); !why.empty())
                    message += "; the last connection failed: " + why;
            throw EngineTimeout(message);
        }
        wait_ns(changed_, lock, std::min(remaining_ns, kSlice));
        lock.unlock();
        try {
            interrupted();
        } catch (...) {
            lock.lock();  // for the removal from the list
            throw;
        }
        lock.lock();
    }
}

void Engine::decide(const std::shared_ptr<PendingConnection>& pending) {
    try {
        decide_by_hello(pending);
    } catch (const std::exception& e) {  // out of memory, most likely: it ends this connection only
        pending->refuse(Verdict::not_yet, e.what());
    }
}

void Engine::decide_by_hello(const std::shared_ptr<PendingConnection>& pending) {
    const Hello& h = pending->hello();
    const Config& c = runtime_->config;
    if (h.job != c.job)
        pending->refuse(Verdict::refused, "wrong job: " + format_rank(h.from_rank) + " runs '" +
                                              h.job + "', " + format_rank(c.rank) + " runs '" +
                                              c.job + "'");
    else if (h.to_rank != c.rank)
        pending->refuse(Verdict::refused, "wrong rank: " + format_rank(h.from_rank) + " dials " +
                                              format_rank(h.to_rank) + ", this is " +
                                              format_rank(c.rank));
    else if (h.purpose == Purpose::data)
        decide_data(pending);
    else
        decide_control(pending);
}

void Engine::decide_data(const std::shared_ptr<PendingConnection>& pending) {
    const Hello& h = pending->hello();
    const auto link = find({h.from_rank, h.link});
    if (!link || link->identity().session != h.session) {
        pending->refuse(Verdict::refused, "a data connection from " + format_rank(h.from_rank) +
                                              " for link " + std::to_string(h.link) +
                                              ", which is not connected");
        return;
    }
    if (const std::string why = link->paths().may_attach(h.path, h.epoch); !why.empty()) {
        pending->refuse(Verdict::not_yet, why);
        return;
    }
    HelloReply reply;
    reply.transport = link->transport();
    const uint32_t path = h.path;
    const uint32_t epoch = h.epoch;
    if (Fd fd = pending->accept(reply))
        link->paths().attach(path, epoch, std::move(fd), pending->handshake().keys());
}

void Engine::decide_control(const std::shared_ptr<PendingConnection>& pending) {
    const Hello& h = pending->hello();
    const Name name{h.from_rank, h.link};
    const auto link = find(name);
    const bool same = link && link->identity().session == h.session;
    if (same && (h.resume ? link->may_resume() : link->up())) {
        resume_link(pending, link);
        return;
    }
    if (h.resume) {
        pending->refuse(Verdict::refused, "link " + std::to_string(h.link) + " from " +
                                              format_rank(h.from_rank) + " is gone here" +
                                              (same ? ": " + link->error() : ""));
        return;
    }
    if (link && link->up()) {
        pending->refuse(Verdict::not_yet, link->describe() + " is up already");
        return;
    }
    bool expected = false;
    std::string other;
    {
        const std::lock_guard lock(mu_);
        for (const Waiter& w : waiters_) {
            if (w.settled()) continue;
            expected = expected || w.name == name;
            if (w.name.first == h.from_rank && w.name.second != h.link)
                other = std::to_string(w.name.second);
        }
    }
    if (expected)
        begin_link(pending);
    else if (!other.empty())
        pending->refuse(Verdict::not_yet, "wrong link: " + format_rank(h.from_rank) +
                                              " dials link " + std::to_string(h.link) + ", " +
                                              format_rank(h.to_rank) + " waits for link " + other);
    else {
        std::erase_if(parked_, [](const auto& parked) { return parked->closed(); });
        parked_.push_back(pending);  // accept() has not been called yet
    }
}

void Engine::retry_parked() {
    auto parked = std::exchange(parked_, {});
    for (const auto& pending : parked)
        if (!pending->closed()) decide(pending);
}

void Engine::begin_link(const std::shared_ptr<PendingConnection>& pending) {
    const Hello h = pending->hello();
    const Config& c = runtime_->config;
    const auto& handshake = pending->handshake();
    const bool same_host =
        !runtime_->boot_id.empty() &&
        equal_constant_time(h.host_proof,
                            host_proof(runtime_->key, runtime_->boot_id, handshake.dialler_nonce(),
                                       handshake.listener_nonce()));
    const Transport requested = h.transport;
    if (requested != Transport::any && c.transport != Transport::any && requested != c.transport) {
        pending->refuse(Verdict::refused, std::string("transports differ: ") +
                                              format_rank(h.from_rank) + " requires " +
                                              name_of(requested) + ", " + format_rank(c.rank) +
                                              " requires " + name_of(c.transport));
        return;
    }
    if (h.integrity != c.integrity) {
        pending->refuse(Verdict::refused, std::string("integrity differs: ") +
                                              format_rank(h.from_rank) + " has " +
                                              name_of(h.integrity) + ", " + format_rank(c.rank) +
                                              " has " + name_of(c.integrity));
        return;
    }
    const auto either = [&](Transport t) { return requested == t || c.transport == t; };
    if (either(Transport::shm) && !same_host) {
        pending->refuse(Verdict::refused, "shm is required, but " + format_rank(h.from_rank) +
                                              " and " + format_rank(c.rank) +
                                              " cannot prove that they share a host");
        return;
    }
    const bool require_rdma = h.require_rdma || c.require_rdma;
    const auto& rails = runtime_->rails;
    const size_t pairs = std::min<size_t>(h.rails, runtime_->rail_numbers());
    if (require_rdma && pairs == 0) {
        const uint32_t who = rails.empty() ? c.rank : h.from_rank;
        pending->refuse(Verdict::refused, "rdma is required, but " + format_rank(who) +
                                              " has no usable rail" +
                                              (rails.empty() ? ": " + runtime_->rails_error : ""));
        return;
    }
    HelloReply reply;
    const bool shared = same_host && !either(Transport::tcp) && !either(Transport::rdma);
    const std::string unshared = shared ? Memory::why_not_shareable() : "";
    if (!unshared.empty() && either(Transport::shm)) {
        pending->refuse(Verdict::refused, "shm is required, but " + format_rank(c.rank) +
                                              " has no shared memory: " + unshared);
        return;
    }
    if (shared && unshared.empty()) {
        reply.transport = Transport::shm;
        reply.unix_name = unix_name_;
    } else if (pairs > 0 && !either(Transport::tcp)) {
        reply.transport = Transport::rdma;
    }
    reply.sockets =
        require_rdma ? 0 : static_cast<uint16_t>(std::clamp<uint32_t>(h.sockets, 1, c.sockets));
    reply.listen_port = runtime_->listen_port;
    // Sent also with shared memory, which the dialler may be unable to reach.
    if (pairs > 0 && !either(Transport::tcp)) reply.rails = runtime_->rail_gids();

    auto link = std::make_shared<Link>(
        runtime_, Link::Identity{c.rank, h.from_rank, h.link, false, h.session});
    // The address of its engine is dialled only to test whether it listens.
    Link::Terms terms{reply.transport, reply.sockets, {}, {}, {}, unshared};
    terms.address = pending->from().with_port(h.listen_port);
    if (!reply.rails.empty()) terms.rails.resize(pairs);
    link->set_terms(std::move(terms));
    link->on_settled = [this, weak = std::weak_ptr(link)](const std::string& why) {
        if (const auto settled = weak.lock()) link_settled(settled, why);
    };
    Fd fd = pending->accept(reply);
    if (!fd) return;
    std::shared_ptr<Link> before;
    {
        const std::lock_guard lock(mu_);
        if (closed_) return;
        before = std::exchange(links_[{h.from_rank, h.link}], link);
    }
    if (before) before->die(before->describe() + " was replaced by a new connection");
    link->control().attach(std::move(fd), handshake.keys(), h.epoch, h.received);
}

void Engine::resume_link(const std::shared_ptr<PendingConnection>& pending,
                         const std::shared_ptr<Link>& link) {
    const Hello h = pending->hello();
    if (h.epoch <= link->control().epoch()) {
        pending->refuse(Verdict::not_yet,
                        link->describe() + " is past control epoch " + std::to_string(h.epoch));
        return;
    }
    HelloReply reply;
    reply.transport = link->transport();
    reply.listen_port = runtime_->listen_port;
    reply.received = link->control().received();
    if (Fd fd = pending->accept(reply))
        link->control().attach(std::move(fd), pending->handshake().keys(), h.epoch, h.received);
}

void Engine::link_settled(const std::shared_ptr<Link>& link, const std::string& why) {
    const Link::Identity& id = link->identity();
    const Name name{id.peer_rank, id.link};
    {
        const std::lock_guard lock(mu_);
        // A replaced link has ended, and the accept() is for its successor.
        if (const auto it = links_.find(name); it == links_.end() || it->second != link) return;
        for (Waiter& w : waiters_) {
            if (w.settled() || w.name != name) continue;
            w.error = why;
            if (why.empty()) w.link = link;
            changed_.notify_all();
            return;
        }
    }
    link->die(link->describe() + " came up after accept() had given up");
}

// --- Ending -----------------------------------------------------------------------------------

void Engine::close(double timeout, const Link::StopWaiting& stop_waiting) {
    std::vector<std::shared_ptr<Link>> links;
    {
        const std::lock_guard lock(mu_);
        if (closed_) return;
        closed_ = true;
        for (const auto& [_, link] : links_) links.push_back(link);
        changed_.notify_all();
    }
    Link::close_all(links, steady_ns() + to_ns(timeout), stop_waiting);

    // The listeners' connections belong to the control thread, which must end them.
    auto done = std::make_shared<std::promise<void>>();
    const auto stopped = done->get_future();
    // The task owns the promise, however it ends.
    runtime_->control.post([this, done = std::move(done)] {
        tcp_->stop();
        if (unix_) unix_->stop();
        parked_.clear();
        done->set_value();
    });
    stopped.wait();
    runtime_->stop();
    const std::lock_guard lock(mu_);
    links_.clear();
}

}  // namespace pipemorph
