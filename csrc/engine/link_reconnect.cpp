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
        at_once = peer_.lost(steady_ns());
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
        keep_words(last_trouble_, e.what());
        peer_.not_sought(steady_ns());
    }
}

// The end that meets a wrong seal ends the connection, so the last trouble may be just that end.
std::string Link::refused_text() const {
    if (frames_refused_ == 0) return {};
    return "; refused for a wrong seal so far: " + std::to_string(frames_refused_) +
           (frames_refused_ == 1 ? " frame" : " frames");
}

void Link::redial_control() {
    Hello h;
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::reconnecting || leaving_ || !peer_.seek()) return;
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
            if (r.fd) {
                self->peer_.found();
            } else {
                self->last_trouble_ = r.error;
                // The peer may have taken this epoch before the connection broke.
                self->control_epoch_ = std::max(self->control_epoch_, epoch);
                self->peer_.not_reached(!r.nobody_there, steady_ns());
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
        if (!without_control() || leaving_ || !peer_.seek()) return;
        address = terms_.address;
    }
    auto fd = std::make_shared<Fd>(start_connect(address));
    const auto done = [weak = weak_from_this(), fd](int error) {
        const auto self = weak.lock();
        if (!self) return;
        const Lock lock(self->mu_);
        self->peer_.looked_up(error != ECONNREFUSED, steady_ns());
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

void Link::tick() {
    or_die_without_lock([this] { look_after(steady_ns()); });
}

void Link::look_after(int64_t now) {
    std::shared_ptr<Connection> silent;
    std::string dead;
    bool reconnect = false;
    bool live = false;
    {
        const Lock lock(mu_);
        if (const int64_t paused = peer_.look(now)) core_.forgive(paused, now);
        if (!doom_.empty()) {
            dead = "what had to be done at once failed: " + doom_;
        } else if (state_ == State::up && control_) {
            live = true;
            core_.look_after_flow(now);
            act();
            if (peer_.is_silent(now)) {
                silent = control_;
            } else if (peer_.pings(now)) {
                send_ping(now);
                flush();
            }
        } else if (without_control() && !leaving_) {
            const std::string peer = "rank " + std::to_string(identity_.peer_rank);
            const bool missed = peer_.is_missed_too_long(now);
            if (peer_.is_gone(now))
                dead = peer + " is gone: nobody listens at " + terms_.address.text() + " any more";
            else if (missed && state_ == State::connecting) {
                dead = "it never came up: " + last_trouble_ + refused_text();
                never_came_ = true;
            } else if (missed)
                dead = "no control connection to " + peer + " (" + terms_.address.text(false) +
                       ") for " + seconds_text(to_seconds(peer_.missed_ns(now))) +
                       " (last: " + last_trouble_ + refused_text() + ")";
            reconnect = peer_.seeks_now(now);
        }
    }
    if (silent)
        control_lost(silent, "nothing was heard for " +
                                 seconds_text(to_seconds(runtime_->peer_deadline_ns / 2)));
    if (!dead.empty()) {
        die(describe() + " is dead: " + dead);
    } else if (reconnect) {
        seek_peer();
    }
    if (live) look_after_rails(now);
    if (live && identity_.dials) dial_paths();
}

}  // namespace pipemorph
