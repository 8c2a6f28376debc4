// File descriptor with one owner, in one process.
//
// A fork copies every descriptor. In a child, copies of the engine's descriptors would hold its
// connections open after the parent's death, so that no peer would notice, and the child's end
// would close them for the parent. So a child closes all of them first, and an inherited `Fd`
// closes nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace pipemorph {

// Number of forks between the process that loaded the engine and this one. Objects made at a lower
// number belong to another process.
uint32_t forks();

class Fd {
  public:
    Fd() = default;
    // Descriptor made by `create`, which returns it, or -1 with errno set. Forks wait meanwhile, so
    // `create` must not block.
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
