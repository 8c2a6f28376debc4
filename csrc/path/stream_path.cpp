#include "path/stream_path.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.hpp"
#include "os/clock.hpp"
#include "os/socket.hpp"

namespace pipemorph {
namespace {

// Longest drain of a fenced connection.
constexpr int64_t kDrainLimit = 5 * kSecond;
// Small chunks to send before other sockets of the same thread are served.
constexpr int kSmallPerTurn = 32;

}  // namespace

StreamPath::~StreamPath() = default;

// Runs a step whose exception (no memory or descriptors) ends only this path: the fence finds the
// missing chunks.
template <typename F>
void StreamPath::guarded(F&& run) {
    try {
        run();
    } catch (const std::exception& e) {
        fail(e.what());
    }
}

// Runs a step on a thread of the application, with the mutex held.
template <typename F>
void StreamPath::on_other_thread(F&& run) {
    on_application_thread_ = true;
    guarded(run);
    on_application_thread_ = false;
}

void StreamPath::on_start() {
    const Lock lock(mu_);
    if (!open()) return;
    guarded([this] {
        watch_ =
            reactor_.add(fd_.get(), EPOLLIN,
                         [self = shared_from_this(), this](uint32_t events) { on_event(events); });
        pump();
    });
}

void StreamPath::on_event(uint32_t events) {
    const Lock lock(mu_);
    guarded([this, events] {
        if (fd_ && !broken_.empty()) fail(broken_);
        if (open() && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) receive_some();
        if (open() && (events & EPOLLOUT)) pump();
    });
}

void StreamPath::on_notify() {
    const Lock lock(mu_);
    // While the socket is full, its event resumes the sending.
    if (open() && !watching_write_) guarded([this] { pump(); });
}

void StreamPath::pump() {
    if (retired_) return;
    Sent sent = Sent::small;
    for (int i = 0; sent == Sent::small && open(); ++i)
        sent = i < kSmallPerTurn ? send_some() : Sent::more;
    const bool more = sent == Sent::more;
    if (!open() || more == watching_write_) return;
    watching_write_ = more;
    watch();
}

bool StreamPath::send_inline() {
    const Lock lock(mu_, std::try_to_lock);
    if (!lock || !open() || retired_ || watching_write_ || watch_.fd < 0) return false;
    Sent sent = Sent::nothing;
    on_other_thread([this, &sent] { sent = send_some(); });
    if (sent != Sent::more || !open()) return sent == Sent::small;
    watching_write_ = true;
    watch();
    return true;
}

bool StreamPath::read_inline(int wake, int64_t wait_ns) {
    if (is_large()) return false;
    Lock lock(mu_);
    if (!open() || retired_ || sleeps_ || watch_.fd < 0 || is_large()) return false;
    sleeps_ = true;
    if (!std::exchange(read_by_application_, true)) watch();
    pollfd ready[] = {{fd_.get(), POLLIN, 0}, {wake, POLLIN, 0}};
    lock.unlock();
    // A thread that closes the socket meanwhile wakes this one as well.
    const timespec wait{wait_ns / kSecond, wait_ns % kSecond};
    ::ppoll(ready, 2, &wait, nullptr);
    lock.lock();
    sleeps_ = false;
    if (open() && ready[0].revents != 0) on_other_thread([this] { receive_some(); });
    return true;
}

void StreamPath::return_to_reactor() {
    const Lock lock(mu_);
    if (sleeps_ || !std::exchange(read_by_application_, false) || !open()) return;
    watch();
}

void StreamPath::watch() {
    reactor_.modify(watch_, (read_by_application_ ? 0 : uint32_t{EPOLLIN}) |
                                (watching_write_ ? uint32_t{EPOLLOUT} : 0));
}

void StreamPath::close_socket() {
    if (!fd_) return;
    if (drain_timer_ != 0) reactor_.cancel(drain_timer_);
    reactor_.remove(fd_.get());
    fd_.reset();
}

void StreamPath::fail(std::string_view why) {
    if (!fd_) return;
    if (on_application_thread_) {
        if (!broken_.empty()) return;
        // The shutdown needs no memory: the end of the stream is always an event of the descriptor.
        keep_words(broken_, why);
        ::shutdown(fd_.get(), SHUT_RDWR);
        return;
    }
    drop_work();
    close_socket();
    if (!retired_) host_->path_lost(index, epoch, std::string(why));
}

bool StreamPath::would_block_or_fail(const char* what) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return true;
    fail(std::string(what) + ": " + std::strerror(errno));
    return false;
}

bool StreamPath::retire() {
    const Lock lock(mu_);
    if (retired_ || !fd_) return true;
    retired_ = true;
    drop_work();
    // The peer sees the end of the stream and closes; bytes under way are read and dropped.
    ::shutdown(fd_.get(), SHUT_WR);
    if (std::exchange(watching_write_, false)) watch();
    drain_timer_ = reactor_.after(kDrainLimit, [self = shared_from_this(), this] {
        const Lock held(mu_);
        drain_timer_ = 0;
        close_socket();
    });
    return true;
}

void StreamPath::on_sever() {
    const Lock lock(mu_);
    if (!fd_ || retired_) return;
    drop_work();
    reactor_.remove(fd_.get());
    reset_connection(fd_);
    host_->path_lost(index, epoch, "severed on request");
}

void StreamPath::on_give_up(const std::string& why) {
    const Lock lock(mu_);
    fail(why);
}

void StreamPath::on_close(const std::shared_ptr<void>& /*closed*/) {
    const Lock lock(mu_);
    drop_work();
    close_socket();
}

}  // namespace pipemorph
