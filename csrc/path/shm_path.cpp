#include "path/shm_path.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "os/copy.hpp"

namespace pipemorph {
namespace {

constexpr int kHeadersPerTurn = 16;
constexpr int kHeadersAtOnce = 4;
constexpr size_t kMaxDescriptors = 4;

// Integrity in shared memory, which only the two processes can read, so that encryption is useless.
// The kernel loses none of it.
Integrity in_memory(Integrity integrity) {
    return integrity == Integrity::crc ? integrity : Integrity::mac;
}

}  // namespace

ShmPath::ShmPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
                 Fd fd, const ConnectionKeys& keys, Integrity integrity)
    : StreamPath(reactor, std::move(host), index, epoch, std::move(fd)),
      outgoing_mac_(keys.ours),
      guard_out_(in_memory(integrity), keys.ours, PayloadGuard::End::sends),
      incoming_mac_(keys.theirs),
      guard_in_(in_memory(integrity), keys.theirs, PayloadGuard::End::receives) {}

StreamPath::Sent ShmPath::flush_header() {
    iovec iov{header_out_.data() + (kHead - header_unsent_), header_unsent_};
    msghdr message{};
    message.msg_iov = &iov;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (segment_out_) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = segment_out_->fd();
        std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    const ssize_t n = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
        would_block_or_fail("sending");
        return Sent::more;
    }
    segment_out_.reset();
    header_unsent_ -= static_cast<size_t>(n);
    return header_unsent_ == 0 && small_ ? Sent::small : Sent::more;
}

StreamPath::Sent ShmPath::send_some() {
    if (header_unsent_ > 0) return flush_header();
    ChunkHeader header;
    if (index == 0) {
        while (const auto segment = host_->next_segment_to_offer()) {
            header.type = ChunkHeader::Type::segment;
            header.path = index;
            header.epoch = epoch;
            header.slot = segment->number;
            header.message.bytes = segment->memory->size();
            segment_out_ = segment->memory;
            if (send_header(header, {}) == Sent::more) return Sent::more;
        }
    }
    auto task = host_->next_chunk(index, epoch);
    if (!task) return Sent::nothing;
    const SlotGrant& slot = *task->message->slot;
    const auto segment = host_->peer_segment(slot.segment);
    const uint64_t mapped = segment ? segment->size() : 0;
    // Sums of the peer's values could wrap around.
    const uint64_t room = slot.offset <= mapped ? mapped - slot.offset : 0;
    const uint64_t first = task->header.offset();
    if (first > room || task->bytes > room - first) {
        host_->protocol_error("a slot was granted outside of the memory that is mapped for it");
        return Sent::nothing;
    }
    uint8_t* const to = segment->data() + slot.offset + first;
    // A large message does not fit the caches. A cached write would first fetch each line from the
    // receiver's cache, which had it last.
    if (task->data != to) {  // else the application wrote it there
        if (task->message->chunks > 1)
            copy_past_caches(to, task->data, task->bytes);
        else
            std::memcpy(to, task->data, task->bytes);
        host_->copied_out(task->bytes);
    }
    return send_header(task->header, {task->data, task->bytes});
}

StreamPath::Sent ShmPath::send_header(const ChunkHeader& header, Bytes payload) {
    const auto head = std::span(header_out_).first<kChunkHeaderSize>();
    encode_chunk(header, head);
    if (guard_out_.is_keyed()) {
        const Mac mac = outgoing_mac_.mac(head);
        std::copy(mac.begin(), mac.end(), header_out_.begin() + kChunkHeaderSize);
        guard_out_.begin(head);
        guard_out_.pass(payload);
        const Tag payload_mac = guard_out_.finish();
        std::copy(payload_mac.begin(), payload_mac.end(), header_out_.begin() + kPayloadMac);
    }
    header_unsent_ = kHead;
    small_ = payload.size() <= kSmall;
    return flush_header();
}

void ShmPath::receive_some() {
    std::array<uint8_t, kHead * kHeadersAtOnce> heads;
    for (int turn = 0; open() && turn < kHeadersPerTurn && !should_yield();
         turn += kHeadersAtOnce) {
        iovec iov{heads.data(), heads.size()};
        msghdr message{};
        message.msg_iov = &iov;
        message.msg_iovlen = 1;
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxDescriptors)];
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (n < 0) {
            would_block_or_fail("receiving");
            return;
        }
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; ++i) {
                int fd;
                std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
                descriptors_.emplace_back(fd);
            }
        }
        if (n == 0) {
            fail("the peer closed the connection");
            return;
        }
        for (Bytes rest = Bytes(heads).first(static_cast<size_t>(n)); !rest.empty();) {
            const Bytes part = rest.first(std::min(rest.size(), kHead - header_have_));
            std::copy(part.begin(), part.end(), header_in_.data() + header_have_);
            header_have_ += part.size();
            rest = rest.subspan(part.size());
            if (header_have_ == kHead && !process_header()) return;
        }
        if (static_cast<size_t>(n) < heads.size()) return;  // no more has arrived
    }
}

bool ShmPath::process_header() {
    header_have_ = 0;
    if (guard_in_.is_keyed()) {
        const Bytes head(header_in_);
        // No field is used before this check.
        if (!incoming_mac_.fits(head.first(kChunkHeaderSize),
                                head.subspan(kChunkHeaderSize, kMacSize))) {
            host_->refused();
            fail("a chunk's header was altered or added on the way: its MAC is wrong");
            return false;
        }
        guard_in_.begin(head.first(kChunkHeaderSize));
    }
    const auto header = decode_chunk(Bytes(header_in_).first(kChunkHeaderSize));
    if (!header || header->path != index || header->epoch != epoch) {
        fail("a damaged chunk header");
        return false;
    }
    if (header->type == ChunkHeader::Type::segment) {
        if (descriptors_.empty()) {
            fail("a segment without its descriptor");
            return false;
        }
        Fd fd = std::move(descriptors_.front());
        descriptors_.pop_front();
        if (!retired()) host_->segment_offered(header->slot, header->message.bytes, std::move(fd));
        return true;
    }
    note_size(header->chunks() > 1);
    if (retired()) {
        host_->stale_chunk();
        return true;
    }
    // The payload was in the slot before its header was sent.
    const ChunkSink sink = host_->begin_chunk(*header);
    if (sink.verdict == ChunkSink::Verdict::invalid) {
        host_->protocol_error("a chunk for " + header->message.key.describe() +
                              " does not fit the slot it names");
        fail("protocol error");
        return false;
    }
    if (sink.verdict == ChunkSink::Verdict::take) {
        sink_ = sink;
        const bool intact = is_proved(sink.data, header->length());
        host_->finish_chunk(std::exchange(sink_, {}), intact);
        if (!intact) {
            host_->refused();
            fail("a chunk's payload was altered on the way: its MAC is wrong");
            return false;
        }
    }
    return true;
}

bool ShmPath::is_proved(const uint8_t* payload, uint64_t bytes) {
    if (!guard_in_.is_keyed()) return true;
    guard_in_.pass({payload, bytes});
    Tag payload_mac;
    std::copy_n(header_in_.begin() + kPayloadMac, payload_mac.size(), payload_mac.begin());
    return guard_in_.fits(payload_mac);
}

void ShmPath::drop_work() {
    header_unsent_ = 0;
    segment_out_.reset();
    // An interrupted chunk must be free to be received again.
    if (sink_.data != nullptr) host_->finish_chunk(std::exchange(sink_, {}), false);
}

}  // namespace pipemorph
