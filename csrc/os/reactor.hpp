// Thread around epoll that handles file descriptors, timers and posted tasks, and sleeps when idle.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "os/fd.hpp"

namespace pipemorph {

class Reactor {
  public:
    using Handler = std::function<void(uint32_t events)>;
    using Task = std::function<void()>;

    explicit Reactor(std::string name);
    ~Reactor();
    Reactor(const Reactor&) = delete;
    Reactor& operator=(const Reactor&) = delete;

    // Any thread. Sets the function that gets, on the reactor's thread, the error of a handler,
    // task or timer; the reactor continues. Without it, an exception ends the process.
    using Failed = std::function<void(const std::string& what)>;
    void on_failure(Failed failed);
    // Any thread. After `stop` the task is dropped.
    void post(Task task);
    // Posts a task without waking the thread: it runs after this time at the latest, with other
    // delayed tasks.
    void post_within(int64_t delay_ns, Task task);
    // Ends the thread, then drops handlers, timers and tasks, with the objects they own.
    void stop();
    // Ends the threads of all reactors of this process, with or without owners, before the
    // libraries that they use are torn down.
    static void halt_all();
    bool in_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

    // Only on the reactor's thread. A descriptor must be removed before it is closed.
    struct Watch {
        int fd = -1;
        uint32_t generation = 0;
    };
    Watch add(int fd, uint32_t events, Handler handler);
    void remove(int fd);
    // Any thread, as long as the descriptor is open and not removed.
    void modify(const Watch& watch, uint32_t events);
    uint64_t after(int64_t delay_ns, Task task);
    void cancel(uint64_t timer);

  private:
    struct Watched {
        uint32_t generation = 0;
        std::shared_ptr<Handler> handler;
    };
    void start();
    void run();
    void halt();
    template <typename F>
    void guarded(F&& run);
    int until_timer() const;
    void run_timers();
    void run_tasks();
    void wake();
    void run_delayed();

    const std::string name_;
    Fd epoll_;
    Fd wake_;
    Fd delay_;  // timer for tasks of threads that must not wake this one
    std::unordered_map<int, Watched> watched_;
    uint32_t generation_ = 0;
    std::multimap<int64_t, std::pair<uint64_t, Task>> timers_;
    uint64_t next_timer_ = 1;
    std::mutex mu_;
    std::vector<Task> tasks_;
    std::vector<Task> delayed_;
    int64_t delayed_until_ns_ = 0;
    Failed failed_;
    bool woken_ = false;
    bool stopping_ = false;
    std::mutex joining_;
    std::thread thread_;
};

}  // namespace pipemorph
