#include "path/stream_path.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "os/clock.hpp"
#include "os/socket.hpp"

namespace pipemorph {
namespace {

// How long a fenced connection may take to run dry.
constexpr int64_t kDrainLimit = 5 * kSecond;

}  // namespace

StreamPath::~StreamPath() = default;

// What goes wrong in between (no memory, no more descriptors to be watched) is the path's end only:
// the fence finds out what has not got through.
template <typename F>
void StreamPath::guarded(F&& run) {
    try {
        run();
    } catch (const std::exception& e) {
        fail(e.what());
    }
}

void StreamPath::on_start() {
    if (!fd_) return;
    guarded([this] {
        reactor_.add(fd_.get(), EPOLLIN,
                     [self = shared_from_this(), this](uint32_t events) { on_event(events); });
        pump();
    });
}

void StreamPath::on_event(uint32_t events) {
    guarded([this, events] {
        if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive_some();
        if (fd_ && (events & EPOLLOUT)) pump();
    });
}

void StreamPath::on_kick() {
    // While the socket is full, its event will bring us back.
    if (fd_ && !watching_write_) guarded([this] { pump(); });
}

void StreamPath::pump() {
    if (retired_) return;
    const bool more = send_some();
    if (!fd_ || more == watching_write_) return;
    watching_write_ = more;
    reactor_.modify(fd_.get(), EPOLLIN | (more ? uint32_t{EPOLLOUT} : 0));
}

void StreamPath::shut() {
    if (!fd_) return;
    if (drain_timer_ != 0) reactor_.cancel(drain_timer_);
    reactor_.remove(fd_.get());
    fd_.reset();
}

void StreamPath::fail(const std::string& why) {
    if (!fd_) return;
    drop_work();
    shut();
    if (!retired_) host_->path_lost(index, epoch, why);
}

bool StreamPath::would_block_or_fail(const char* what) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return true;
    fail(std::string(what) + ": " + std::strerror(errno));
    return false;
}

bool StreamPath::retire() {
    if (retired_ || !fd_) return true;
    retired_ = true;
    drop_work();
    // The peer sees the end of the stream and closes; what is under way is read and dropped.
    ::shutdown(fd_.get(), SHUT_WR);
    if (watching_write_) reactor_.modify(fd_.get(), EPOLLIN);
    drain_timer_ = reactor_.after(kDrainLimit, [self = shared_from_this(), this] {
        drain_timer_ = 0;
        shut();
    });
    return true;
}

void StreamPath::on_sever() {
    if (!fd_ || retired_) return;
    drop_work();
    reactor_.remove(fd_.get());
    reset_connection(fd_);
    host_->path_lost(index, epoch, "severed on request");
}

void StreamPath::on_close() {
    drop_work();
    shut();
}

}  // namespace pipemorph
