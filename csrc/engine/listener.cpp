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

constexpr int64_t kStrangerLimit = 2 * kSecond;
// A dialler with the right secret may wait this long for accept() to be called.
constexpr int64_t kWaitingLimit = 60 * kSecond;
constexpr size_t kMaxStrangers = 256;
// One address cannot take the places of all others.
constexpr size_t kMaxFromOneAddress = 128;
constexpr size_t kMaxWaiting = 256;
// A stranger that has had this long is the first to go when there are too many. A real dialler
// needs two round trips.
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

Greeting::Greeting(Listener& listener, Fd fd, const Digest& key)
    : listener_(listener),
      fd_(std::move(fd)),
      from_(peer_address(fd_)),
      source_(from_.text(false)),
      handshake_(key),
      since_ns_(steady_ns()) {}

void Greeting::start() {
    auto self = shared_from_this();
    Reactor& reactor = listener_.runtime_.control;
    timer_ = reactor.after(kStrangerLimit, [self] {
        self->timer_ = 0;
        self->end("said nothing for too long");
    });
    try {
        reactor.add(fd_.get(), EPOLLIN, [self](uint32_t) { self->on_event(); });
    } catch (const EngineError& e) {
        end(e.what());
    }
}

void Greeting::on_event() {
    uint8_t buffer[2048];
    // A waiting dialler has nothing to say: only its going away is of interest.
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
    listener_.strangers_.erase(this);
    if (listener_.waiting_.size() >= kMaxWaiting) {
        refuse(Verdict::not_yet, "too many connections wait to be accepted");
        return;
    }
    listener_.waiting_[this] = self;
    reactor.cancel(timer_);
    timer_ = reactor.after(kWaitingLimit, [self] {
        self->timer_ = 0;
        self->refuse(Verdict::not_yet, "nobody accepted the connection");
    });
    listener_.decide_(self);
}

bool Greeting::send_output() {
    const auto out = handshake_.take_output();
    if (out.empty()) return true;
    const ssize_t n = ::send(fd_.get(), out.data(), out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n == static_cast<ssize_t>(out.size())) return true;
    end("");
    return false;
}

// Before the peer hears of it: whoever sees its error finds the reason here.
void Greeting::log(const std::string& why) {
    listener_.refusals_.add(source_ + ": " + why);
}

void Greeting::end(const std::string& why) {
    if (!fd_) return;
    if (!why.empty()) log(why);
    auto self = shared_from_this();
    release();
    fd_.reset();
}

void Greeting::release() {
    Reactor& reactor = listener_.runtime_.control;
    if (timer_ != 0) reactor.cancel(std::exchange(timer_, 0));
    reactor.remove(fd_.get());
    listener_.strangers_.erase(this);
    listener_.waiting_.erase(this);
}

Fd Greeting::accept(const HelloReply& reply) {
    auto self = shared_from_this();
    if (!fd_) return Fd();
    handshake_.accept(reply);
    if (!send_output()) return Fd();
    release();
    return std::move(fd_);
}

void Greeting::refuse(Verdict verdict, const std::string& reason) {
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
    for (auto* group : {&strangers_, &waiting_}) {
        const auto all = *group;
        for (const auto& [_, greeting] : all) greeting->end("");
    }
}

// Whether one more may come from there: in another's place if need be.
bool Listener::make_room(const std::string& source) {
    std::shared_ptr<Greeting> oldest;
    std::shared_ptr<Greeting> oldest_there;
    size_t there = 0;
    const auto keep_older = [](auto& kept, const auto& other) {
        if (!kept || other->since_ns_ < kept->since_ns_) kept = other;
    };
    for (const auto& [_, greeting] : strangers_) {
        keep_older(oldest, greeting);
        if (greeting->source_ != source) continue;
        ++there;
        keep_older(oldest_there, greeting);
    }
    if (there >= kMaxFromOneAddress)
        oldest = oldest_there;
    else if (strangers_.size() < kMaxStrangers)
        return true;
    if (steady_ns() - oldest->since_ns_ <= kPatience) return false;
    oldest->end("made room for others while too many strangers were connected");
    return true;
}

void Listener::on_connections() {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
        Fd fd = Fd::made_by([this] {
            return ::accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        });
        if (!fd) {
            if (errno != EMFILE && errno != ENFILE) return;
            // Out of descriptors: look away for a moment rather than spin on the event.
            refusals_.add("out of file descriptors");
            runtime_.control.remove(fd_.get());
            runtime_.control.after(100 * kMillisecond, [this] {
                if (fd_) start();
            });
            return;
        }
        const Address from = peer_address(fd);
        if (const std::string source = from.text(false); !make_room(source)) {
            refusals_.add(source + ": too many strangers at once");
            continue;
        }
        if (from.family() != AF_UNIX) set_no_delay(fd);
        auto greeting = std::make_shared<Greeting>(*this, std::move(fd), runtime_.key);
        strangers_[greeting.get()] = greeting;
        greeting->start();
    }
}

}  // namespace pipemorph
