#include "path/tcp_path.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "crypto/crc32c.hpp"
#include "os/socket.hpp"

namespace pipemorph {
namespace {

// Bytes to read before other sockets of the same thread get their turn.
constexpr size_t kReadTurn = size_t{2} << 20;
constexpr size_t kWaste = size_t{64} << 10;

}  // namespace

TcpPath::TcpPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
                 Fd fd)
    : StreamPath(reactor, std::move(host), index, epoch, std::move(fd)) {
    set_no_delay(fd_);
}

bool TcpPath::send_some() {
    if (!task_) {
        task_ = host_->next_chunk(index, epoch);
        if (!task_) return false;
        task_->header.crc = crc32c(0, {task_->data, task_->bytes});
        encode_chunk(task_->header, header_out_);
        sent_ = 0;
    }
    iovec iov[2];
    int parts = 0;
    if (sent_ < kChunkHeaderSize) {
        iov[parts++] = {header_out_.data() + sent_, kChunkHeaderSize - sent_};
    }
    const size_t payload_sent = sent_ > kChunkHeaderSize ? sent_ - kChunkHeaderSize : 0;
    iov[parts++] = {const_cast<uint8_t*>(task_->data) + payload_sent, task_->bytes - payload_sent};
    msghdr message{};
    message.msg_iov = iov;
    message.msg_iovlen = static_cast<size_t>(parts);
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return would_block_or_fail("sending");
    sent_ += static_cast<size_t>(n);
    if (sent_ == kChunkHeaderSize + task_->bytes) task_.reset();
    return true;
}

void TcpPath::receive_some() {
    size_t turn = 0;
    while (open() && turn < kReadTurn) {
        iovec iov[2];
        size_t parts = 0;
        size_t payload_room = 0;
        if (chunk_) {
            payload_room = chunk_->length() - payload_have_;
            if (sink_.data != nullptr) {
                iov[parts++] = {sink_.data + payload_have_, payload_room};
                // The next chunk's header usually comes with the end of this one.
                iov[parts++] = {header_in_.data(), kChunkHeaderSize};
            } else {
                if (waste_.empty()) waste_.resize(kWaste);
                payload_room = std::min(payload_room, waste_.size());
                iov[parts++] = {waste_.data(), payload_room};
            }
        } else {
            iov[parts++] = {header_in_.data() + header_have_, kChunkHeaderSize - header_have_};
        }
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
        auto left = static_cast<size_t>(n);
        turn += left;
        if (chunk_) {
            const size_t payload = std::min(left, payload_room);
            left -= payload;
            if (!payload_received(payload)) return;
        }
        header_have_ += left;
        if (!chunk_ && header_have_ == kChunkHeaderSize && !header_received()) return;
    }
}

bool TcpPath::header_received() {
    header_have_ = 0;
    chunk_ = decode_chunk(header_in_);
    payload_have_ = 0;
    crc_ = 0;
    sink_ = {};
    if (!chunk_ || chunk_->type != ChunkHeader::Type::chunk || chunk_->path != index ||
        chunk_->epoch != epoch) {
        chunk_.reset();
        fail("a damaged chunk header");
        return false;
    }
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

bool TcpPath::payload_received(size_t bytes) {
    if (sink_.data != nullptr) crc_ = crc32c(crc_, {sink_.data + payload_have_, bytes});
    payload_have_ += bytes;
    if (payload_have_ < chunk_->length()) return true;
    const bool taken = sink_.data != nullptr;
    const bool intact = crc_ == chunk_->crc;
    if (taken) host_->finish_chunk(std::exchange(sink_, {}), intact);
    chunk_.reset();
    if (taken && !intact) {
        fail("a chunk's checksum is wrong");
        return false;
    }
    return true;
}

void TcpPath::drop_work() {
    task_.reset();
    if (sink_.data != nullptr) {
        host_->finish_chunk(sink_, false);
        if (retired()) host_->stale_chunk();  // its remaining bytes are still to come
    }
    sink_ = {};
}

}  // namespace pipemorph
