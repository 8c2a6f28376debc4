#include "engine/link.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "os/clock.hpp"
#include "os/copy.hpp"
#include "path/shm_path.hpp"
#include "path/tcp_path.hpp"

namespace pipemorph {
namespace {

std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", seconds);
    return text;
}

}  // namespace

Link::Link(std::shared_ptr<Runtime> runtime, Identity identity)
    : runtime_(std::move(runtime)),
      identity_(identity),
      out_(runtime_->config.queues, runtime_->config.chunk_bytes),
      heard_ns_(steady_ns()) {}

Link::~Link() = default;

std::string Link::describe() const {
    const uint32_t low = std::min(identity_.rank, identity_.peer_rank);
    const uint32_t high = std::max(identity_.rank, identity_.peer_rank);
    return "link " + std::to_string(identity_.link) + " (rank " + std::to_string(low) + " <-> " +
           std::to_string(high) + ")";
}

// --- The application's side -------------------------------------------------------------------

Transport Link::transport() const {
    const Lock lock(mu_);
    return transport_;
}

bool Link::alive() const {
    const Lock lock(mu_);
    return !over();
}

std::string Link::error() const {
    const Lock lock(mu_);
    return error_;
}

void Link::throw_over() const {
    throw EngineError(error_);
}

void Link::changed() {
    changed_.notify_all();
    runtime_->ring();
}

void Link::reserve(int direction, uint32_t slots, uint64_t slot_bytes) {
    uint32_t missing = 0;
    bool shared = false;
    {
        const Lock lock(mu_);
        if (over()) throw_over();
        missing = in_.missing_slots(direction, slots, slot_bytes);
        shared = transport_ == Transport::shm;
    }
    if (missing == 0) return;
    // Page-aligned slots: two never share a page, so neither do their copies.
    const uint64_t stride = (slot_bytes + 4095) / 4096 * 4096;
    // Prefaulting takes a while, so it is done without the lock.
    auto memory =
        shared ? Memory::shareable(stride * missing) : Memory::anonymous(stride * missing);
    const Lock lock(mu_);
    if (over()) throw_over();
    const uint32_t segment = in_.add_segment(direction, missing, slot_bytes, std::move(memory));
    if (!shared) {
        grant(in_.grant_segment(segment));
        return;
    }
    unmapped_segments_.insert(segment);
    segments_to_offer_.push_back(segment);
    kick_paths();
}

uint64_t Link::send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold) {
    const Lock lock(mu_);
    if (over()) throw_over();
    info.posted_ns = wall_ns();
    try {
        const auto message = out_.post(std::move(info), data, std::move(hold), steady_ns());
        if (message->chunks == 0)
            send_empty_messages();
        else
            kick_paths();
        return message->info.id;
    } catch (const EngineError& e) {
        throw EngineError(describe() + ": " + e.what());
    }
}

bool Link::sent(uint64_t ticket) {
    const Lock lock(mu_);
    switch (out_.ticket(ticket)) {
        case Outbox::Ticket::done:
            return true;
        case Outbox::Ticket::failed:
            throw EngineError(describe() + ": " + out_.failure(ticket));
        case Outbox::Ticket::unknown:
            throw EngineError(describe() + ": there is no ticket " + std::to_string(ticket));
        case Outbox::Ticket::abandoned:
            throw_over();
        case Outbox::Ticket::in_flight:
            break;
    }
    if (over()) throw_over();
    return false;
}

void Link::wait_slice(Lock& lock, int64_t deadline_ns, int64_t slice_ns) {
    const int64_t wait = std::min(deadline_ns - steady_ns(), slice_ns);
    // By the wall clock: the thread sanitizer of gcc 12 does not know the steady wait. A step of
    // the clock costs at most one slice, since the deadline itself is steady.
    changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::nanoseconds(wait));
}

bool Link::wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    for (;;) {
        if (sent(ticket)) return true;
        Lock lock(mu_);
        if (out_.ticket(ticket) != Outbox::Ticket::in_flight || over()) continue;
        const int64_t now = steady_ns();
        if (now >= deadline_ns)
            throw EngineTimeout(
                describe() + ": " + out_.describe(ticket) + ", not acknowledged by rank " +
                std::to_string(identity_.peer_rank) + " within " + seconds_text(timeout) +
                "; link is " + (state_ == State::up ? "up" : "reconnecting"));
        if (now >= slice_end) return false;
        wait_slice(lock, deadline_ns, slice_end - now);
    }
}

std::string Link::nothing_arrived(const Key& key, double timeout) const {
    const auto direction = static_cast<int>(key.direction);
    std::string s = describe() + ": nothing arrived for " + key.describe() + " within " +
                    seconds_text(timeout) + "; ";
    if (const auto progress = in_.progress(key))
        s += std::to_string(progress->chunks) + " of " + std::to_string(progress->of) +
             " chunks are here; ";
    s += state_ == State::up ? "link is up, " : "link is reconnecting (" + last_trouble_ + "), ";
    const uint32_t slots = in_.slots(direction);
    return s + std::to_string(slots - in_.slots_in_use(direction)) + " of " +
           std::to_string(slots) + " slots free";
}

// Takes a message out of the mailbox. If its destination was posted too late for it to be put
// there, it is copied now, by the caller's thread and without the lock.
std::optional<Arrived> Link::take(Lock& lock, const Key& key) {
    auto message = in_.take(key);
    if (!message || !message->copy_to) return message;
    Arrived& a = *message;
    const Destination to = std::move(*a.copy_to);
    a.copy_to.reset();
    const bool fits = to.bytes == a.info.bytes;
    lock.unlock();
    if (fits && to.bytes > 0) copy_past_caches(to.data, a.data, to.bytes);
    lock.lock();
    if (a.slot) {
        const auto next = in_.release(*a.slot, a.serial);
        if (next && !over()) grant({*next});
    }
    a.slot.reset();
    a.data = to.data;
    a.keep = to.hold;
    if (!fits)
        throw EngineError(describe() + ": " + key.describe() + " has " +
                          std::to_string(a.info.bytes) + " bytes, the destination posted for it " +
                          std::to_string(to.bytes));
    return message;
}

void Link::post_receive(const Key& key, Destination destination) {
    const Lock lock(mu_);
    if (over() && !in_.has(key)) throw_over();
    if (!in_.post(key, std::move(destination)))
        throw EngineError(describe() + ": a destination is posted for " + key.describe() +
                          " already");
}

std::optional<Arrived> Link::receive(const Key& key, int64_t deadline_ns, int64_t slice_ns,
                                     double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    Lock lock(mu_);
    for (;;) {
        if (auto message = take(lock, key)) return message;
        if (over()) throw_over();
        const int64_t now = steady_ns();
        if (now >= deadline_ns) throw EngineTimeout(nothing_arrived(key, timeout));
        if (now >= slice_end) return std::nullopt;
        wait_slice(lock, deadline_ns, slice_end - now);
    }
}

std::optional<Arrived> Link::try_receive(const Key& key) {
    Lock lock(mu_);
    auto message = take(lock, key);
    // What had arrived before the link died is still good.
    if (!message && over()) throw_over();
    return message;
}

bool Link::arrived(const Key& key) const {
    const Lock lock(mu_);
    if (in_.has(key)) return true;
    if (over()) throw_over();
    return false;
}

void Link::release(uint32_t slot, uint64_t serial) {
    const Lock lock(mu_);
    const auto next = in_.release(slot, serial);
    if (next && !over()) grant({*next});
}

uint64_t Link::send_slots(int direction) const {
    const Lock lock(mu_);
    return out_.credits(direction);
}

std::vector<SentRecord> Link::drain_telemetry() {
    const Lock lock(mu_);
    echo_.drain();
    return out_.telemetry.drain();
}

LinkStats Link::stats() const {
    const Lock lock(mu_);
    LinkStats s;
    switch (state_) {
        case State::connecting:
            s.state = "connecting";
            break;
        case State::up:
            s.state = "up";
            break;
        case State::reconnecting:
            s.state = "reconnecting";
            break;
        case State::dead:
            s.state = "dead";
            break;
        case State::closed:
            s.state = "closed";
            break;
    }
    s.transport = name_of(transport_);
    s.messages_sent = out_.messages_sent;
    s.messages_received = messages_received_;
    s.bytes_sent = out_.bytes_sent;
    s.bytes_received = bytes_received_;
    s.chunks_resent = out_.chunks_resent;
    s.duplicate_chunks = duplicate_chunks_;
    s.stale_chunks = stale_chunks_;
    s.reconnects = reconnects_;
    if (const auto echo = echo_.summary()) {
        s.rtt_min = to_seconds(echo->min_ns);
        s.rtt_mean = to_seconds(echo->mean_ns);
        s.rtt_p99 = to_seconds(echo->p99_ns);
    }
    if (const auto offset = echo_.clock_offset_ns()) s.clock_offset = to_seconds(*offset);
    s.sends_in_flight = out_.in_flight();
    for (int d = 0; d < kDirections; ++d) {
        s.slots_granted += in_.slots(d);
        s.slots_in_use += in_.slots_in_use(d);
    }
    return s;
}

void Link::sever_data_path(uint32_t index) {
    const Lock lock(mu_);
    if (over()) throw_over();
    if (index >= paths_.size())
        throw EngineError(describe() + " has " + std::to_string(paths_.size()) +
                          " data paths, not " + std::to_string(index + 1));
    if (paths_[index].live) paths_[index].live->sever();
}

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

void Link::close(int64_t deadline_ns) {
    constexpr int64_t kSlice = 50 * kMillisecond;
    {
        Lock lock(mu_);
        while (!over() && out_.in_flight() > 0 && steady_ns() < deadline_ns)
            wait_slice(lock, deadline_ns, kSlice);
        if (!over()) {
            const size_t unsent = out_.in_flight();
            send_frame(ByeFrame{unsent == 0 ? "" : std::to_string(unsent) + " messages unsent"});
            leaving_ = true;
            // The peer closes the connection when it has read the goodbye.
            const int64_t patience = std::min(deadline_ns, steady_ns() + kSecond);
            while (!over() && control_ && steady_ns() < patience)
                wait_slice(lock, patience, kSlice);
        }
    }
    finish(State::closed, describe() + " is closed");
}

// --- The engine's side ------------------------------------------------------------------------

void Link::set_terms(Transport transport, uint32_t paths, const Address& address,
                     std::string unix_name) {
    const Lock lock(mu_);
    transport_ = transport;
    peer_address_ = address;
    unix_name_ = std::move(unix_name);
    wanted_paths_ = paths;
    // Over shared memory a path is a copying thread, not a socket.
    paths_.resize(transport == Transport::shm ? std::min<size_t>(paths, runtime_->data_threads())
                                              : paths);
}

bool Link::up() const {
    const Lock lock(mu_);
    return state_ == State::up || state_ == State::reconnecting;
}

uint32_t Link::control_epoch() const {
    const Lock lock(mu_);
    return control_epoch_;
}

uint64_t Link::control_received() const {
    const Lock lock(mu_);
    return stream_.last_received();
}

void Link::attach_control(Fd fd, uint32_t epoch, uint64_t peer_received) {
    auto connection = std::make_shared<Connection>();
    connection->fd = std::move(fd);
    set_unacked_limit(connection->fd, runtime_->peer_deadline_ns);
    std::shared_ptr<Connection> before;
    bool agreed = true;
    {
        const Lock lock(mu_);
        if (over()) return;
        agreed = stream_.resume(peer_received);
        before = std::exchange(control_, connection);
        control_epoch_ = epoch;
        heard_ns_ = steady_ns();
        refused_since_ns_ = 0;
        redial_backoff_ns_ = 0;
        if (state_ != State::connecting) {
            state_ = State::up;
            ++reconnects_;
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
    runtime_->control.add(connection->fd.get(), EPOLLIN,
                          [weak = weak_from_this(), connection](uint32_t events) {
                              if (const auto self = weak.lock())
                                  self->on_control(connection, events);
                          });
    const Lock lock(mu_);
    flush();
    changed();
}

void Link::confirm() {
    {
        const Lock lock(mu_);
        if (state_ != State::connecting) return;
        state_ = State::up;
        if (identity_.dials && control_)
            append_frame(control_->out, encode_frame(ConfirmFrame{transport_}), 0, 0);
        flush();
        changed();
    }
    if (identity_.dials) dial_paths();
}

std::string Link::may_attach_data(uint32_t path, uint32_t epoch) const {
    const Lock lock(mu_);
    if (over()) return error_;
    if (path >= paths_.size()) return describe() + " has no data path " + std::to_string(path);
    if (epoch <= paths_[path].epoch)
        return describe() + ": data path " + std::to_string(path) + " is past epoch " +
               std::to_string(epoch);
    return {};
}

void Link::attach_data(uint32_t path, uint32_t epoch, Fd fd) {
    std::shared_ptr<DataPath> before;
    std::shared_ptr<DataPath> now;
    {
        const Lock lock(mu_);
        if (over()) return;
        Path& p = paths_[path];
        if (epoch <= p.fenced) return;  // given up by the peer before we had it
        before = p.live;
        Reactor& reactor = runtime_->data(path);
        if (transport_ == Transport::shm)
            now =
                std::make_shared<ShmPath>(reactor, shared_from_this(), path, epoch, std::move(fd));
        else {
            set_unacked_limit(fd, runtime_->peer_deadline_ns / 2);
            now =
                std::make_shared<TcpPath>(reactor, shared_from_this(), path, epoch, std::move(fd));
        }
        p.live = now;
        p.epoch = epoch;
        p.up_since_ns = steady_ns();
        if (p.was_up) ++reconnects_;
        p.was_up = true;
        if (path == 0)
            segments_to_offer_.assign(unmapped_segments_.begin(), unmapped_segments_.end());
    }
    // On its own thread: it may be in the middle of a copy, and the fence must come after that.
    if (before)
        before->reactor().post([self = shared_from_this(), before] {
            before->retire();
            const Lock lock(self->mu_);
            if (!self->over()) self->send_fence(before->index, before->epoch);
        });
    now->start();
}

void Link::die(const std::string& why) {
    finish(State::dead, why);
}

void Link::finish(State state, const std::string& why) {
    std::shared_ptr<Connection> connection;
    std::vector<std::shared_ptr<DataPath>> paths;
    {
        const Lock lock(mu_);
        if (over()) return;
        state_ = state;
        error_ = why;
        connection = std::exchange(control_, nullptr);
        for (Path& p : paths_)
            if (p.live) paths.push_back(std::exchange(p.live, nullptr));
        out_.abandon();
        in_.abandon();
        changed();
    }
    for (const auto& path : paths) path->close();
    if (connection)
        runtime_->control.post([self = shared_from_this(), connection] {
            if (!connection->fd) return;
            self->runtime_->control.remove(connection->fd.get());
            const Lock lock(self->mu_);
            connection->fd.reset();
        });
}

Hello Link::hello(Purpose purpose) const {
    Hello h;
    h.purpose = purpose;
    h.job = runtime_->config.job;
    h.from_rank = identity_.rank;
    h.to_rank = identity_.peer_rank;
    h.link = identity_.link;
    h.session = identity_.session;
    h.transport = transport_;
    h.listen_port = runtime_->listen_port;
    return h;
}

// --- Control connection -----------------------------------------------------------------------

void Link::send_frame(const Frame& frame) {
    stream_.send(frame);
    flush();
}

void Link::send_empty_messages() {
    while (auto message = out_.next_inline(wall_ns(), steady_ns()))
        stream_.send(InlineFrame{std::move(*message)});
    flush();
}

void Link::flush() {
    constexpr size_t kBatch = size_t{256} << 10;
    if (!control_ || !control_->fd || state_ == State::connecting) return;
    Connection& c = *control_;
    for (;;) {
        if (c.out_done == c.out.size()) {
            c.out.clear();
            c.out_done = 0;
            stream_.write(c.out, kBatch);
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
        if (connection->fd)
            self->runtime_->control.modify(connection->fd.get(), EPOLLIN | EPOLLOUT);
    });
}

void Link::on_control(const std::shared_ptr<Connection>& connection, uint32_t events) {
    if (!connection->fd) return;
    if (events & EPOLLOUT) {
        const Lock lock(mu_);
        connection->watching_write = false;
        runtime_->control.modify(connection->fd.get(), EPOLLIN);
        flush();
    }
    if (events & ~uint32_t{EPOLLOUT}) read_control(connection);
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
    {
        const Lock lock(mu_);
        heard_ns_ = steady_ns();
    }
    auto& in = connection->in;
    in.insert(in.end(), buffer, buffer + n);
    size_t at = 0;
    const char* trouble = nullptr;
    while (in.size() - at >= kFrameHeaderSize) {
        const Bytes rest = Bytes(in).subspan(at);
        const auto header = decode_frame_header(rest.first(kFrameHeaderSize));
        if (!header) {
            trouble = "a malformed frame";
            break;
        }
        if (rest.size() < kFrameHeaderSize + header->body_bytes) break;
        auto frame = decode_frame(header->type, rest.subspan(kFrameHeaderSize, header->body_bytes));
        at += kFrameHeaderSize + header->body_bytes;
        if (!frame) {
            trouble = "a malformed frame";
            break;
        }
        bool deliver = true;
        {
            const Lock lock(mu_);
            if (control_ != connection) return false;  // superseded or over
            if (!stream_.acknowledged(header->acknowledged)) trouble = "an impossible counter";
            if (header->sequence != 0) {
                const auto verdict = stream_.received(header->sequence);
                deliver = verdict == ReliableStream::Verdict::deliver;
                if (verdict == ReliableStream::Verdict::gap) trouble = "a gap in the frames";
            }
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

void Link::handle(Frame frame) {
    if (const auto* f = std::get_if<GrantFrame>(&frame)) {
        const Lock lock(mu_);
        for (const SlotGrant& slot : f->slots) out_.granted(slot);
        changed_.notify_all();
        kick_paths();
    } else if (auto* f = std::get_if<InlineFrame>(&frame)) {
        const Lock lock(mu_);
        const uint64_t id = f->message.id;
        in_.deliver_empty(std::move(f->message), wall_ns());
        ++messages_received_;
        send_frame(AckFrame{id});
        changed();
    } else if (const auto* f = std::get_if<AckFrame>(&frame)) {
        const Lock lock(mu_);
        out_.acknowledged(f->message, steady_ns());
        send_empty_messages();
        changed();
    } else if (const auto* f = std::get_if<FenceFrame>(&frame)) {
        fence_requested(*f);
    } else if (const auto* f = std::get_if<BitmapFrame>(&frame)) {
        const Lock lock(mu_);
        out_.fenced(*f);
        kick_paths();
    } else if (const auto* f = std::get_if<MappedFrame>(&frame)) {
        if (!f->error.empty()) {
            die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) +
                " cannot map shared memory: " + f->error);
            return;
        }
        const Lock lock(mu_);
        if (unmapped_segments_.erase(f->segment) > 0) grant(in_.grant_segment(f->segment));
    } else if (const auto* f = std::get_if<PingFrame>(&frame)) {
        const int64_t now = wall_ns();
        const Lock lock(mu_);
        if (!control_) return;
        append_frame(control_->out,
                     encode_frame(PongFrame{f->sent_steady_ns, f->sent_wall_ns, now, wall_ns()}), 0,
                     stream_.last_received());
        flush();
    } else if (const auto* f = std::get_if<PongFrame>(&frame)) {
        const int64_t now_steady = steady_ns();
        const int64_t now_wall = wall_ns();
        const Lock lock(mu_);
        const int64_t rtt =
            now_steady - f->ping_steady_ns - (f->sent_wall_ns - f->received_wall_ns);
        const int64_t peer_minus_ours =
            ((f->received_wall_ns - f->ping_wall_ns) + (f->sent_wall_ns - now_wall)) / 2;
        if (rtt >= 0) echo_.add(rtt, peer_minus_ours);
    } else if (const auto* f = std::get_if<ByeFrame>(&frame)) {
        die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) + " closed it" +
            (f->reason.empty() ? "" : " with " + f->reason));
    } else if (const auto* f = std::get_if<ConfirmFrame>(&frame)) {
        confirmed(f->transport);
    }
}

void Link::confirmed(Transport transport) {
    {
        const Lock lock(mu_);
        if (identity_.dials || state_ != State::connecting) return;
    }
    if (transport != this->transport()) {
        // The dialler could not reach our shared memory after all (another network namespace).
        if (runtime_->config.transport == Transport::shm) {
            protocol_error("it chose tcp where shm is required");
            return;
        }
        const Lock lock(mu_);
        transport_ = transport;
        paths_.assign(wanted_paths_, {});
    }
    confirm();
    if (on_confirm) on_confirm();
}

void Link::control_lost(const std::shared_ptr<Connection>& connection, const std::string& why) {
    if (connection->fd) runtime_->control.remove(connection->fd.get());
    bool never_up = false;
    {
        const Lock lock(mu_);
        connection->fd.reset();
        if (control_ != connection) return;
        control_.reset();
        last_trouble_ = why;
        down_since_ns_ = steady_ns();
        next_redial_ns_ = 0;
        if (state_ == State::up) state_ = State::reconnecting;
        changed();
        never_up = state_ == State::connecting;
        if (!never_up && state_ != State::reconnecting) return;
    }
    if (never_up)
        die(describe() + " never came up: " + why);
    else if (identity_.dials)
        redial_control();
    else
        probe_peer();
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
        h.received = stream_.last_received();
        h.sockets = static_cast<uint16_t>(paths_.size());
        address = peer_address_;
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
                self->redial_backoff_ns_ = std::clamp<int64_t>(
                    self->redial_backoff_ns_ * 2, 20 * kMillisecond,
                    std::min<int64_t>(500 * kMillisecond, self->runtime_->peer_deadline_ns / 10));
                self->next_redial_ns_ = now + self->redial_backoff_ns_;
                if (!r.nobody_there)
                    self->refused_since_ns_ = 0;
                else if (self->refused_since_ns_ == 0)
                    self->refused_since_ns_ = now;
            }
        }
        if (r.fd)
            self->attach_control(std::move(r.fd), epoch, r.reply.received);
        else if (r.refused)
            self->die(self->describe() + " is dead: " + r.error);
    });
}

// The acceptor cannot dial back in, but it can see whether anybody still listens over there: a
// process that is gone refuses, a network that is gone does not answer.
void Link::probe_peer() {
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::reconnecting || redialling_ || leaving_) return;
        redialling_ = true;
        address = peer_address_;
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

void Link::tick() {
    const int64_t now = steady_ns();
    const int64_t deadline = runtime_->peer_deadline_ns;
    std::shared_ptr<Connection> silent;
    std::string dead;
    bool reconnect = false;
    bool live = false;
    {
        const Lock lock(mu_);
        if (state_ == State::up && control_) {
            live = true;
            if (now - heard_ns_ > deadline / 2) {
                silent = control_;
            } else if (now >= next_ping_ns_) {
                next_ping_ns_ = now + 100 * kMillisecond;
                append_frame(control_->out, encode_frame(PingFrame{now, wall_ns()}), 0,
                             stream_.last_received());
                flush();
            }
        } else if (state_ == State::reconnecting && !leaving_) {
            const std::string peer = "rank " + std::to_string(identity_.peer_rank);
            // It was silent before it counted as down, so the whole silence counts.
            const int64_t since = std::min(down_since_ns_, heard_ns_ + deadline / 2);
            if (refused_since_ns_ != 0 && now - refused_since_ns_ > deadline * 2 / 5)
                dead = peer + " is gone: nobody listens at " + peer_address_.text() + " any more";
            else if (now - since > deadline)
                dead = "no control connection to " + peer + " (" + peer_address_.text(false) +
                       ") for " + seconds_text(to_seconds(now - since)) +
                       " (last: " + last_trouble_ + ")";
            reconnect = now >= next_redial_ns_;
        }
    }
    if (silent)
        control_lost(silent, "nothing was heard for " + seconds_text(to_seconds(deadline / 2)));
    if (!dead.empty()) {
        die(describe() + " is dead: " + dead);
    } else if (reconnect) {
        if (identity_.dials)
            redial_control();
        else
            probe_peer();
    }
    if (live && identity_.dials) dial_paths();
}

// --- Data paths -------------------------------------------------------------------------------

void Link::kick_paths() {
    for (const Path& p : paths_)
        if (p.live) p.live->kick();
}

void Link::grant(const std::vector<SlotGrant>& grants) {
    if (!grants.empty()) send_frame(GrantFrame{grants});
}

void Link::dial_paths() {
    struct Call {
        uint32_t index;
        uint32_t epoch;
        Hello hello;
    };
    std::vector<Call> calls;
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::up || leaving_) return;
        address = transport_ == Transport::shm ? abstract_unix(unix_name_) : peer_address_;
        const int64_t now = steady_ns();
        for (uint32_t i = 0; i < paths_.size(); ++i) {
            Path& p = paths_[i];
            if (p.live || p.dialling || now < p.next_try_ns) continue;
            p.dialling = true;
            // Every attempt has an epoch of its own: the peer may have taken one that we gave up.
            Hello h = hello(Purpose::data);
            h.path = i;
            h.epoch = ++p.epoch;
            const uint32_t epoch = h.epoch;
            calls.push_back({i, epoch, std::move(h)});
        }
    }
    for (Call& call : calls) {
        dial(*runtime_, address, std::move(call.hello), 2 * kSecond,
             [weak = weak_from_this(), index = call.index, epoch = call.epoch](DialResult r) {
                 const auto self = weak.lock();
                 if (!self) return;
                 {
                     const Lock lock(self->mu_);
                     Path& p = self->paths_[index];
                     p.dialling = false;
                     if (!r.fd) {
                         p.backoff_ns =
                             std::clamp<int64_t>(p.backoff_ns * 2, 20 * kMillisecond, kSecond);
                         p.next_try_ns = steady_ns() + p.backoff_ns;
                     }
                 }
                 if (r.fd) self->attach_data(index, epoch, std::move(r.fd));
             });
    }
}

void Link::lose_path(Path& p) {
    p.live.reset();
    const int64_t now = steady_ns();
    // A path that breaks as soon as it is up must not be remade in a tight loop.
    p.backoff_ns = now - p.up_since_ns > kSecond
                       ? 0
                       : std::clamp<int64_t>(p.backoff_ns * 2, 20 * kMillisecond, kSecond);
    p.next_try_ns = now + p.backoff_ns;
}

// The path's epoch is over on this side: ask what of it arrived, and let the peer do the same.
void Link::send_fence(uint32_t index, uint32_t epoch) {
    constexpr size_t kPerFrame = 4096;
    const auto messages = out_.entrusted_to(index, epoch);
    size_t at = 0;
    do {
        FenceFrame fence{index, epoch, {}};
        for (; at < messages.size() && fence.messages.size() < kPerFrame; ++at)
            fence.messages.push_back(messages[at]);
        stream_.send(fence);
    } while (at < messages.size());
    flush();
}

void Link::path_lost(uint32_t index, uint32_t epoch, const std::string& why) {
    {
        const Lock lock(mu_);
        Path& p = paths_[index];
        if (over() || !p.live || p.epoch != epoch) return;
        last_trouble_ = "data path " + std::to_string(index) + ": " + why;
        lose_path(p);
        send_fence(index, epoch);
    }
    if (identity_.dials)
        runtime_->control.post([self = shared_from_this()] { self->dial_paths(); });
}

void Link::fence_requested(const FenceFrame& fence) {
    bool known = false;
    {
        const Lock lock(mu_);
        if (over()) return;
        known = fence.path < paths_.size();
        if (known) {
            uint32_t& fenced = paths_[fence.path].fenced;
            fenced = std::max(fenced, fence.epoch);
        }
    }
    if (!known) {
        protocol_error("a fence for a path that does not exist");
        return;
    }
    // On the path's own thread, so that no byte of the fenced epoch can reach a slot after the
    // bitmaps have been read.
    runtime_->data(fence.path).post([self = shared_from_this(), fence] {
        std::shared_ptr<DataPath> live;
        bool lost = false;
        {
            const Lock lock(self->mu_);
            if (self->over()) return;
            Path& p = self->paths_[fence.path];
            if (p.live && p.epoch <= fence.epoch) {
                live = p.live;
                lost = true;
            }
        }
        if (live) live->retire();
        {
            const Lock lock(self->mu_);
            if (self->over()) return;
            Path& p = self->paths_[fence.path];
            if (lost && p.live == live) {
                self->lose_path(p);
                self->send_fence(live->index, live->epoch);
            }
            constexpr size_t kMaxBits = size_t{256} << 10;
            BitmapFrame answer{fence.path, fence.epoch, {}};
            size_t bits = 0;
            for (ChunkReport& r : self->in_.report(fence.messages)) {
                bits += r.bits.size() + 16;
                answer.reports.push_back(std::move(r));
                if (bits < kMaxBits) continue;
                self->stream_.send(std::exchange(answer, {fence.path, fence.epoch, {}}));
                bits = 0;
            }
            if (!answer.reports.empty()) self->stream_.send(answer);
            self->flush();
        }
        if (lost && self->identity_.dials)
            self->runtime_->control.post([self] { self->dial_paths(); });
    });
}

// --- PathHost ---------------------------------------------------------------------------------

std::optional<ChunkTask> Link::next_chunk(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    const Path& p = paths_[path];
    if (over() || !p.live || p.epoch != epoch) return std::nullopt;
    return out_.next_chunk(path, epoch, wall_ns(), steady_ns());
}

ChunkSink Link::begin_chunk(const ChunkHeader& header) {
    const Lock lock(mu_);
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    const Path& p = paths_[header.path];
    if (!over() && p.live && p.epoch == header.epoch) sink = in_.begin_chunk(header);
    if (sink.verdict == ChunkSink::Verdict::duplicate) ++duplicate_chunks_;
    if (sink.verdict == ChunkSink::Verdict::stale) ++stale_chunks_;
    return sink;
}

void Link::finish_chunk(const ChunkSink& sink, bool intact) {
    const Lock lock(mu_);
    if (over()) return;
    const auto finished = in_.finish_chunk(sink, intact, wall_ns());
    if (!finished.message_complete) return;
    ++messages_received_;
    bytes_received_ += finished.bytes;
    stream_.send(AckFrame{finished.message});
    if (finished.grant) stream_.send(GrantFrame{{*finished.grant}});
    flush();
    changed();
}

void Link::stale_chunk() {
    const Lock lock(mu_);
    ++stale_chunks_;
}

void Link::protocol_error(const std::string& why) {
    die(describe() + " is dead: rank " + std::to_string(identity_.peer_rank) +
        " broke the protocol: " + why);
}

std::optional<PathHost::Segment> Link::next_segment_to_offer() {
    const Lock lock(mu_);
    while (!segments_to_offer_.empty()) {
        const uint32_t number = segments_to_offer_.front();
        segments_to_offer_.pop_front();
        if (unmapped_segments_.contains(number)) return Segment{number, in_.segment(number)};
    }
    return std::nullopt;
}

void Link::segment_offered(uint32_t number, uint64_t bytes, Fd fd) {
    MappedFrame answer;
    answer.segment = number;
    if (!peer_segment(number)) {
        try {
            auto memory = Memory::map_peer(fd, bytes);
            const Lock lock(mu_);
            peer_segments_[number] = std::move(memory);
        } catch (const EngineError& e) {
            answer.error = e.what();
        }
    }
    const Lock lock(mu_);
    if (!over()) send_frame(answer);
}

std::shared_ptr<Memory> Link::peer_segment(uint32_t number) {
    const Lock lock(mu_);
    const auto it = peer_segments_.find(number);
    return it == peer_segments_.end() ? nullptr : it->second;
}

}  // namespace pipemorph
