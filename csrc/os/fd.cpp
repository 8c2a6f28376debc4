#include "os/fd.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <unordered_set>

namespace pipemorph {
namespace {

std::atomic<uint32_t> forks_so_far{0};

struct Descriptors {
    std::mutex mu;  // held by the thread that forks, so that the child's set is consistent
    std::unordered_set<int> open;
};

// Never destroyed: threads may still close descriptors while the process ends.
Descriptors& descriptors() {
    static Descriptors* const all = [] {
        pthread_atfork([] { descriptors().mu.lock(); }, [] { descriptors().mu.unlock(); },
                       [] {
                           Descriptors& inherited = descriptors();
                           for (const int fd : inherited.open) ::close(fd);
                           inherited.open.clear();
                           ++forks_so_far;
                           inherited.mu.unlock();
                       });
        return new Descriptors;
    }();
    return *all;
}

}  // namespace

uint32_t forks() {
    return forks_so_far;
}

std::mutex& Fd::no_fork() {
    return descriptors().mu;
}

Fd::Fd(int fd, Registered) : fd_(fd), forks_(forks()) {
    if (fd >= 0) descriptors().open.insert(fd);
}

void Fd::reset() {
    if (fd_ >= 0) {
        Descriptors& all = descriptors();
        const std::lock_guard lock(all.mu);
        if (forks_ == forks()) {
            all.open.erase(fd_);
            ::close(fd_);
        }
    }
    fd_ = -1;
}

}  // namespace pipemorph
