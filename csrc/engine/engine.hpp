// Transfer engine of a process: listens for links, dials them, and owns the threads.
#pragma once

#include <condition_variable>
#include <list>
#include <mutex>

#include "engine/link.hpp"
#include "engine/listener.hpp"

namespace pipemorph {

class Engine {
  public:
    explicit Engine(Config config);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    uint16_t port() const { return runtime_->listen_port; }
    int notifier() const { return runtime_->notifier(); }

    // Both block the caller's thread. `interrupted` is called regularly and may throw.
    using Interrupted = std::function<void()>;
    std::shared_ptr<Link> connect(uint32_t peer_rank, uint32_t link, const std::string& host,
                                  uint16_t port, double timeout, const Interrupted& interrupted);
    std::shared_ptr<Link> accept(uint32_t peer_rank, uint32_t link, double timeout,
                                 const Interrupted& interrupted);
    std::vector<std::string> refused() const { return refusals_.list(); }
    // Rails in use, and the reason for which there are no others.
    std::vector<std::string> rails() const;
    const std::string& rails_error() const { return runtime_->rails_error; }
    Runtime& runtime() { return *runtime_; }
    int memory_node() const { return runtime_->memory_node; }
    void close(double timeout, const Link::StopWaiting& stop_waiting = {});

  private:
    using Name = std::pair<uint32_t, uint32_t>;  // peer's rank, link

    struct Waiter {
        Name name;
        std::shared_ptr<Link> link;
        std::string error;  // the link ended before it was confirmed

        bool settled() const { return link || !error.empty(); }
    };

    // Control thread.
    void decide(const std::shared_ptr<PendingConnection>& pending);
    void decide_by_hello(const std::shared_ptr<PendingConnection>& pending);
    void decide_control(const std::shared_ptr<PendingConnection>& pending);
    void decide_data(const std::shared_ptr<PendingConnection>& pending);
    void begin_link(const std::shared_ptr<PendingConnection>& pending);
    void resume_link(const std::shared_ptr<PendingConnection>& pending,
                     const std::shared_ptr<Link>& link);
    void link_settled(const std::shared_ptr<Link>& link, const std::string& why);
    void retry_parked();
    void tick();

    struct Attempt;
    void start_attempt(const std::shared_ptr<Attempt>& attempt, const Address& address,
                       int64_t limit_ns);
    void reach_shared_memory(const std::shared_ptr<Attempt>& attempt, const Address& address,
                             DialResult control);

    std::shared_ptr<Link> find(const Name& name) const;
    void check_open() const;
    void fail(const std::string& what);  // any of the runtime's threads

    const std::shared_ptr<Runtime> runtime_;
    RefusalLog refusals_;
    std::string unix_name_;
    std::unique_ptr<Listener> tcp_;
    std::unique_ptr<Listener> unix_;

    mutable std::mutex mu_;
    std::condition_variable changed_;
    std::map<Name, std::shared_ptr<Link>> links_;
    std::list<Waiter> waiters_;
    bool closed_ = false;
    std::string failure_;  // exception of a thread

    std::list<std::shared_ptr<PendingConnection>> parked_;  // control thread
};

}  // namespace pipemorph
