// Dials a peer's engine until there is a link, or the time is over.
#include <algorithm>

#include "base/text.hpp"
#include "engine/engine.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kSlice = 100 * kMillisecond;
constexpr int64_t kRetry = 50 * kMillisecond;

}  // namespace

struct Engine::Attempt {
    Link::Identity identity;
    Hello hello;
    // Behind the engine's mutex.
    bool finished = false;
    bool given_up = false;
    std::shared_ptr<Link> link;
    std::string error;
    bool final = false;
    bool cut_short = false;
    bool answered = false;
};

std::shared_ptr<Link> Engine::connect(uint32_t peer_rank, uint32_t link, const std::string& host,
                                      uint16_t port, double timeout,
                                      const Interrupted& interrupted) {
    const Config& c = runtime_->config;
    const int64_t deadline = steady_ns() + to_ns(timeout);
    const std::string who = "link " + std::to_string(link) + " (" + format_rank(c.rank) + " -> " +
                            std::to_string(peer_rank) + ")";
    const Name name{peer_rank, link};
    {
        const std::lock_guard lock(mu_);
        check_open();
        if (const auto it = links_.find(name); it != links_.end() && it->second->up())
            throw EngineError(it->second->describe() + " is up already");
    }
    Session session;
    fill_random(session);
    std::string last_error = "nothing tried yet";
    std::string answer;  // the newest refusal, which says more than a later missing process
    bool known = false;
    bool refused = false;
    for (uint32_t epoch = 1;; ++epoch) {
        std::vector<Address> addresses;
        try {
            const auto lookup = Lookup::begin(host, port);
            std::optional<std::vector<Address>> found;
            while (
                !(found = lookup->wait(std::clamp<int64_t>(deadline - steady_ns(), 0, kSlice)))) {
                if (steady_ns() >= deadline)
                    throw EngineError("cannot resolve host '" + host +
                                      "': the name service has not answered");
                interrupted();
                const std::lock_guard lock(mu_);
                check_open();
            }
            addresses = std::move(*found);
        } catch (const EngineError& e) {
            last_error = e.what();  // a pod's name may appear a little later than the pod
            known = false;
        }
        for (const Address& address : addresses) {
            auto attempt = std::make_shared<Attempt>();
            attempt->identity = {c.rank, peer_rank, link, true, session};
            Hello& h = attempt->hello;
            h.job = c.job;
            h.from_rank = c.rank;
            h.to_rank = peer_rank;
            h.link = link;
            h.session = session;
            h.epoch = epoch;
            h.transport = c.transport;
            h.integrity = c.integrity;
            h.sockets = static_cast<uint16_t>(c.sockets);
            h.rails = static_cast<uint16_t>(runtime_->rail_numbers());
            h.require_rdma = c.require_rdma;
            h.listen_port = runtime_->listen_port;
            // A parked connection waits for accept(), so an attempt may use all the remaining time.
            // It then ends by itself, with the best description of its wait.
            runtime_->control.post([this, attempt, address, deadline] {
                start_attempt(attempt, address,
                              std::max<int64_t>(deadline - steady_ns(), kMillisecond));
            });
            std::unique_lock lock(mu_);
            try {
                while (!attempt->finished) {
                    check_open();
                    wait_ns(changed_, lock, kSlice);
                    lock.unlock();
                    interrupted();
                    lock.lock();
                }
            } catch (...) {
                if (!lock.owns_lock()) lock.lock();
                attempt->given_up = true;
                const auto orphan = attempt->link;
                lock.unlock();
                if (orphan)
                    orphan->die(orphan->describe() + " came up after connect() had returned");
                throw;
            }
            if (attempt->link) return attempt->link;
            if (attempt->answered) answer = attempt->error;
            // A last attempt without time for an answer must not hide a known reason.
            if (!known || !attempt->cut_short) {
                last_error = attempt->error;
                known = !attempt->cut_short;
                refused = last_error.starts_with("refused");
            }
            if (attempt->final) throw EngineError(who + ": " + last_error);
            if (steady_ns() >= deadline) break;
        }
        std::unique_lock lock(mu_);
        // Too little time for another attempt.
        if (steady_ns() + 2 * kRetry >= deadline) {
            const std::string message =
                who + ": not connected to " + host + ":" + std::to_string(port) + " within " +
                format_seconds(timeout) + " (last: " + last_error +
                (answer.empty() || answer == last_error ? "" : "; before that: " + answer) + ")";
            if (refused) throw EngineError(message);
            throw EngineTimeout(message);
        }
        wait_ns(changed_, lock, kRetry);
        check_open();
        lock.unlock();
        interrupted();
    }
}

void Engine::start_attempt(const std::shared_ptr<Attempt>& attempt, const Address& address,
                           int64_t limit_ns) {
    dial(*runtime_, address, attempt->hello, limit_ns, [this, attempt, address](DialResult r) {
        if (r.fd) {
            reach_shared_memory(attempt, address, std::move(r));
            return;
        }
        const std::lock_guard lock(mu_);
        attempt->finished = true;
        attempt->error = r.error;
        attempt->final = r.refused;
        attempt->cut_short = r.cut_short;
        attempt->answered = r.answered;
        changed_.notify_all();
    });
}

// Chooses the transport. Rails are paired by their GIDs. Both ends may share a host and still not
// see each other's sockets (network namespaces), so the dialler tests shared memory before it
// confirms.
void Engine::reach_shared_memory(const std::shared_ptr<Attempt>& attempt, const Address& address,
                                 DialResult control) {
    const HelloReply& reply = control.reply;
    Transport transport = reply.transport;
    std::string error;
    Link::Terms terms{transport, reply.sockets, {}, address, reply.unix_name, {}};
    if (!reply.rails.empty()) terms.rails = pair_rails(runtime_->rail_gids(), reply.rails);
    if (transport == Transport::shm) {
        terms.shm_error = Memory::why_not_shareable();
        if (terms.shm_error.empty() && !start_connect(abstract_unix(reply.unix_name)))
            terms.shm_error =
                "the peer's unix socket cannot be reached (another network namespace?)";
        if (!terms.shm_error.empty()) {
            transport = terms.rails.empty() ? Transport::tcp : Transport::rdma;
            if (runtime_->config.transport == Transport::shm)
                error = "refused: shm is required, but " + terms.shm_error;
        }
    }
    const Link::Identity& id = attempt->identity;
    const auto link = std::make_shared<Link>(runtime_, id);
    terms.transport = transport;
    link->set_terms(std::move(terms));
    if (error.empty() && link->path_count() == 0)
        error = "refused: " + format_rank(id.peer_rank) + " agreed to " + name_of(transport) +
                " without a single data path: are both ends of one version?";
    const std::string abandoned = "connect() had returned before it came up";
    std::shared_ptr<Link> before;
    std::string why = error;
    {
        const std::lock_guard lock(mu_);
        if (attempt->given_up || closed_) why = abandoned;
        if (why.empty()) before = std::exchange(links_[{id.peer_rank, id.link}], link);
    }
    if (before) before->die(before->describe() + " was replaced by a new connection");
    // This connection carries the goodbye to the acceptor.
    if (!why.empty()) link->die(link->describe() + " is dead: " + why);
    link->control().attach(std::move(control.fd), control.keys, attempt->hello.epoch,
                           control.reply.received);
    link->confirm();
    // Only after the confirmation: accept() must return every link that connect() returns, even one
    // that is closed at once.
    bool orphan = false;
    {
        const std::lock_guard lock(mu_);
        attempt->finished = true;
        if (error.empty()) attempt->link = link;
        attempt->error = error;
        attempt->final = !error.empty();
        orphan = attempt->given_up;
        changed_.notify_all();
    }
    if (orphan) link->die(link->describe() + " is dead: " + abandoned);
}

}  // namespace pipemorph
