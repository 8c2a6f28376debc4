// A control connection that broke: dialling again, and telling a dead peer from a dead cable.
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

void Link::sever_control() {
    runtime_->control.post([self = shared_from_this()] {
        std::shared_ptr<Connection> connection;
        {
            const Lock lock(self->mu_);
            connection = self->control_;
        }
        if (!connection) return;
        self->runtime_->control.remove(connection->fd.get());
        {
            const Lock lock(self->mu_);
            reset_connection(connection->fd);
        }
        self->control_lost(connection, "severed on request");
    });
}

void Link::control_lost(const std::shared_ptr<Connection>& connection, const std::string& why) {
    if (connection->fd) runtime_->control.remove(connection->fd.get());
    bool at_once = false;
    {
        const Lock lock(mu_);
        connection->fd.reset();
        if (control_ != connection) return;
        control_.reset();
        last_trouble_ = why;
        if (state_ == State::up) state_ = State::reconnecting;
        const int64_t now = steady_ns();
        if (down_since_ns_ == 0) down_since_ns_ = now;
        next_redial_ns_ = 0;
        // A connection over which nothing new has come was none. Whoever lets handshakes and signs
        // of life through and then cuts gets neither dial after dial nor more time than the
        // deadline.
        at_once = connection->works;
        if (!at_once) back_off(now);
        changed();
        if (!without_control()) return;
    }
    if (at_once) seek_peer();
}

void Link::seek_peer() {
    try {
        if (identity_.dials)
            redial_control();
        else
            probe_peer();
    } catch (const std::exception& e) {  // no memory, or no more descriptors to be watched
        const Lock lock(mu_);
        redialling_ = false;
        keep_words(last_trouble_, e.what());
        back_off(steady_ns());
    }
}

// The end that meets a wrong seal ends the connection, so the last trouble may be just that end.
std::string Link::refused_text() const {
    if (frames_refused_ == 0) return {};
    return "; refused for a wrong seal so far: " + std::to_string(frames_refused_) +
           (frames_refused_ == 1 ? " frame" : " frames");
}

void Link::back_off(int64_t now) {
    constexpr int64_t kLeast = 20 * kMillisecond;
    const int64_t most =
        std::clamp(runtime_->peer_deadline_ns / 10, kLeast, int64_t{500} * kMillisecond);
    redial_backoff_ns_ = std::clamp(redial_backoff_ns_ * 2, kLeast, most);
    next_redial_ns_ = now + redial_backoff_ns_;
}

void Link::redial_control() {
    Hello h;
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::reconnecting || redialling_ || leaving_) return;
        redialling_ = true;
        h = hello(Purpose::control);
        h.resume = true;
        h.epoch = control_epoch_ + 1;
        h.received = core_.stream().last_received();
        h.sockets = static_cast<uint16_t>(terms_.sockets);
        address = terms_.address;
    }
    const uint32_t epoch = h.epoch;
    const int64_t limit = std::min<int64_t>(runtime_->peer_deadline_ns / 2, 2 * kSecond);
    dial(*runtime_, address, std::move(h), limit, [weak = weak_from_this(), epoch](DialResult r) {
        const auto self = weak.lock();
        if (!self) return;
        {
            const Lock lock(self->mu_);
            self->redialling_ = false;
            const int64_t now = steady_ns();
            if (!r.fd) {
                self->last_trouble_ = r.error;
                // The peer may have taken this epoch before the connection broke.
                self->control_epoch_ = std::max(self->control_epoch_, epoch);
                self->back_off(now);
                if (!r.nobody_there)
                    self->refused_since_ns_ = 0;
                else if (self->refused_since_ns_ == 0)
                    self->refused_since_ns_ = now;
            }
        }
        if (r.fd)
            self->attach_control(std::move(r.fd), r.keys, epoch, r.reply.received);
        else if (r.refused && r.proved)
            self->die(self->describe() + " is dead: " + r.error);
    });
}

// The acceptor cannot dial back in, but it can see whether anybody still listens over there: a
// process that is gone refuses, a network that is gone does not answer.
void Link::probe_peer() {
    Address address;
    {
        const Lock lock(mu_);
        if (!without_control() || redialling_ || leaving_) return;
        redialling_ = true;
        address = terms_.address;
    }
    auto fd = std::make_shared<Fd>(start_connect(address));
    const auto done = [weak = weak_from_this(), fd](int error) {
        const auto self = weak.lock();
        if (!self) return;
        const Lock lock(self->mu_);
        self->redialling_ = false;
        const int64_t now = steady_ns();
        self->next_redial_ns_ = now + self->runtime_->peer_deadline_ns / 40;
        if (error != ECONNREFUSED)
            self->refused_since_ns_ = 0;
        else if (self->refused_since_ns_ == 0)
            self->refused_since_ns_ = now;
    };
    if (!*fd) {
        done(errno);
        return;
    }
    Reactor& reactor = runtime_->control;
    const auto timer = std::make_shared<uint64_t>(0);
    const auto end = [&reactor, fd, done, timer](int error) {
        if (!*fd) return;
        reactor.cancel(*timer);
        reactor.remove(fd->get());
        fd->reset();
        done(error);
    };
    *timer = reactor.after(runtime_->peer_deadline_ns / 5, [end] { end(ETIMEDOUT); });
    reactor.add(fd->get(), EPOLLOUT, [end, fd](uint32_t) { end(connect_error(*fd)); });
}

// A process that was stopped (a job suspended, a machine paused) heard nobody, and nobody is to
// blame for that: the time does not count against the peer, which may have been stopped, too.
void Link::forgive_pause(int64_t now) {
    constexpr int64_t kNoPause = 250 * kMillisecond;  // a few ticks
    const int64_t passed = now - ticked_ns_;
    ticked_ns_ = now;
    if (passed <= std::max(runtime_->peer_deadline_ns / 4, kNoPause)) return;
    core_.forgive(passed, now);
    for (int64_t* since : {&heard_ns_, &down_since_ns_, &refused_since_ns_})
        if (*since != 0) *since = std::min(*since + passed, now);
}

void Link::tick() {
    or_die_without_lock([this] { look_after(steady_ns()); });
}

void Link::look_after(int64_t now) {
    const int64_t deadline = runtime_->peer_deadline_ns;
    std::shared_ptr<Connection> silent;
    std::string dead;
    bool reconnect = false;
    bool live = false;
    {
        const Lock lock(mu_);
        forgive_pause(now);
        if (!doom_.empty()) {
            dead = "what had to be done at once failed: " + doom_;
        } else if (state_ == State::up && control_) {
            live = true;
            core_.look_after_flow(now);
            act();
            if (now - heard_ns_ > deadline / 2) {
                silent = control_;
            } else if (now >= next_ping_ns_) {
                send_ping(now);
                flush();
            }
        } else if (without_control() && !leaving_) {
            const std::string peer = "rank " + std::to_string(identity_.peer_rank);
            // It was silent before it counted as down, so the whole silence counts.
            const int64_t since = std::min(down_since_ns_, heard_ns_ + deadline / 2);
            if (refused_since_ns_ != 0 && now - refused_since_ns_ > deadline * 2 / 5)
                dead = peer + " is gone: nobody listens at " + terms_.address.text() + " any more";
            else if (now - since > deadline && state_ == State::connecting) {
                dead = "it never came up: " + last_trouble_ + refused_text();
                never_came_ = true;
            } else if (now - since > deadline)
                dead = "no control connection to " + peer + " (" + terms_.address.text(false) +
                       ") for " + seconds_text(to_seconds(now - since)) +
                       " (last: " + last_trouble_ + refused_text() + ")";
            reconnect = now >= next_redial_ns_;
        }
    }
    if (silent)
        control_lost(silent, "nothing was heard for " + seconds_text(to_seconds(deadline / 2)));
    if (!dead.empty()) {
        die(describe() + " is dead: " + dead);
    } else if (reconnect) {
        seek_peer();
    }
    if (live) look_after_rails(now);
    if (live && identity_.dials) dial_paths();
}

}  // namespace pipemorph
