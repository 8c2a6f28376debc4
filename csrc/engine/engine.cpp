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
    const auto on_greeting = [this](const std::shared_ptr<Greeting>& g) { decide(g); };
    const auto addresses = resolve(c.host, c.port, true);
    tcp_ = std::make_unique<Listener>(*runtime_, refusals_, addresses.front(), on_greeting);
    runtime_->listen_port = tcp_->port();
    if (!runtime_->boot_id.empty()) {
        unix_name_ = random_name();
        unix_ = std::make_unique<Listener>(*runtime_, refusals_, abstract_unix(unix_name_),
                                           on_greeting);
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

// What the thread was doing is half done, so nothing goes on. The process does, and is told why.
void Engine::fail(const std::string& what) {
    const std::string why =
        "the engine of " + rank_text(runtime_->config.rank) + " failed: " + what;
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
        // Here and in links_.
        if (link.use_count() == 2) link->let_go();
    }
    // Without links there is nothing to keep time for.
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
            throw EngineError("link " + std::to_string(link) + " from " + rank_text(peer_rank) +
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
        const int64_t left = deadline - steady_ns();
        if (left <= 0) {
            std::string message = "link " + std::to_string(link) + ": " + rank_text(peer_rank) +
                                  " did not connect to " + rank_text(runtime_->config.rank) +
                                  " (port " + std::to_string(port()) + ") within " +
                                  seconds_text(timeout);
            const auto refused = refusals_.list();
            if (!refused.empty()) message += "; last refused: " + refused.back();
            if (const auto it = links_.find(name); it != links_.end())
                if (const std::string why = it->second->error(); !why.empty())
                    message += "; last that came: " + why;
            throw EngineTimeout(message);
        }
        wait_ns(changed_, lock, std::min(left, kSlice));
        lock.unlock();
        try {
            interrupted();
        } catch (...) {
            lock.lock();  // for leaving the list
            throw;
        }
        lock.lock();
    }
}

void Engine::decide(const std::shared_ptr<Greeting>& greeting) {
    try {
        decide_by_hello(greeting);
    } catch (const std::exception& e) {  // out of memory, most likely: this connection only
        greeting->refuse(Verdict::not_yet, e.what());
    }
}

void Engine::decide_by_hello(const std::shared_ptr<Greeting>& greeting) {
    const Hello& h = greeting->hello();
    const Config& c = runtime_->config;
    if (h.job != c.job)
        greeting->refuse(Verdict::refused, "wrong job: " + rank_text(h.from_rank) + " runs '" +
                                               h.job + "', " + rank_text(c.rank) + " runs '" +
                                               c.job + "'");
    else if (h.to_rank != c.rank)
        greeting->refuse(Verdict::refused, "wrong rank: " + rank_text(h.from_rank) + " looks for " +
                                               rank_text(h.to_rank) + ", this is " +
                                               rank_text(c.rank));
    else if (h.purpose == Purpose::data)
        decide_data(greeting);
    else
        decide_control(greeting);
}

void Engine::decide_data(const std::shared_ptr<Greeting>& greeting) {
    const Hello& h = greeting->hello();
    const auto link = find({h.from_rank, h.link});
    if (!link || link->identity().session != h.session) {
        greeting->refuse(Verdict::refused, "a data connection from " + rank_text(h.from_rank) +
                                               " for link " + std::to_string(h.link) +
                                               ", which is not connected");
        return;
    }
    if (const std::string why = link->paths().may_attach(h.path, h.epoch); !why.empty()) {
        greeting->refuse(Verdict::not_yet, why);
        return;
    }
    HelloReply reply;
    reply.transport = link->transport();
    const uint32_t path = h.path;
    const uint32_t epoch = h.epoch;
    if (Fd fd = greeting->accept(reply))
        link->paths().attach(path, epoch, std::move(fd), greeting->handshake().keys());
}

void Engine::decide_control(const std::shared_ptr<Greeting>& greeting) {
    const Hello& h = greeting->hello();
    const Name name{h.from_rank, h.link};
    const auto link = find(name);
    const bool same = link && link->identity().session == h.session;
    if (same && (h.resume ? link->may_resume() : link->up())) {
        resume_link(greeting, link);
        return;
    }
    if (h.resume) {
        greeting->refuse(Verdict::refused, "link " + std::to_string(h.link) + " from " +
                                               rank_text(h.from_rank) + " is gone here" +
                                               (same ? ": " + link->error() : ""));
        return;
    }
    if (link && link->up()) {
        greeting->refuse(Verdict::not_yet, link->describe() + " is up already");
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
        begin_link(greeting);
    else if (!other.empty())
        greeting->refuse(Verdict::not_yet, "wrong link: " + rank_text(h.from_rank) +
                                               " dials link " + std::to_string(h.link) + ", " +
                                               rank_text(h.to_rank) + " waits for link " + other);
    else {
        std::erase_if(parked_, [](const auto& parked) { return parked->closed(); });
        parked_.push_back(greeting);  // accept() has not been called yet
    }
}

void Engine::retry_parked() {
    auto parked = std::exchange(parked_, {});
    for (const auto& greeting : parked)
        if (!greeting->closed()) decide(greeting);
}

void Engine::begin_link(const std::shared_ptr<Greeting>& greeting) {
    const Hello h = greeting->hello();
    const Config& c = runtime_->config;
    const auto& handshake = greeting->handshake();
    const bool same_host =
        !runtime_->boot_id.empty() &&
        equal_constant_time(h.host_proof,
                            host_proof(runtime_->key, runtime_->boot_id, handshake.dialler_nonce(),
                                       handshake.listener_nonce()));
    const Transport asked = h.transport;
    if (asked != Transport::any && c.transport != Transport::any && asked != c.transport) {
        greeting->refuse(Verdict::refused, std::string("transports differ: ") +
                                               rank_text(h.from_rank) + " requires " +
                                               name_of(asked) + ", " + rank_text(c.rank) +
                                               " requires " + name_of(c.transport));
        return;
    }
    if (h.integrity != c.integrity) {
        greeting->refuse(Verdict::refused, std::string("integrity differs: ") +
                                               rank_text(h.from_rank) + " has " +
                                               name_of(h.integrity) + ", " + rank_text(c.rank) +
                                               " has " + name_of(c.integrity));
        return;
    }
    const auto either = [&](Transport t) { return asked == t || c.transport == t; };
    if (either(Transport::shm) && !same_host) {
        greeting->refuse(Verdict::refused, "shm is required, but " + rank_text(h.from_rank) +
                                               " and " + rank_text(c.rank) +
                                               " cannot prove that they share a host");
        return;
    }
    const bool require_rdma = h.require_rdma || c.require_rdma;
    const auto& rails = runtime_->rails;
    const size_t pairs = std::min<size_t>(h.rails, runtime_->rail_numbers());
    if (require_rdma && pairs == 0) {
        const uint32_t who = rails.empty() ? c.rank : h.from_rank;
        greeting->refuse(Verdict::refused,
                         "rdma is required, but " + rank_text(who) + " has no usable rail" +
                             (rails.empty() ? ": " + runtime_->rails_trouble : ""));
        return;
    }
    HelloReply reply;
    const bool shared = same_host && !either(Transport::tcp) && !either(Transport::rdma);
    const std::string unshared = shared ? Memory::why_not_shareable() : "";
    if (!unshared.empty() && either(Transport::shm)) {
        greeting->refuse(Verdict::refused, "shm is required, but " + rank_text(c.rank) +
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
    // Also with shared memory, which the dialler may find that it cannot reach.
    if (pairs > 0 && !either(Transport::tcp)) reply.rails = runtime_->rail_gids();

    auto link = std::make_shared<Link>(
        runtime_, Link::Identity{c.rank, h.from_rank, h.link, false, h.session});
    // Where its engine listens: dialled only to see whether anybody is left there.
    Link::Terms terms{reply.transport, reply.sockets, {}, {}, {}, unshared};
    terms.address = greeting->from().with_port(h.listen_port);
    if (!reply.rails.empty()) terms.rails.resize(pairs);
    link->set_terms(std::move(terms));
    link->on_settled = [this, weak = std::weak_ptr(link)](const std::string& why) {
        if (const auto settled = weak.lock()) link_settled(settled, why);
    };
    Fd fd = greeting->accept(reply);
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

void Engine::resume_link(const std::shared_ptr<Greeting>& greeting,
                         const std::shared_ptr<Link>& link) {
    const Hello h = greeting->hello();
    if (h.epoch <= link->control().epoch()) {
        greeting->refuse(Verdict::not_yet,
                         link->describe() + " is past control epoch " + std::to_string(h.epoch));
        return;
    }
    HelloReply reply;
    reply.transport = link->transport();
    reply.listen_port = runtime_->listen_port;
    reply.received = link->control().received();
    if (Fd fd = greeting->accept(reply))
        link->control().attach(std::move(fd), greeting->handshake().keys(), h.epoch, h.received);
}

void Engine::link_settled(const std::shared_ptr<Link>& link, const std::string& why) {
    const Link::Identity& id = link->identity();
    const Name name{id.peer_rank, id.link};
    {
        const std::lock_guard lock(mu_);
        // One that was replaced has ended, and the accept() is for the other.
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

void Engine::close(double timeout, const Link::Hurry& hurry) {
    std::vector<std::shared_ptr<Link>> links;
    {
        const std::lock_guard lock(mu_);
        if (closed_) return;
        closed_ = true;
        for (const auto& [_, link] : links_) links.push_back(link);
        changed_.notify_all();
    }
    Link::close_all(links, steady_ns() + to_ns(timeout), hurry);

    // The listeners' connections are the control thread's, so it must be the one to end them.
    auto done = std::make_shared<std::promise<void>>();
    const auto stopped = done->get_future();
    // The promise goes with the task, however that ends.
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
