#include "path/tcp_path.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include "os/socket.hpp"

namespace pipemorph {
namespace {

// Bytes to read before other sockets of the same thread are served.
constexpr size_t kReadTurn = size_t{2} << 20;
// Bytes to sum and then send, or to receive and then sum: they fit a core's cache.
constexpr size_t kPiece = size_t{512} << 10;
// Size of the buffer for dropped bytes.
constexpr size_t kDiscardBuffer = size_t{128} << 10;
// Send buffer between two processes of one host: queued bytes would only evict payloads from the
// cache. Between hosts the kernel sizes the buffer by bandwidth and delay.
constexpr int kLocalSendBuffer = 256 << 10;

// Buffer for dropped bytes, one per data thread, since only these read large chunks.
std::array<uint8_t, kDiscardBuffer>& discard_buffer() {
    thread_local const auto buffer = std::make_unique<std::array<uint8_t, kDiscardBuffer>>();
    return *buffer;
}

}  // namespace

TcpPath::TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
                 Fd fd, const ConnectionKeys& keys, Integrity integrity)
    : StreamPath(reactor, std::move(host), index, epoch, std::move(fd)),
      outgoing_mac_(keys.ours),
      guard_out_(integrity, keys.ours, PayloadGuard::End::sends),
      incoming_mac_(keys.theirs),
      guard_in_(integrity, keys.theirs, PayloadGuard::End::receives) {
    set_no_delay(fd_);
    if (is_local(fd_)) set_send_buffer(fd_, kLocalSendBuffer);
}

StreamPath::Sent TcpPath::send_some() {
    if (!task_) {
        task_ = host_->next_chunk(index, epoch);
        if (!task_) return Sent::nothing;
        const auto header = std::span(head_out_).first<kChunkHeaderSize>();
        encode_chunk(task_->header, header);
        const Mac mac = outgoing_mac_.mac(header);
        std::copy(mac.begin(), mac.end(), head_out_.begin() + kChunkHeaderSize);
        sent_ = guarded_ = 0;
        trailer_made_ = false;
        guard_out_.begin(header);
    }
    const size_t payload_end = kHead + task_->bytes;
    const size_t end = payload_end + kChunkTrailerSize;
    while (sent_ < end) {
        iovec iov[3];
        size_t parts = 0;
        if (sent_ < kHead) iov[parts++] = {head_out_.data() + sent_, kHead - sent_};
        const size_t from = sent_ > kHead ? sent_ - kHead : 0;
        size_t to = std::min(from + kPiece, task_->bytes);
        if (from < to) {
            const uint8_t* source = guard_payload(from, to);
            iov[parts++] = {const_cast<uint8_t*>(source), to - from};
        }
        if (to == task_->bytes) {
            const size_t gone = sent_ > payload_end ? sent_ - payload_end : 0;
            iov[parts++] = {trailer_out_.data() + gone, kChunkTrailerSize - gone};
        }
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = parts;
        const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            would_block_or_fail("sending");
            return Sent::more;
        }
        sent_ += static_cast<size_t>(n);
        // A short count means that the buffer is full.
        size_t offered = 0;
        for (size_t i = 0; i < parts; ++i) offered += iov[i].iov_len;
        if (static_cast<size_t>(n) < offered) return Sent::more;
    }
    const bool small = task_->bytes <= kSmall;
    task_.reset();
    return small ? Sent::small : Sent::more;
}

// Adds payload bytes to the checksum or MAC, or encrypts them. Returns the bytes from `from` on as
// they are sent, up to `to`, which may be lowered.
const uint8_t* TcpPath::guard_payload(size_t from, size_t& to) {
    if (!guard_out_.encrypts()) {
        if (guarded_ < to) guard_out_.pass({task_->data + guarded_, to - guarded_});
        guarded_ = std::max(guarded_, to);
    } else if (from == guarded_) {
        encrypted_.resize(kPiece);
        guard_out_.store(encrypted_.data(), {task_->data + from, to - from});
        host_->copied_out(to - from);
        piece_at_ = from;
        guarded_ = to;
    }
    if (guarded_ == task_->bytes && !trailer_made_) {
        trailer_out_ = guard_out_.finish();
        trailer_made_ = true;
    }
    if (!guard_out_.encrypts()) return task_->data + from;
    to = guarded_;
    return encrypted_.data() + (from - piece_at_);
}

void TcpPath::receive_some() {
    // Small chunks are read together with their header. Bytes of a large one would be copied twice.
    std::array<uint8_t, kSmall> ahead;
    for (size_t turn = 0; open() && turn < kReadTurn && !should_yield();) {
        iovec iov[3];
        size_t parts = 0;
        size_t room = 0;
        const uint64_t missing = chunk_ ? chunk_->length() - payload_have_ : 0;
        if (missing > 0) {
            if (sink_.data != nullptr) {
                room = std::min<uint64_t>(missing, kPiece);
                iov[parts++] = {sink_.data + payload_have_, room};
            } else {
                room = std::min<uint64_t>(missing, kDiscardBuffer);
                iov[parts++] = {discard_buffer().data(), room};
            }
        }
        // The trailer and the next chunk's header usually arrive with the end of the payload.
        if (room == missing)
            iov[parts++] = {between_.data() + between_have_, between_.size() - between_have_};
        if (!is_large() && room == missing) iov[parts++] = {ahead.data(), ahead.size()};
        msghdr message{};
        message.msg_iov = iov;
        message.msg_iovlen = parts;
        const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
        if (n < 0) {
            would_block_or_fail("receiving");
            return;
        }
        if (n == 0) {
            fail("the peer closed the connection");
            return;
        }
        const auto got = static_cast<size_t>(n);
        size_t offered = 0;
        for (size_t i = 0; i < parts; ++i) offered += iov[i].iov_len;
        turn += got;
        store_payload(std::min(got, room));
        const size_t rest = got - std::min(got, room);
        const size_t between = std::min(rest, between_.size() - between_have_);
        between_have_ += between;
        if (!process_between()) return;
        if (!consume_ahead(Bytes(ahead).first(rest - between))) return;
        if (got < offered) return;  // no more has arrived
    }
}

// Consumes bytes that were read ahead.
bool TcpPath::consume_ahead(Bytes ahead) {
    while (!ahead.empty()) {
        const uint64_t missing = chunk_ ? chunk_->length() - payload_have_ : 0;
        if (missing > 0) {
            const Bytes part = ahead.first(std::min<uint64_t>(missing, ahead.size()));
            if (sink_.data != nullptr) {
                guard_in_.store(sink_.data + payload_have_, part);
                host_->copied_in(part.size());
            }
            payload_have_ += part.size();
            ahead = ahead.subspan(part.size());
            continue;
        }
        const Bytes part = ahead.first(std::min(ahead.size(), between_.size() - between_have_));
        std::copy(part.begin(), part.end(), between_.data() + between_have_);
        between_have_ += part.size();
        ahead = ahead.subspan(part.size());
        if (!process_between()) return false;
    }
    return true;
}

// Handles a complete trailer, then a complete header.
bool TcpPath::process_between() {
    if (chunk_ && between_have_ >= kChunkTrailerSize && !process_trailer()) return false;
    return between_have_ < between_.size() || process_header();
}

void TcpPath::store_payload(size_t bytes) {
    if (sink_.data == nullptr || bytes == 0) {
        // Dropped bytes, or only the trailer and the next header.
    } else {
        uint8_t* const here = sink_.data + payload_have_;
        guard_in_.store(here, {here, bytes});
    }
    payload_have_ += bytes;
}

bool TcpPath::process_trailer() {
    Tag trailer;
    std::copy_n(between_.begin(), trailer.size(), trailer.begin());
    const bool stored = sink_.data != nullptr;
    const bool intact = stored && guard_in_.fits(trailer);
    chunk_.reset();
    if (stored) host_->finish_chunk(std::exchange(sink_, {}), intact);
    if (stored && !intact) {
        if (guard_in_.is_keyed()) host_->refused();
        fail(guard_in_.is_keyed() ? "a chunk's payload was altered on the way: its MAC is wrong"
                                  : "a chunk's checksum is wrong");
        return false;
    }
    return true;
}

bool TcpPath::process_header() {
    between_have_ = 0;
    payload_have_ = 0;
    sink_ = {};
    const Bytes head = Bytes(between_).subspan(kChunkTrailerSize);
    // No field is used before this check.
    if (!incoming_mac_.fits(head.first(kChunkHeaderSize), head.subspan(kChunkHeaderSize))) {
        host_->refused();
        fail("a chunk's header was altered or added on the way: its MAC is wrong");
        return false;
    }
    guard_in_.begin(head.first(kChunkHeaderSize));
    chunk_ = decode_chunk(head.first(kChunkHeaderSize));
    if (!chunk_ || chunk_->type != ChunkHeader::Type::chunk || chunk_->path != index ||
        chunk_->epoch != epoch) {
        chunk_.reset();
        fail("a damaged chunk header");
        return false;
    }
    note_size(chunk_->message.bytes > kSmall);
    if (retired()) {
        host_->stale_chunk();
        return true;
    }
    sink_ = host_->begin_chunk(*chunk_);
    if (sink_.verdict == ChunkSink::Verdict::invalid) {
        host_->protocol_error("a chunk for " + chunk_->message.key.describe() +
                              " does not fit the slot it names");
        fail("protocol error");
        return false;
    }
    return true;
}

void TcpPath::drop_work() {
    task_.reset();
    if (sink_.data != nullptr) {
        host_->finish_chunk(sink_, false);
        if (retired()) host_->stale_chunk();  // its remaining bytes will be dropped
    }
    sink_ = {};
}

}  // namespace pipemorph
