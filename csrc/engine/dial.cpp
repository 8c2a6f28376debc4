#include "engine/dial.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

// Time for the network to connect, with a second try of the kernel. An address may be that of a
// deleted pod, which its name still has, or the first of several.
constexpr int64_t kReach = 3 * kSecond;
// Segment size that every network carries.
constexpr uint32_t kSmallSegment = 536;

class Dialling : public std::enable_shared_from_this<Dialling> {
  public:
    Dialling(Runtime& runtime, const Address& address, Hello hello,
             std::function<void(DialResult)> done, uint32_t segment_bytes)
        : runtime_(runtime),
          address_(address),
          segment_bytes_(hello.purpose == Purpose::control ? kSmallSegment : segment_bytes),
          handshake_(runtime.key, std::move(hello), runtime.boot_id),
          done_(std::move(done)) {}

    void start(int64_t limit_ns) {
        auto self = shared_from_this();
        const int64_t reach_ns = std::min(limit_ns, kReach);
        limit_is_short_ = limit_ns < kReach;
        timer_ = runtime_.control.after(reach_ns, [self, rest_ns = limit_ns - reach_ns] {
            self->timer_ = 0;
            if (self->connected_ && rest_ns > 0)
                self->end_after(rest_ns);
            else
                self->out_of_time();
        });
        guarded([&] {
            fd_ = start_connect(address_, segment_bytes_);
            if (!fd_) {
                connect_failed(errno);
                return;
            }
            watch_ = runtime_.control.add(fd_.get(), EPOLLOUT, [self](uint32_t) {
                self->guarded([&] { self->on_event(); });
            });
        });
    }

  private:
    // An exception in between (no memory or descriptors) ends this connection only. An exception of
    // `done` is passed on.
    template <typename F>
    void guarded(F&& run) {
        try {
            run();
        } catch (const std::exception& e) {
            if (!done_) throw;
            fail(e.what());
        }
    }

    void end_after(int64_t limit_ns) {
        timer_ = runtime_.control.after(limit_ns, [self = shared_from_this()] {
            self->timer_ = 0;
            self->out_of_time();
        });
    }

    void out_of_time() {
        result_.cut_short = limit_is_short_ && !handshake_.met();
        fail(no_answer());
    }

    void on_event() {
        if (!connected_) {
            if (const int error = connect_error(fd_); error != 0) {
                connect_failed(error);
                return;
            }
            connected_ = true;
            if (address_.family() != AF_UNIX) set_no_delay(fd_);
            runtime_.control.modify(watch_, EPOLLIN);
            send_output();
            return;
        }
        uint8_t buffer[2048];
        const size_t want = std::min(handshake_.wanted(), sizeof buffer);
        const ssize_t n = ::recv(fd_.get(), buffer, want, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            fail(address_.text() + " closed the connection during the handshake");
            return;
        }
        if (!handshake_.feed({buffer, static_cast<size_t>(n)})) {
            // The answer is unauthenticated: the address may belong to another job for a moment,
            // whose secret differs. Another version of the protocol is final.
            result_.answered = true;
            result_.refused = handshake_.other_version();
            fail(handshake_.failure());
            return;
        }
        if (!send_output() || !handshake_.done()) return;
        result_.answered = result_.proved = true;
        result_.reply = handshake_.reply();
        result_.keys = handshake_.keys();
        if (handshake_.verdict() == Verdict::accepted) {
            finish(std::move(fd_));
            return;
        }
        result_.refused = handshake_.verdict() == Verdict::refused;
        result_.not_yet = handshake_.verdict() == Verdict::not_yet;
        fail("refused: " + handshake_.refusal());
    }

    // A handshake message always fits a fresh socket's buffer.
    bool send_output() {
        const auto out = handshake_.take_output();
        if (out.empty()) return true;
        const ssize_t n = ::send(fd_.get(), out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n == static_cast<ssize_t>(out.size())) return true;
        fail("the connection to " + address_.text() + " broke during the handshake");
        return false;
    }

    void connect_failed(int error) {
        result_.connection_refused = error == ECONNREFUSED;
        fail("cannot connect to " + address_.text() + ": " + std::strerror(error));
    }

    // The progress reveals the error: the network, another process there, or a peer that waits for
    // others.
    std::string no_answer() const {
        const std::string who = address_.text();
        if (!connected_) return "cannot connect to " + who + ": no answer";
        if (!handshake_.met()) return who + " accepted the connection, but sends nothing";
        return who + " is there, but did not accept the connection";
    }

    void fail(std::string why) {
        result_.error = std::move(why);
        finish(Fd());
    }

    void finish(Fd keep) {
        if (!done_) return;
        if (timer_ != 0) runtime_.control.cancel(timer_);
        const int fd = keep ? keep.get() : fd_.get();
        if (fd >= 0) runtime_.control.remove(fd);
        fd_.reset();
        result_.fd = std::move(keep);
        const auto done = std::exchange(done_, nullptr);
        done(std::move(result_));
    }

    Runtime& runtime_;
    const Address address_;
    const uint32_t segment_bytes_;
    DiallerHandshake handshake_;
    std::function<void(DialResult)> done_;
    Fd fd_;
    Reactor::Watch watch_;
    bool connected_ = false;
    bool limit_is_short_ = false;
    uint64_t timer_ = 0;
    DialResult result_;
};

}  // namespace

void dial(Runtime& runtime, const Address& address, Hello hello, int64_t limit_ns,
          std::function<void(DialResult)> done, uint32_t segment_bytes) {
    std::make_shared<Dialling>(runtime, address, std::move(hello), std::move(done), segment_bytes)
        ->start(limit_ns);
}

}  // namespace pipemorph
