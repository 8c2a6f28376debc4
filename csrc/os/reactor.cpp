#include "os/reactor.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <unordered_set>

#include "base/error.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

// Tag of an event. A descriptor may be closed and its number reused while its events are still in
// the batch: the generation distinguishes them.
uint64_t tag(int fd, uint32_t generation) {
    return uint64_t{generation} << 32 | static_cast<uint32_t>(fd);
}

struct Reactors {
    std::mutex mu;  // held by the thread that forks, so that the child finds the set whole
    std::unordered_set<Reactor*> all;
};

// Never destroyed: it is used while the process ends.
Reactors& reactors() {
    static Reactors* const running = [] {
        pthread_atfork([] { reactors().mu.lock(); }, [] { reactors().mu.unlock(); },
                       [] {
                           reactors().all.clear();  // their threads are not the child's
                           reactors().mu.unlock();
                       });
        return new Reactors;
    }();
    return *running;
}

}  // namespace

void Reactor::halt_all() {
    const std::lock_guard lock(reactors().mu);
    for (Reactor* reactor : reactors().all) reactor->halt();
}

Reactor::Reactor(std::string name)
    : name_(std::move(name)),
      epoll_(Fd::made_by([] { return epoll_create1(EPOLL_CLOEXEC); })),
      wake_(Fd::made_by([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })),
      delay_(
          Fd::made_by([] { return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK); })) {
    for (const auto& [fd, what] : {std::pair(&epoll_, "epoll"), std::pair(&wake_, "an eventfd"),
                                   std::pair(&delay_, "a timerfd")})
        if (!*fd)
            throw EngineError("thread " + name_ + " cannot have " + what + ": " +
                              std::strerror(errno));
    add(wake_.get(), EPOLLIN, [this](uint32_t) {
        uint64_t count;
        [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof count);
    });
    add(delay_.get(), EPOLLIN, [this](uint32_t) {
        uint64_t count;
        [[maybe_unused]] const ssize_t n = ::read(delay_.get(), &count, sizeof count);
        run_delayed();
    });
    const std::lock_guard lock(reactors().mu);
    reactors().all.insert(this);
    try {
        start();
    } catch (...) {
        reactors().all.erase(this);
        throw;
    }
}

void Reactor::start() {
    // Signals belong to Python's main thread.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string failed;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::exception& e) {
        failed = e.what();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!failed.empty())
        throw EngineError("thread " + name_ + " cannot be started: " + failed +
                          " (see ulimit -u, and the pids limit of the container)");
}

Reactor::~Reactor() {
    stop();
    const std::lock_guard lock(reactors().mu);
    reactors().all.erase(this);
}

void Reactor::wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
}

void Reactor::on_failure(Failed failed) {
    const std::lock_guard lock(mu_);
    failed_ = std::move(failed);
}

template <typename F>
void Reactor::guarded(F&& run) {
    try {
        run();
    } catch (const std::exception& e) {
        Failed failed;
        {
            const std::lock_guard lock(mu_);
            failed = failed_;
        }
        if (!failed) throw;
        failed("thread " + name_ + ": " + e.what());
    }
}

void Reactor::post(Task task) {
    {
        const std::lock_guard lock(mu_);
        if (stopping_) return;
        tasks_.push_back(std::move(task));
        if (std::exchange(woken_, true)) return;
    }
    wake();
}

void Reactor::post_within(int64_t delay_ns, Task task) {
    const std::lock_guard lock(mu_);
    if (stopping_) return;
    delayed_.push_back(std::move(task));
    const int64_t until = steady_ns() + delay_ns;
    if (delayed_.size() > 1 && delayed_until_ns_ <= until) return;
    delayed_until_ns_ = until;
    // Setting the kernel's timer wakes no thread.
    itimerspec when{};
    when.it_value.tv_sec = until / kSecond;
    when.it_value.tv_nsec = until % kSecond;
    ::timerfd_settime(delay_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void Reactor::run_delayed() {
    std::vector<Task> tasks;
    {
        const std::lock_guard lock(mu_);
        tasks.swap(delayed_);
    }
    for (const Task& task : tasks) guarded(task);
}

void Reactor::halt() {
    {
        const std::lock_guard lock(mu_);
        stopping_ = true;
    }
    wake();
    const std::lock_guard lock(joining_);
    if (thread_.joinable()) thread_.join();
}

void Reactor::stop() {
    halt();
    // These may own the last reference to objects that call back into this reactor, so they are
    // destroyed first.
    std::vector<Task> tasks;
    {
        const std::lock_guard lock(mu_);
        tasks.swap(tasks_);
        std::move(delayed_.begin(), delayed_.end(), std::back_inserter(tasks));
        delayed_.clear();
    }
    tasks.clear();
    auto timers = std::exchange(timers_, {});
    timers.clear();
    auto watched = std::exchange(watched_, {});
    watched.clear();
}

Reactor::Watch Reactor::add(int fd, uint32_t events, Handler handler) {
    const uint32_t generation = ++generation_;
    watched_[fd] = {generation, std::make_shared<Handler>(std::move(handler))};
    epoll_event e{};
    e.events = events;
    e.data.u64 = tag(fd, generation);
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &e) != 0) {
        watched_.erase(fd);
        throw EngineError(std::string("cannot watch a descriptor (epoll_ctl): ") +
                          std::strerror(errno));
    }
    return {fd, generation};
}

void Reactor::modify(const Watch& watch, uint32_t events) {
    epoll_event e{};
    e.events = events;
    e.data.u64 = tag(watch.fd, watch.generation);
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, watch.fd, &e);
}

void Reactor::remove(int fd) {
    if (watched_.erase(fd) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

uint64_t Reactor::after(int64_t delay_ns, Task task) {
    const uint64_t id = next_timer_++;
    timers_.emplace(steady_ns() + delay_ns, std::pair(id, std::move(task)));
    return id;
}

void Reactor::cancel(uint64_t timer) {
    for (auto it = timers_.begin(); it != timers_.end(); ++it) {
        if (it->second.first == timer) {
            timers_.erase(it);
            return;
        }
    }
}

// Milliseconds until the next timer is due, or -1.
int Reactor::until_timer() const {
    if (timers_.empty()) return -1;
    const int64_t wait = std::max<int64_t>(timers_.begin()->first - steady_ns(), 0);
    return static_cast<int>(std::min<int64_t>((wait + kMillisecond - 1) / kMillisecond, 60'000));
}

void Reactor::run_timers() {
    while (!timers_.empty()) {
        const auto first = timers_.begin();
        if (first->first > steady_ns()) return;
        const Task task = std::move(first->second.second);
        timers_.erase(first);
        guarded(task);
    }
}

void Reactor::run_tasks() {
    std::vector<Task> tasks;
    {
        const std::lock_guard lock(mu_);
        tasks.swap(tasks_);
        woken_ = false;
    }
    for (const Task& task : tasks) guarded(task);
}

void Reactor::run() {
    pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
    std::array<epoll_event, 64> events;
    for (;;) {
        run_tasks();
        int timeout = until_timer();
        {
            const std::lock_guard lock(mu_);
            if (stopping_) return;
            if (!tasks_.empty()) timeout = 0;
        }
        const int n =
            epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
        for (int i = 0; i < n; ++i) {
            const auto fd = static_cast<int>(events[size_t(i)].data.u64 & 0xffffffff);
            const auto it = watched_.find(fd);
            if (it == watched_.end() ||
                it->second.generation != static_cast<uint32_t>(events[size_t(i)].data.u64 >> 32))
                continue;
            // The handler may remove itself.
            const auto handler = it->second.handler;
            guarded([&] { (*handler)(events[size_t(i)].events); });
        }
        // Timers run last: after a delay of the thread, arrived input is handled before a timeout.
        run_timers();
    }
}

}  // namespace pipemorph
