#include "engine/link_control.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

LinkControl::LinkControl(Link& link)
    : link_(link),
      core_(link.core_),
      runtime_(*link.runtime_),
      peer_(runtime_.peer_deadline_ns, steady_ns()) {}

Hello LinkControl::hello(Purpose purpose) const {
    Hello h;
    h.purpose = purpose;
    h.job = runtime_.config.job;
    h.from_rank = link_.identity_.rank;
    h.to_rank = link_.identity_.peer_rank;
    h.link = link_.identity_.link;
    h.session = link_.identity_.session;
    h.transport = link_.terms_.transport;
    h.listen_port = runtime_.listen_port;
    return h;
}

uint32_t LinkControl::epoch() const {
    const Link::Lock lock(link_.mu_);
    return epoch_;
}

uint64_t LinkControl::received() const {
    const Link::Lock lock(link_.mu_);
    return core_.stream().last_received();
}

void LinkControl::attach(Fd fd, const ConnectionKeys& keys, uint32_t epoch,
                         uint64_t peer_received) {
    auto connection = std::make_shared<Connection>(std::move(fd), keys);
    set_unacked_limit(connection->fd, runtime_.peer_deadline_ns);
    std::shared_ptr<Connection> before;
    bool agreed = true;
    {
        const Link::Lock lock(link_.mu_);
        agreed = core_.stream().resume(peer_received);
        if (link_.over()) {
            if (agreed) send_final_frames(*connection);
            return;
        }
        before = std::exchange(connection_, connection);
        epoch_ = epoch;
        const int64_t now = steady_ns();
        peer_.connected(now);
        if (link_.state_ != Link::State::connecting) {
            link_.state_ = Link::State::up;
            ++reconnects_;
            send_confirm();
            send_ping(now);
        }
    }
    if (before && before->fd) {
        runtime_.control.remove(before->fd.get());
        const Link::Lock lock(link_.mu_);
        before->fd.reset();
    }
    if (!agreed) {
        link_.die(link_.describe() + " is dead: rank " + std::to_string(link_.identity_.peer_rank) +
                  " resumed from an impossible position");
        return;
    }
    try {
        connection->watch = runtime_.control.add(
            connection->fd.get(), EPOLLIN,
            [this, weak = link_.weak_from_this(), connection](uint32_t events) {
                if (const auto self = weak.lock()) on_event(connection, events);
            });
    } catch (const EngineError& e) {
        link_.die(link_.describe() + " is dead: " + e.what());
        return;
    }
    const Link::Lock lock(link_.mu_);
    flush();
    link_.changed();
}

// Sends the goodbye of a link that ended while this connection was being made. Without it, the peer
// would wait for another connection.
void LinkControl::send_final_frames(Connection& c) {
    constexpr size_t kEnough = size_t{16} << 10;
    core_.stream().write(c.out, kEnough, &c.outgoing_mac);
    // A new socket has room for it. On a broken one the goodbye is lost.
    [[maybe_unused]] const ssize_t n =
        ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void LinkControl::begin() {
    if (connection_) {
        send_confirm();
        send_ping(steady_ns());
    }
    flush();
}

void LinkControl::send_confirm() {
    if (link_.identity_.dials)
        append_frame(connection_->out, encode_frame(ConfirmFrame{link_.terms_.transport}), 0, 0,
                     &connection_->outgoing_mac);
}

// Sends a ping, also as the first frame of a new connection.
void LinkControl::send_ping(int64_t now) {
    peer_.pinged(now);
    append_frame(connection_->out, encode_frame(PingFrame{now, wall_ns()}), 0,
                 core_.stream().last_received(), &connection_->outgoing_mac);
}

void LinkControl::flush() noexcept {
    flush_due_ = false;
    if (link_.fatal_error_.empty()) link_.or_die([this] { write_frames(); });
}

void LinkControl::write_frames() {
    constexpr size_t kBatch = size_t{256} << 10;
    core_.collect();
    if (!connection_ || !connection_->fd || link_.state_ == Link::State::connecting) return;
    Connection& c = *connection_;
    for (;;) {
        if (c.out_done == c.out.size()) {
            c.out.clear();
            c.out_done = 0;
            core_.stream().write(c.out, kBatch, &c.outgoing_mac);
            if (c.out.empty()) return;
        }
        const ssize_t n = ::send(c.fd.get(), c.out.data() + c.out_done, c.out.size() - c.out_done,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            // The reader gets an event for an error.
            if (errno == EAGAIN || errno == EINTR) watch_write();
            return;
        }
        c.out_done += static_cast<size_t>(n);
    }
}

void LinkControl::send_frame(const Frame& frame) {
    core_.send(frame);
    link_.run_actions();
}

void LinkControl::start_to_close() {
    if (!connection_) return;
    runtime_.control.post([this, self = link_.shared_from_this(), connection = connection_] {
        if (!connection->fd) return;
        runtime_.control.remove(connection->fd.get());
        const Link::Lock lock(link_.mu_);
        connection->fd.reset();
    });
}

void LinkControl::count(LinkStats& s) const {
    s.reconnects += reconnects_;
    s.frames_refused = frames_refused_;
    if (const auto echo = echo_.summary()) {
        s.rtt_min = to_seconds(echo->min_ns);
        s.rtt_mean = to_seconds(echo->mean_ns);
        s.rtt_p99 = to_seconds(echo->p99_ns);
    }
    if (const auto offset = echo_.clock_offset_ns()) s.clock_offset = to_seconds(*offset);
}

void LinkControl::watch_write() {
    if (std::exchange(connection_->watching_write, true)) return;
    runtime_.control.post([this, self = link_.shared_from_this(), connection = connection_] {
        if (connection->fd) runtime_.control.modify(connection->watch, EPOLLIN | EPOLLOUT);
    });
}

void LinkControl::on_event(const std::shared_ptr<Connection>& connection, uint32_t events) {
    if (!connection->fd) return;
    try {
        if (events & EPOLLOUT) {
            const Link::Lock lock(link_.mu_);
            connection->watching_write = false;
            runtime_.control.modify(connection->watch, EPOLLIN);
            flush();
        }
        if (events & ~uint32_t{EPOLLOUT}) read(connection);
    } catch (const std::exception& e) {  // out of memory, most likely: it ends this link only
        link_.die(link_.describe() + " is dead: its control connection failed: " + e.what());
    }
}

bool LinkControl::read(const std::shared_ptr<Connection>& connection) {
    uint8_t buffer[65536];
    const ssize_t n = ::recv(connection->fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) {
        lost(connection,
             n == 0 ? "rank " + std::to_string(link_.identity_.peer_rank) + " closed the connection"
                    : std::string("connection broke: ") + std::strerror(errno));
        return false;
    }
    auto& in = connection->in;
    in.insert(in.end(), buffer, buffer + n);
    size_t at = 0;
    const char* error = nullptr;
    while (in.size() - at >= kFrameHeaderSize) {
        const Bytes rest = Bytes(in).subspan(at);
        const auto header = decode_frame_header(rest.first(kFrameHeaderSize));
        const size_t size = kFrameHeaderSize + (header ? header->body_bytes : 0);
        if (header && rest.size() < size + kMacSize) break;
        // An unauthenticated frame may end the connection, but not the link.
        if (!header ||
            !connection->incoming_mac.fits(rest.first(size), rest.subspan(size, kMacSize))) {
            refuse_frame(connection);
            return false;
        }
        auto frame = decode_frame(header->type, rest.first(size).subspan(kFrameHeaderSize));
        at += size + kMacSize;
        if (!frame) {
            error = "a malformed frame";
            break;
        }
        bool deliver = true;
        {
            const Link::Lock lock(link_.mu_);
            if (connection_ != connection) return false;  // superseded or ended
            const int64_t now = steady_ns();
            core_.frame_received(now);
            if (!core_.stream().acknowledged(header->acknowledged)) error = "an impossible counter";
            if (header->sequence != 0) {
                const auto verdict = core_.stream().received(header->sequence);
                deliver = verdict == ReliableStream::Verdict::deliver;
                if (verdict == ReliableStream::Verdict::gap) error = "a gap in the frames";
            }
            peer_.frame_received(header->sequence != 0 && deliver && error == nullptr, now);
        }
        if (error != nullptr) break;
        if (deliver) handle(std::move(*frame));
    }
    in.erase(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(at));
    if (error != nullptr) {
        link_.paths_.protocol_error(std::string(error) + " on the control connection");
        return false;
    }
    return true;
}

void LinkControl::refuse_frame(const std::shared_ptr<Connection>& connection) {
    {
        const Link::Lock lock(link_.mu_);
        ++frames_refused_;
    }
    lost(connection, "a frame on the control connection from rank " +
                         std::to_string(link_.identity_.peer_rank) +
                         " was altered or added on the way: its MAC is wrong");
}

void LinkControl::handle(Frame frame) {
    if (LinkCore::handles(frame)) {
        std::string error;
        {
            const Link::Lock lock(link_.mu_);
            if (link_.over()) return;
            error = core_.handle(frame, wall_ns(), steady_ns());
            link_.run_actions_for_reader();
        }
        if (!error.empty()) link_.paths_.protocol_error(error);
    } else if (const auto* f = std::get_if<MappedFrame>(&frame)) {
        if (!f->error.empty()) {
            link_.die(link_.describe() + " is dead: rank " +
                      std::to_string(link_.identity_.peer_rank) +
                      " cannot map shared memory: " + f->error);
            return;
        }
        const Link::Lock lock(link_.mu_);
        core_.mapped(f->segment);
        link_.run_actions();
    } else if (const auto* f = std::get_if<PingFrame>(&frame)) {
        const int64_t now = wall_ns();
        const Link::Lock lock(link_.mu_);
        if (!connection_) return;
        append_frame(connection_->out,
                     encode_frame(PongFrame{f->sent_steady_ns, f->sent_wall_ns, now, wall_ns()}), 0,
                     core_.stream().last_received(), &connection_->outgoing_mac);
        flush();
    } else if (const auto* f = std::get_if<PongFrame>(&frame)) {
        // The order matters: after a delay in between, the echo is slow, and its clock is right.
        const int64_t now_wall = wall_ns();
        const int64_t now_steady = steady_ns();
        const Link::Lock lock(link_.mu_);
        const auto echo = echo_of(*f, now_wall, now_steady);
        if (!echo) return;
        echo_.add(echo->rtt_ns, echo->peer_minus_ours_ns);
        core_.echoed(echo->rtt_ns, now_steady);
    } else if (const auto* f = std::get_if<ByeFrame>(&frame)) {
        std::string here;
        {
            const Link::Lock lock(link_.mu_);
            link_.peer_said_goodbye_ = true;
            // The peer's reason lacks the errors of this end, such as wrong checksums. Each path
            // may be lost once by the link's end itself.
            if (f->died && core_.paths().times_lost() > core_.paths().size())
                here = "; at this end " + core_.path_errors(steady_ns());
        }
        const std::string what = f->died             ? " gave it up: " + f->reason
                                 : f->reason.empty() ? " closed it"
                                                     : " closed it with " + f->reason;
        link_.die(link_.describe() + " is dead: rank " + std::to_string(link_.identity_.peer_rank) +
                  what + here);
    } else if (const auto* f = std::get_if<ConfirmFrame>(&frame)) {
        confirmed(f->transport);
    } else if (const auto* f = std::get_if<OfferFrame>(&frame)) {
        link_.paths_.take_offer(*f);
    } else if (const auto* f = std::get_if<AnswerFrame>(&frame)) {
        link_.paths_.take_answer(*f);
    }
}

void LinkControl::confirmed(Transport transport) {
    {
        const Link::Lock lock(link_.mu_);
        if (link_.identity_.dials || link_.state_ != Link::State::connecting) return;
    }
    if (transport != link_.transport()) {
        // The dialler cannot reach our shared memory (another network namespace).
        const bool offered = transport == Transport::tcp ||
                             (transport == Transport::rdma && !link_.terms_.rails.empty());
        const bool agreed = link_.terms_.transport == Transport::shm &&
                            runtime_.config.transport != Transport::shm && offered;
        if (!agreed) {
            link_.paths_.protocol_error(std::string("it chose ") + name_of(transport) + " where " +
                                        name_of(link_.terms_.transport) + " was agreed");
            return;
        }
        const Link::Lock lock(link_.mu_);
        link_.terms_.transport = transport;
        link_.paths_.assign();
    }
    link_.confirm();
    if (link_.on_settled) link_.on_settled({});
}

void LinkControl::sever() {
    runtime_.control.post([this, self = link_.shared_from_this()] {
        std::shared_ptr<Connection> connection;
        {
            const Link::Lock lock(link_.mu_);
            connection = connection_;
        }
        if (!connection) return;
        runtime_.control.remove(connection->fd.get());
        {
            const Link::Lock lock(link_.mu_);
            reset_connection(connection->fd);
        }
        lost(connection, "severed on request");
    });
}

void LinkControl::lost(const std::shared_ptr<Connection>& connection, const std::string& why) {
    if (connection->fd) runtime_.control.remove(connection->fd.get());
    bool at_once = false;
    {
        const Link::Lock lock(link_.mu_);
        connection->fd.reset();
        if (connection_ != connection) return;
        connection_.reset();
        link_.last_error_ = why;
        if (link_.state_ == Link::State::up) link_.state_ = Link::State::reconnecting;
        at_once = peer_.lost(steady_ns());
        link_.changed();
        if (!is_peer_missing()) return;
    }
    if (at_once) reconnect_peer();
}

bool LinkControl::is_peer_missing() const {
    return !connection_ && (link_.state_ == Link::State::reconnecting ||
                            (link_.state_ == Link::State::connecting && !link_.identity_.dials));
}

void LinkControl::reconnect_peer() {
    try {
        if (link_.identity_.dials)
            redial();
        else
            probe_peer();
    } catch (const std::exception& e) {  // no memory or descriptors
        const Link::Lock lock(link_.mu_);
        keep_words(link_.last_error_, e.what());
        peer_.reconnect_not_tried(steady_ns());
    }
}

// Wrong MACs end connections, so the last error may be such an end.
std::string LinkControl::refused_text() const {
    if (frames_refused_ == 0) return {};
    return "; refused for a wrong MAC so far: " + std::to_string(frames_refused_) +
           (frames_refused_ == 1 ? " frame" : " frames");
}

void LinkControl::redial() {
    Hello h;
    Address address;
    {
        const Link::Lock lock(link_.mu_);
        if (link_.state_ != Link::State::reconnecting || link_.goodbye_sent_ ||
            !peer_.begin_reconnect())
            return;
        h = hello(Purpose::control);
        h.resume = true;
        h.epoch = epoch_ + 1;
        h.received = core_.stream().last_received();
        h.sockets = static_cast<uint16_t>(link_.terms_.sockets);
        address = link_.terms_.address;
    }
    const uint32_t epoch = h.epoch;
    const int64_t limit = std::min<int64_t>(runtime_.peer_deadline_ns / 2, 2 * kSecond);
    pipemorph::dial(runtime_, address, std::move(h), limit,
                    [this, weak = link_.weak_from_this(), epoch](DialResult r) {
                        const auto self = weak.lock();
                        if (!self) return;
                        {
                            const Link::Lock lock(link_.mu_);
                            if (r.fd) {
                                peer_.reconnected();
                            } else {
                                link_.last_error_ = r.error;
                                // The peer may have accepted this epoch before the break.
                                epoch_ = std::max(epoch_, epoch);
                                peer_.dial_unanswered(!r.connection_refused, steady_ns());
                            }
                        }
                        if (r.fd)
                            attach(std::move(r.fd), r.keys, epoch, r.reply.received);
                        else if (r.refused && r.proved)
                            link_.die(link_.describe() + " is dead: " + r.error);
                    });
}

// The acceptor cannot dial the link, but it can probe the peer's address: a dead process refuses, a
// dead network does not answer.
void LinkControl::probe_peer() {
    Address address;
    {
        const Link::Lock lock(link_.mu_);
        if (!is_peer_missing() || link_.goodbye_sent_ || !peer_.begin_reconnect()) return;
        address = link_.terms_.address;
    }
    auto fd = std::make_shared<Fd>(start_connect(address));
    const auto done = [this, weak = link_.weak_from_this(), fd](int error) {
        const auto self = weak.lock();
        if (!self) return;
        const Link::Lock lock(link_.mu_);
        peer_.probe_finished(error != ECONNREFUSED, steady_ns());
    };
    if (!*fd) {
        done(errno);
        return;
    }
    Reactor& reactor = runtime_.control;
    const auto timer = std::make_shared<uint64_t>(0);
    const auto end = [&reactor, fd, done, timer](int error) {
        if (!*fd) return;
        reactor.cancel(*timer);
        reactor.remove(fd->get());
        fd->reset();
        done(error);
    };
    *timer = reactor.after(runtime_.peer_deadline_ns / 5, [end] { end(ETIMEDOUT); });
    reactor.add(fd->get(), EPOLLOUT, [end, fd](uint32_t) { end(connect_error(*fd)); });
}

void LinkControl::check_health(int64_t now) {
    std::shared_ptr<Connection> silent;
    std::string dead;
    bool reconnect = false;
    {
        const Link::Lock lock(link_.mu_);
        if (const int64_t paused = peer_.measure_pause(now)) core_.discount_pause(paused, now);
        if (!link_.fatal_error_.empty()) {
            dead = "an operation failed half-way: " + link_.fatal_error_;
        } else if (link_.state_ == Link::State::up && connection_) {
            if (peer_.is_silent(now)) {
                silent = connection_;
            } else if (peer_.pings(now)) {
                send_ping(now);
                flush();
            }
        } else if (is_peer_missing() && !link_.goodbye_sent_) {
            const std::string peer = "rank " + std::to_string(link_.identity_.peer_rank);
            const bool missed = peer_.is_unreachable_too_long(now);
            if (peer_.is_gone(now))
                dead = peer + " is gone: no process listens at " + link_.terms_.address.text() +
                       " any more";
            else if (missed && link_.state_ == Link::State::connecting) {
                dead = "it never came up: " + link_.last_error_ + refused_text();
                link_.never_confirmed_ = true;
            } else if (missed)
                dead = "no control connection to " + peer + " (" +
                       link_.terms_.address.text(false) + ") for " +
                       format_seconds(to_seconds(peer_.unreachable_ns(now))) +
                       " (last: " + link_.last_error_ + refused_text() + ")";
            reconnect = peer_.is_reconnect_due(now);
        }
    }
    if (silent)
        lost(silent,
             "no frame arrived for " + format_seconds(to_seconds(runtime_.peer_deadline_ns / 2)));
    if (!dead.empty()) {
        link_.die(link_.describe() + " is dead: " + dead);
    } else if (reconnect) {
        reconnect_peer();
    }
}

}  // namespace pipemorph
