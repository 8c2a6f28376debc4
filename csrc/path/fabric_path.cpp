#include "path/fabric_path.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "os/clock.hpp"
#include "os/socket.hpp"

namespace pipemorph {
namespace {

constexpr uint32_t kWindow = 8;  // messages that the peer has not taken: the most under way
// What a stranger sends may take some, until it has been looked at.
constexpr uint32_t kReceives = kWindow + 4;
constexpr size_t kTurn = 16;  // completions handled before others on this thread have their turn

// A message: number (8), kind (1), zeros (7), chunk header, seal; then payload and trailer.
constexpr size_t kNumberBytes = 16;
constexpr size_t kSealed = kNumberBytes + kChunkHeaderSize;
constexpr size_t kHead = kSealed + kSealSize;

// On the socket: one hello, then counts, each with its seal.
constexpr size_t kMaxProvider = 64;
constexpr size_t kHelloBytes = 1 + 2 + kMaxProvider + 2 + FabricEndpoint::kMaxAddress;
constexpr size_t kCountsBytes = 16;

constexpr int64_t kConnectLimit = 3 * kSecond;  // to open an endpoint, and to reach the peer's
constexpr int64_t kLook = 50 * kMillisecond;
constexpr int64_t kAway = 200 * kMillisecond;  // later than a busy machine is
// Without a descriptor to sleep at: for so long after any news it is polled without a pause, and
// then in this interval while something is under way.
constexpr int64_t kSpin = 50'000;
constexpr int64_t kPollEvery = kMillisecond;

}  // namespace

FabricPath::FabricPath(Reactor& reactor, Reactor& setup, std::shared_ptr<PathHost> host,
                       uint32_t path_index, uint32_t path_epoch, Fd fd, const ConnectionKeys& keys,
                       Integrity integrity, std::shared_ptr<FabricDevice> device, Settings settings)
    : StreamPath(reactor, std::move(host), path_index, path_epoch, std::move(fd)),
      settings_(settings),
      setup_(setup),
      device_(std::move(device)),
      says_(keys.ours),
      hears_(keys.theirs),
      seals_(keys.ours),
      guard_out_(integrity, keys.ours, PayloadGuard::End::sends),
      proves_(keys.theirs),
      guard_in_(integrity, keys.theirs, PayloadGuard::End::receives),
      early_(kWindow) {
    for (uint32_t i = 0; i < kWindow; ++i) free_blocks_.push_back(i);
    set_no_delay(fd_);
}

void FabricPath::guarded(void (FabricPath::*what)()) {
    if (!open() || retired()) return;
    try {
        (this->*what)();
    } catch (const std::exception& e) {
        fail(e.what());
    }
}

void FabricPath::on_start() {
    StreamPath::on_start();
    guarded(&FabricPath::open_endpoint);
}

void FabricPath::open_endpoint() {
    started_ns_ = looked_ns_ = steady_ns();
    work_after(kLook);
    setup_.post([weak = weak_from_this()] {
        const auto self = std::static_pointer_cast<FabricPath>(weak.lock());
        if (!self) return;  // it was closed before its turn
        try {
            auto opened = std::make_shared<FabricEndpoint>(
                self->device_, kWindow, kReceives,
                self->settings_.chunk_bytes + kHead + kChunkTrailerSize, self->settings_.wake);
            self->reactor_.post([self, opened = std::move(opened)]() mutable {
                self->endpoint_ = std::move(opened);
                if (self->open() && !self->retired())
                    self->guarded(&FabricPath::begin);
                else
                    self->drop_work();
            });
        } catch (const std::exception& e) {
            self->give_up(e.what());
        }
    });
}

void FabricPath::begin() {
    started_ns_ = looked_ns_ = news_ns_ = progress_ns_ = steady_ns();
    for (uint32_t i = 0; i < kReceives; ++i) to_receive_.push_back(i);
    if (endpoint_->descriptor() >= 0)
        reactor_.add(endpoint_->descriptor(), EPOLLIN,
                     [self = shared_from_this(), this](uint32_t) { guarded(&FabricPath::work); });
    std::vector<uint8_t> hello;
    Writer w(hello);
    w.u8(endpoint_->descriptor() < 0 ? 1 : 0);
    w.text(device_->provider().substr(0, kMaxProvider));
    w.u16(static_cast<uint16_t>(endpoint_->address().size()));
    w.raw(endpoint_->address());
    hello.resize(kHelloBytes);
    say(hello);
    if (peer_address_) peer_known();
    work();
}

// --- The socket -------------------------------------------------------------------------------

void FabricPath::say(Bytes body) {
    Writer w(out_);
    w.raw(body);
    w.raw(says_.seal(body));
    if (!flush()) kick();  // which waits for the socket
}

void FabricPath::say_counts() {
    std::vector<uint8_t> counts;
    Writer w(counts);
    w.u64(taken_);
    w.u64(sent_);
    taken_said_ = taken_;
    say(counts);
}

// Whether all is out. If not, and the path has not failed, the socket is full.
bool FabricPath::flush() {
    while (open() && out_done_ < out_.size()) {
        const ssize_t n = ::send(fd_.get(), out_.data() + out_done_, out_.size() - out_done_,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            would_block_or_fail("sending");
            return false;
        }
        out_done_ += static_cast<size_t>(n);
    }
    out_.clear();
    out_done_ = 0;
    return true;
}

void FabricPath::receive_some() {
    std::array<uint8_t, 4096> buffer;
    const ssize_t n = ::recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0) {
        would_block_or_fail("receiving");
        return;
    }
    if (n == 0) {
        fail("the peer closed the connection");
        return;
    }
    if (retired()) return;
    in_.insert(in_.end(), buffer.begin(), buffer.begin() + n);
    size_t done = 0;
    for (;;) {
        const size_t body = peer_address_ ? kCountsBytes : kHelloBytes;
        if (in_.size() - done < body + kSealSize) break;
        const Bytes frame = Bytes(in_).subspan(done, body);
        // Nothing of it is looked at before.
        if (!hears_.fits(frame, Bytes(in_).subspan(done + body, kSealSize))) {
            host_->refused();
            fail(
                "what the peer says of its endpoint was altered or added on the way: its seal is "
                "wrong");
            return;
        }
        done += body + kSealSize;
        if (!(peer_address_ ? counts_received(frame) : hello_received(frame))) return;
    }
    in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(done));
    if (endpoint_) work_again();
}

// False: that was the path's end.
bool FabricPath::hello_received(Bytes body) {
    Reader r(body);
    peer_polls_ = r.u8() != 0;
    const std::string provider = r.text(kMaxProvider);
    const size_t bytes = r.u16();
    const Bytes address = r.raw(bytes);
    if (!r.ok() || bytes == 0) {
        fail("a damaged address of the peer's endpoint");
        return false;
    }
    if (provider != device_->provider()) {
        fail("the peer's endpoint is of libfabric's provider " + provider + ", and ours of " +
             device_->provider() + ": set FI_PROVIDER alike at both ends");
        return false;
    }
    peer_address_.emplace(address.begin(), address.end());
    if (endpoint_) peer_known();
    return true;
}

bool FabricPath::counts_received(Bytes body) {
    Reader r(body);
    const uint64_t taken = r.u64();
    const uint64_t sent = r.u64();
    if (taken > sent_ || taken < taken_by_peer_ || sent < sent_by_peer_ ||
        sent > taken_ + kWindow) {
        fail("the peer counts " + std::to_string(taken) + " messages taken and " +
             std::to_string(sent) + " sent, where it was sent " + std::to_string(sent_) + " and " +
             std::to_string(taken_) + " were taken");
        return false;
    }
    sent_by_peer_ = sent;
    news_ns_ = steady_ns();
    if (taken == taken_by_peer_) return true;
    taken_by_peer_ = taken;
    progress_ns_ = news_ns_;
    if (!up_) {
        up_ = true;
        host_->path_up(index, epoch);
    }
    if (std::exchange(suspect_, false)) host_->path_suspect(index, epoch, false);
    kick();
    return true;
}

// --- Sending ----------------------------------------------------------------------------------

void FabricPath::peer_known() {
    endpoint_->connect(*peer_address_);
    connected_ = true;
    // It carries when this has been taken.
    const uint32_t block = free_blocks_.back();
    free_blocks_.pop_back();
    send_message(block, Kind::probe, {}, 0);
}

StreamPath::Sent FabricPath::send_some() {
    if (!flush()) return Sent::more;
    if (!endpoint_ || !up_ || suspect_ || free_blocks_.empty() || sent_ - taken_by_peer_ >= kWindow)
        return Sent::nothing;
    const auto task = host_->next_chunk(index, epoch);
    if (!task) return Sent::nothing;
    const uint32_t block = free_blocks_.back();
    free_blocks_.pop_back();
    std::array<uint8_t, kChunkHeaderSize> header;
    encode_chunk(task->header, header);
    uint8_t* const payload = endpoint_->send_block(block) + kHead;
    guard_out_.begin(header);
    guard_out_.store(payload, {task->data, task->bytes});
    host_->copied_out(task->bytes);
    const Tag trailer = guard_out_.finish();
    std::copy(trailer.begin(), trailer.end(), payload + task->bytes);
    send_message(block, Kind::chunk, header, task->bytes + trailer.size());
    if (peer_polls_) say_counts();  // it may have stopped to look
    return Sent::small;
}

void FabricPath::send_message(uint32_t block, Kind kind, Bytes header, size_t payload) {
    uint8_t* const message = endpoint_->send_block(block);
    std::memset(message, 0, kSealed);
    for (size_t i = 0; i < 8; ++i) message[i] = static_cast<uint8_t>(sent_ >> (8 * i));
    message[8] = static_cast<uint8_t>(kind);
    std::copy(header.begin(), header.end(), message + kNumberBytes);
    const Seal seal = seal_of(seals_, {message, kSealed});
    std::copy(seal.begin(), seal.end(), message + kSealed);
    if (sent_ == taken_by_peer_) progress_ns_ = steady_ns();
    ++sent_;
    to_post_.push_back({block, kHead + payload});
    post_messages();
    work_again();
}

// A message's number is in it. What is said over the socket has this key, too, but not this name.
Seal FabricPath::seal_of(Hmac& mac, Bytes head) {
    constexpr std::array<uint8_t, 7> kName = {'m', 'e', 's', 's', 'a', 'g', 'e'};
    const Digest whole = mac.update(kName).update(head).finish();
    Seal out;
    std::copy_n(whole.begin(), out.size(), out.begin());
    return out;
}

void FabricPath::post_messages() {
    while (!to_post_.empty() && endpoint_->send(to_post_.front().block, to_post_.front().bytes))
        to_post_.erase(to_post_.begin());
}

// --- Receiving --------------------------------------------------------------------------------

void FabricPath::work() {
    if (!endpoint_) {  // not yet
        look();
        if (open()) work_after(kLook);
        return;
    }
    while (!to_receive_.empty() && endpoint_->receive(to_receive_.back())) to_receive_.pop_back();
    if (connected_) post_messages();
    const auto done = endpoint_->poll(kTurn);
    bool freed = false;
    for (const FabricEndpoint::Done& each : done) {
        if (each.sent) {
            free_blocks_.push_back(each.block);
            freed_ns_ = steady_ns();
            freed = true;
        } else {
            arrived(each);
        }
    }
    if (!done.empty()) news_ns_ = steady_ns();
    take_in_order();
    if (!endpoint_) return;
    if (taken_ != taken_said_) say_counts();
    if (freed) kick();
    if (endpoint_) look();
    if (endpoint_) sleep(done.size() == kTurn || !to_receive_.empty());
}

void FabricPath::arrived(const FabricEndpoint::Done& done) {
    const uint8_t* const message = endpoint_->receive_block(done.block);
    uint64_t number = 0;
    bool fits = !done.damaged && done.bytes >= kHead;
    if (fits) {
        Reader r({message, kHead});
        number = r.u64();
        const Seal seal = seal_of(proves_, {message, kSealed});
        // Nothing of it is believed before. Who is not the peer can reach the endpoint, too.
        fits = equal_constant_time(seal, {message + kSealed, kSealSize}) && number >= taken_ &&
               number < taken_ + kWindow && !early_[number % kWindow];
    }
    if (!fits) {
        host_->refused();
        to_receive_.push_back(done.block);
        return;
    }
    early_[number % kWindow] = Arrived{done.block, done.bytes};
}

void FabricPath::take_in_order() {
    while (endpoint_ && early_[taken_ % kWindow]) {
        const Arrived now = *std::exchange(early_[taken_ % kWindow], std::nullopt);
        ++taken_;
        const uint8_t* const message = endpoint_->receive_block(now.block);
        const auto kind = static_cast<Kind>(message[8]);
        const auto header = kind == Kind::chunk
                                ? decode_chunk({message + kNumberBytes, kChunkHeaderSize})
                                : std::nullopt;
        const size_t payload = now.bytes - kHead;
        if (kind != Kind::probe &&
            (!header || header->type != ChunkHeader::Type::chunk || header->path != index ||
             header->epoch != epoch || payload != header->length() + kChunkTrailerSize)) {
            fail("a damaged chunk header");
            return;
        }
        if (header) take(message);
        to_receive_.push_back(now.block);
    }
}

void FabricPath::take(const uint8_t* message) {
    const Bytes encoded(message + kNumberBytes, kChunkHeaderSize);
    const ChunkHeader header = *decode_chunk(encoded);
    guard_in_.begin(encoded);
    const ChunkSink sink = host_->begin_chunk(header);
    if (sink.verdict == ChunkSink::Verdict::invalid) {
        host_->protocol_error("a chunk for " + header.message.key.describe() +
                              " does not fit the slot it names");
        fail("protocol error");
        return;
    }
    if (sink.verdict != ChunkSink::Verdict::take) return;
    sink_ = sink;
    const uint64_t bytes = header.length();
    guard_in_.store(sink.data, {message + kHead, bytes}, header.chunks() > 1);
    host_->copied_in(bytes);
    Tag said;
    std::copy_n(message + kHead + bytes, said.size(), said.begin());
    const bool intact = guard_in_.fits(said);
    host_->finish_chunk(std::exchange(sink_, {}), intact);
    if (intact) return;
    if (guard_in_.is_keyed()) host_->refused();
    fail(guard_in_.is_keyed() ? "a chunk's payload was altered on the way: its MAC is wrong"
                              : "a chunk's checksum is wrong");
}

// --- When to look next ------------------------------------------------------------------------

bool FabricPath::busy() const {
    return !up_ || sent_ > taken_by_peer_ || sent_by_peer_ > taken_;
}

void FabricPath::work_again() {
    if (std::exchange(works_again_, true)) return;
    reactor_.post([self = shared_from_this(), this] {
        works_again_ = false;
        guarded(&FabricPath::work);
    });
}

void FabricPath::work_after(int64_t delay) {
    const int64_t due = steady_ns() + delay;
    if (timer_ != 0) {
        if (timer_due_ns_ <= due) return;
        reactor_.cancel(timer_);
    }
    timer_due_ns_ = due;
    timer_ = reactor_.after(delay, [weak = weak_from_this()] {
        const auto self = std::static_pointer_cast<FabricPath>(weak.lock());
        if (!self) return;
        self->timer_ = 0;
        self->guarded(&FabricPath::work);
    });
}

void FabricPath::sleep(bool more) {
    const bool polls = endpoint_->descriptor() < 0;
    if (more || (polls ? busy() && steady_ns() - news_ns_ < kSpin : !endpoint_->may_sleep()))
        work_again();
    else
        // Many providers connect when they are asked to send, and are to be asked again.
        work_after((polls && busy()) || !to_post_.empty() ? kPollEvery : kLook);
}

// Is what was sent still moving? While nobody looked, as on a machine that was paused, silence says
// nothing.
void FabricPath::look() {
    const int64_t now = steady_ns();
    const int64_t away = now - std::exchange(looked_ns_, now) - kLook;
    if (away > kAway) {
        progress_ns_ = std::min(now, progress_ns_ + away);
        freed_ns_ = std::min(now, freed_ns_ + away);
        started_ns_ = std::min(now, started_ns_ + away);
    }
    if (!up_) {
        if (now - started_ns_ > kConnectLimit)
            fail(device_->describe() +
                 (endpoint_ ? ": the peer's endpoint could not be reached within "
                            : ": its provider has not opened an endpoint within ") +
                 std::to_string(kConnectLimit / kSecond) + " s");
        return;
    }
    if (sent_ == taken_by_peer_) {
        // A block whose message was taken, and which never comes back, is lost to what follows.
        const int64_t out = now - std::max(freed_ns_, progress_ns_);
        if (free_blocks_.size() < kWindow && out > settings_.dead_after_ns)
            fail(device_->describe() + ": its provider has not said for " +
                 std::to_string(out / kMillisecond) + " ms that what the peer took has been sent");
        return;
    }
    const int64_t silent = now - progress_ns_;
    if (silent > settings_.dead_after_ns) {
        fail(device_->describe() + ": the peer took nothing for " +
             std::to_string(silent / kMillisecond) + " ms");
    } else if (silent > settings_.dead_after_ns / 2 && !suspect_) {
        suspect_ = true;
        host_->path_suspect(index, epoch, true);
    }
}

void FabricPath::drop_work() {
    if (timer_ != 0) reactor_.cancel(std::exchange(timer_, 0));
    if (endpoint_ && endpoint_->descriptor() >= 0) reactor_.remove(endpoint_->descriptor());
    try {
        if (endpoint_) setup_.post([closed = std::move(endpoint_)] {});
    } catch (const std::bad_alloc&) {  // it is closed here
    }
    endpoint_.reset();
    // Whatever stopped it in the middle, its next coming must find the chunk free to be taken.
    if (sink_.data != nullptr) host_->finish_chunk(std::exchange(sink_, {}), false);
}

}  // namespace pipemorph
