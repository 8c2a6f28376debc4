// The control connection of a link: frames in and out.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

uint32_t Link::control_epoch() const {
    const Lock lock(mu_);
    return control_epoch_;
}

uint64_t Link::control_received() const {
    const Lock lock(mu_);
    return core_.stream().last_received();
}

void Link::attach_control(Fd fd, const ConnectionKeys& keys, uint32_t epoch,
                          uint64_t peer_received) {
    auto connection = std::make_shared<Connection>(std::move(fd), keys);
    set_unacked_limit(connection->fd, runtime_->peer_deadline_ns);
    std::shared_ptr<Connection> before;
    bool agreed = true;
    {
        const Lock lock(mu_);
        agreed = core_.stream().resume(peer_received);
        if (over()) {
            if (agreed) send_last_words(*connection);
            return;
        }
        before = std::exchange(control_, connection);
        control_epoch_ = epoch;
        const int64_t now = steady_ns();
        peer_.connected(now);
        if (state_ != State::connecting) {
            state_ = State::up;
            ++reconnects_;
            send_confirm();
            send_ping(now);
        }
    }
    if (before && before->fd) {
        runtime_->control.remove(before->fd.get());
        const Lock lock(mu_);
        before->fd.reset();
    }
    if (!agreed) {
        die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) +
            " resumed from where it cannot be");
        return;
    }
    try {
        connection->watch = runtime_->control.add(
            connection->fd.get(), EPOLLIN, [weak = weak_from_this(), connection](uint32_t events) {
                if (const auto self = weak.lock()) self->on_control(connection, events);
            });
    } catch (const EngineError& e) {
        die(describe() + " is dead: " + e.what());
        return;
    }
    const Lock lock(mu_);
    flush();
    changed();
}

// It ended while this connection was being made, so its goodbye has not been said over any. A peer
// that saw nothing but the end of the connection would wait for another.
void Link::send_last_words(Connection& c) {
    constexpr size_t kEnough = size_t{16} << 10;
    core_.stream().write(c.out, kEnough, &c.says);
    // A fresh socket has room for it. Where it is broken there is nobody to be told.
    [[maybe_unused]] const ssize_t n =
        ::send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Link::confirm() {
    {
        const Lock lock(mu_);
        if (state_ != State::connecting) return;
        state_ = State::up;
        core_.start(steady_ns());
        if (control_) {
            send_confirm();
            send_ping(steady_ns());
        }
        flush();
        changed();
    }
    if (identity_.dials) or_die_without_lock([this] { dial_paths(); });
}

void Link::send_confirm() {
    if (identity_.dials)
        append_frame(control_->out, encode_frame(ConfirmFrame{terms_.transport}), 0, 0,
                     &control_->says);
}

// Also the first sign of life on a new connection.
void Link::send_ping(int64_t now) {
    peer_.pinged(now);
    append_frame(control_->out, encode_frame(PingFrame{now, wall_ns()}), 0,
                 core_.stream().last_received(), &control_->says);
}

void Link::send_frame(const Frame& frame) {
    core_.send(frame);
    act();
}

void Link::flush() noexcept {
    flush_due_ = false;
    if (doom_.empty()) or_die([this] { write_frames(); });
}

void Link::write_frames() {
    constexpr size_t kBatch = size_t{256} << 10;
    core_.collect();
    if (!control_ || !control_->fd || state_ == State::connecting) return;
    Connection& c = *control_;
    for (;;) {
        if (c.out_done == c.out.size()) {
            c.out.clear();
            c.out_done = 0;
            core_.stream().write(c.out, kBatch, &c.says);
            if (c.out.empty()) return;
        }
        const ssize_t n = ::send(c.fd.get(), c.out.data() + c.out_done, c.out.size() - c.out_done,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            // An error is the reader's to notice: it gets an event for it.
            if (errno == EAGAIN || errno == EINTR) watch_write();
            return;
        }
        c.out_done += static_cast<size_t>(n);
    }
}

void Link::watch_write() {
    if (std::exchange(control_->watching_write, true)) return;
    runtime_->control.post([self = shared_from_this(), connection = control_] {
        if (connection->fd) self->runtime_->control.modify(connection->watch, EPOLLIN | EPOLLOUT);
    });
}

void Link::on_control(const std::shared_ptr<Connection>& connection, uint32_t events) {
    if (!connection->fd) return;
    try {
        if (events & EPOLLOUT) {
            const Lock lock(mu_);
            connection->watching_write = false;
            runtime_->control.modify(connection->watch, EPOLLIN);
            flush();
        }
        if (events & ~uint32_t{EPOLLOUT}) read_control(connection);
    } catch (const std::exception& e) {  // out of memory, most likely: this link only
        die(describe() + " is dead: its control connection failed: " + e.what());
    }
}

bool Link::read_control(const std::shared_ptr<Connection>& connection) {
    uint8_t buffer[65536];
    const ssize_t n = ::recv(connection->fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) {
        control_lost(connection, n == 0 ? "rank " + std::to_string(identity_.peer_rank) +
                                              " closed the connection"
                                        : std::string("connection broke: ") + std::strerror(errno));
        return false;
    }
    auto& in = connection->in;
    in.insert(in.end(), buffer, buffer + n);
    size_t at = 0;
    const char* trouble = nullptr;
    while (in.size() - at >= kFrameHeaderSize) {
        const Bytes rest = Bytes(in).subspan(at);
        const auto header = decode_frame_header(rest.first(kFrameHeaderSize));
        const size_t size = kFrameHeaderSize + (header ? header->body_bytes : 0);
        if (header && rest.size() < size + kSealSize) break;
        // Nobody knows yet who says it, so the connection is all that it can cost.
        if (!header || !connection->hears.fits(rest.first(size), rest.subspan(size, kSealSize))) {
            refuse_frame(connection);
            return false;
        }
        auto frame = decode_frame(header->type, rest.first(size).subspan(kFrameHeaderSize));
        at += size + kSealSize;
        if (!frame) {
            trouble = "a malformed frame";
            break;
        }
        bool deliver = true;
        {
            const Lock lock(mu_);
            if (control_ != connection) return false;  // superseded or over
            const int64_t now = steady_ns();
            core_.heard(now);
            if (!core_.stream().acknowledged(header->acknowledged))
                trouble = "an impossible counter";
            if (header->sequence != 0) {
                const auto verdict = core_.stream().received(header->sequence);
                deliver = verdict == ReliableStream::Verdict::deliver;
                if (verdict == ReliableStream::Verdict::gap) trouble = "a gap in the frames";
            }
            peer_.heard(header->sequence != 0 && deliver && trouble == nullptr, now);
        }
        if (trouble != nullptr) break;
        if (deliver) handle(std::move(*frame));
    }
    in.erase(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(at));
    if (trouble != nullptr) {
        protocol_error(std::string(trouble) + " on the control connection");
        return false;
    }
    return true;
}

void Link::refuse_frame(const std::shared_ptr<Connection>& connection) {
    {
        const Lock lock(mu_);
        ++frames_refused_;
    }
    control_lost(connection, "a frame on the control connection from rank " +
                                 std::to_string(identity_.peer_rank) +
                                 " was altered or added on the way: its seal is wrong");
}

void Link::handle(Frame frame) {
    if (LinkCore::handles(frame)) {
        std::string trouble;
        {
            const Lock lock(mu_);
            if (over()) return;
            trouble = core_.handle(frame, wall_ns(), steady_ns());
            act_for_reader();
        }
        if (!trouble.empty()) protocol_error(trouble);
    } else if (const auto* f = std::get_if<MappedFrame>(&frame)) {
        if (!f->error.empty()) {
            die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) +
                " cannot map shared memory: " + f->error);
            return;
        }
        const Lock lock(mu_);
        core_.mapped(f->segment);
        act();
    } else if (const auto* f = std::get_if<PingFrame>(&frame)) {
        const int64_t now = wall_ns();
        const Lock lock(mu_);
        if (!control_) return;
        append_frame(control_->out,
                     encode_frame(PongFrame{f->sent_steady_ns, f->sent_wall_ns, now, wall_ns()}), 0,
                     core_.stream().last_received(), &control_->says);
        flush();
    } else if (const auto* f = std::get_if<PongFrame>(&frame)) {
        // In this order: held up in between, the echo counts as a slow one, not as a wrong clock.
        const int64_t now_wall = wall_ns();
        const int64_t now_steady = steady_ns();
        const Lock lock(mu_);
        const auto echo = echo_of(*f, now_wall, now_steady);
        if (!echo) return;
        echo_.add(echo->rtt_ns, echo->peer_minus_ours_ns);
        core_.echoed(echo->rtt_ns, now_steady);
    } else if (const auto* f = std::get_if<ByeFrame>(&frame)) {
        {
            const Lock lock(mu_);
            peer_left_ = true;
        }
        const std::string what = f->died             ? " gave it up: " + f->reason
                                 : f->reason.empty() ? " closed it"
                                                     : " closed it with " + f->reason;
        die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) + what);
    } else if (const auto* f = std::get_if<ConfirmFrame>(&frame)) {
        confirmed(f->transport);
    } else if (const auto* f = std::get_if<OfferFrame>(&frame)) {
        take_offer(*f);
    } else if (const auto* f = std::get_if<AnswerFrame>(&frame)) {
        take_answer(*f);
    }
}

void Link::confirmed(Transport transport) {
    {
        const Lock lock(mu_);
        if (identity_.dials || state_ != State::connecting) return;
    }
    if (transport != this->transport()) {
        // The dialler could not reach our shared memory after all (another network namespace).
        const bool offered =
            transport == Transport::tcp || (transport == Transport::rdma && !terms_.rails.empty());
        const bool agreed = terms_.transport == Transport::shm &&
                            runtime_->config.transport != Transport::shm && offered;
        if (!agreed) {
            protocol_error(std::string("it chose ") + name_of(transport) + " where " +
                           name_of(terms_.transport) + " was agreed");
            return;
        }
        const Lock lock(mu_);
        terms_.transport = transport;
        make_paths();
    }
    confirm();
    if (on_settled) on_settled({});
}

}  // namespace pipemorph
