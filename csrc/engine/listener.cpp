#include "engine/listener.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kHandshakeLimit = 2 * kSecond;
// A dialler with the right secret may wait this long for accept() to be called.
constexpr int64_t kWaitingLimit = 60 * kSecond;
constexpr size_t kMaxUnauthenticated = 256;
// Limit of one address, so that it cannot displace all others.
constexpr size_t kMaxFromOneAddress = 128;
constexpr size_t kMaxWaiting = 256;
// Age from which an unauthenticated peer is closed when there are too many. A real dialler needs
// two round trips.
constexpr int64_t kPatience = 250 * kMillisecond;
constexpr int kAcceptsPerTurn = 64;

}  // namespace

void RefusalLog::add(const std::string& reason) {
    const std::lock_guard lock(mu_);
    for (auto& [known, count] : reasons_) {
        if (known == reason) {
            ++count;
            return;
        }
    }
    if (reasons_.size() == kMaxReasons) {
        ++forgotten_;
        return;
    }
    reasons_.emplace_back(reason, 1);
}

std::vector<std::string> RefusalLog::list() const {
    const std::lock_guard lock(mu_);
    std::vector<std::string> out;
    for (const auto& [reason, count] : reasons_)
        out.push_back(count == 1 ? reason : reason + " (" + std::to_string(count) + " times)");
    if (forgotten_ > 0) out.push_back(std::to_string(forgotten_) + " more for other reasons");
    return out;
}

PendingConnection::PendingConnection(Listener& listener, Fd fd, const Digest& key)
    : listener_(listener),
      fd_(std::move(fd)),
      from_(peer_address(fd_)),
      source_(from_.text(false)),
      handshake_(key),
      since_ns_(steady_ns()) {}

void PendingConnection::start() {
    auto self = shared_from_this();
    Reactor& reactor = listener_.runtime_.control;
    timer_ = reactor.after(kHandshakeLimit, [self] {
        self->timer_ = 0;
        self->end("sent nothing for too long");
    });
    try {
        reactor.add(fd_.get(), EPOLLIN, [self](uint32_t) { self->on_event(); });
    } catch (const EngineError& e) {
        end(e.what());
    }
}

void PendingConnection::on_event() {
    uint8_t buffer[2048];
    // A waiting dialler sends nothing: only its end matters.
    const size_t want = waiting_ ? 1 : std::min(handshake_.wanted(), sizeof buffer);
    const ssize_t n = ::recv(fd_.get(), buffer, want, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || waiting_) {
        end("");
        return;
    }
    const bool fine = handshake_.feed({buffer, static_cast<size_t>(n)});
    if (!fine) log(handshake_.failure());
    if (!send_output()) return;
    if (!fine) {
        end("");
        return;
    }
    if (!handshake_.needs_decision()) return;

    Reactor& reactor = listener_.runtime_.control;
    auto self = shared_from_this();
    waiting_ = true;
    listener_.unauthenticated_peers_.erase(this);
    if (listener_.waiting_.size() >= kMaxWaiting) {
        refuse(Verdict::not_yet, "too many connections wait to be accepted");
        return;
    }
    listener_.waiting_[this] = self;
    reactor.cancel(timer_);
    timer_ = reactor.after(kWaitingLimit, [self] {
        self->timer_ = 0;
        self->refuse(Verdict::not_yet, "the connection was not accepted in time");
    });
    listener_.decide_(self);
}

bool PendingConnection::send_output() {
    const auto out = handshake_.take_output();
    if (out.empty()) return true;
    const ssize_t n = ::send(fd_.get(), out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == static_cast<ssize_t>(out.size())) return true;
    end("");
    return false;
}

// Logs a reason before the peer gets its error, so that the log has it by then.
void PendingConnection::log(const std::string& why) {
    listener_.refusals_.add(source_ + ": " + why);
}

void PendingConnection::end(const std::string& why) {
    if (!fd_) return;
    if (!why.empty()) log(why);
    auto self = shared_from_this();
    release();
    fd_.reset();
}

void PendingConnection::release() {
    Reactor& reactor = listener_.runtime_.control;
    if (timer_ != 0) reactor.cancel(std::exchange(timer_, 0));
    reactor.remove(fd_.get());
    listener_.unauthenticated_peers_.erase(this);
    listener_.waiting_.erase(this);
}

Fd PendingConnection::accept(const HelloReply& reply) {
    auto self = shared_from_this();
    if (!fd_) return Fd();
    handshake_.accept(reply);
    if (!send_output()) return Fd();
    release();
    return std::move(fd_);
}

void PendingConnection::refuse(Verdict verdict, const std::string& reason) {
    auto self = shared_from_this();
    if (!fd_) return;
    log(reason);
    handshake_.refuse(verdict, reason);
    if (send_output()) end("");
}

Listener::Listener(Runtime& runtime, RefusalLog& refusals, const Address& address, Decide decide)
    : runtime_(runtime), refusals_(refusals), fd_(listen_on(address)), decide_(std::move(decide)) {}

void Listener::start() {
    runtime_.control.add(fd_.get(), EPOLLIN, [this](uint32_t) { on_connections(); });
}

void Listener::stop() {
    if (!fd_) return;
    runtime_.control.remove(fd_.get());
    fd_.reset();
    for (auto* group : {&unauthenticated_peers_, &waiting_}) {
        const auto all = *group;
        for (const auto& [_, pending] : all) pending->end("");
    }
}

// True if one more connection from `source` may be accepted, if need be in place of another.
bool Listener::make_room(const std::string& source) {
    std::shared_ptr<PendingConnection> oldest;
    std::shared_ptr<PendingConnection> oldest_there;
    size_t there = 0;
    const auto select_older = [](auto& chosen, const auto& other) {
        if (!chosen || other->since_ns_ < chosen->since_ns_) chosen = other;
    };
    for (const auto& [_, pending] : unauthenticated_peers_) {
        select_older(oldest, pending);
        if (pending->source_ != source) continue;
        ++there;
        select_older(oldest_there, pending);
    }
    if (there >= kMaxFromOneAddress)
        oldest = oldest_there;
    else if (unauthenticated_peers_.size() < kMaxUnauthenticated)
        return true;
    if (steady_ns() - oldest->since_ns_ <= kPatience) return false;
    oldest->end("made room for others while there were too many unauthenticated connections");
    return true;
}

void Listener::on_connections() {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
        Fd fd = Fd::made_by([this] {
            return ::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        });
        if (!fd) {
            if (errno != EMFILE && errno != ENFILE) return;
            // Out of descriptors: a pause avoids spinning on the event.
            refusals_.add("out of file descriptors");
            runtime_.control.remove(fd_.get());
            runtime_.control.after(100 * kMillisecond, [this] {
                if (fd_) start();
            });
            return;
        }
        const Address from = peer_address(fd);
        if (const std::string source = from.text(false); !make_room(source)) {
            refusals_.add(source + ": too many unauthenticated connections at once");
            continue;
        }
        if (from.family() != AF_UNIX) set_no_delay(fd);
        auto pending = std::make_shared<PendingConnection>(*this, std::move(fd), runtime_.key);
        unauthenticated_peers_[pending.get()] = pending;
        pending->start();
    }
}

}  // namespace pipemorph
