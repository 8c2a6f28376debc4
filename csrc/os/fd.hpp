// A file descriptor with one owner, in one process.
//
// A fork copies every descriptor. A child that kept those of the engine would keep its connections
// open when the parent dies, so that no peer noticed, and would close them for the parent when it
// ends. So a child closes all of them as the first thing it does, and an `Fd` that it has inherited
// closes nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace pipemorph {

// How many forks lie between this process and the one that loaded the engine. What was made when
// there were fewer belongs to another process.
uint32_t forks();

class Fd {
  public:
    Fd() = default;
    // Made by `create`, which returns it or -1 with errno set. No fork comes in between, so it must
    // not block.
    template <typename Create>
    static Fd made_by(Create&& create) {
        const std::lock_guard lock(no_fork());
        return Fd(create(), Registered{});
    }
    explicit Fd(int fd) : Fd(made_by([fd] { return fd; })) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
    Fd& operator=(Fd&& other) noexcept {
        if (this != &other) {
            reset();
            fd_ = std::exchange(other.fd_, -1);
            forks_ = other.forks_;
        }
        return *this;
    }
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;
    ~Fd() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    void reset();

  private:
    struct Registered {};
    Fd(int fd, Registered);
    static std::mutex& no_fork();

    int fd_ = -1;
    uint32_t forks_ = 0;
};

}  // namespace pipemorph
