#include "path/rdma_path.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "os/clock.hpp"
#include "os/numa.hpp"

namespace pipemorph {
namespace {

constexpr uint32_t kBlocks = 8;  // chunks in staging memory; more are added for a long wire
constexpr uint64_t kStageAtOnce = uint64_t{64} << 20;  // takes some 20 ms to be registered
// Posted receives. A sender may use up all of them: its window opens with the card's
// acknowledgements, not with this thread's progress. Its card then retries until there are new
// ones.
constexpr uint32_t kReceives = 256;
// Longest queue: more than 16 GiB under way, in chunks of 1 MiB, is not worth its memory.
constexpr uint64_t kMostWrites = 16384;
constexpr int kTurn = 16;              // completions to handle before other paths of this thread
constexpr uint32_t kHeaderRoom = 256;  // for one encoded chunk header
static_assert(kChunkHeaderSize <= kHeaderRoom);
constexpr int64_t kLook = 50 * kMillisecond;
constexpr int64_t kAway = 200 * kMillisecond;  // longer than the delays of a busy machine
constexpr int64_t kProbeEvery = 500 * kMillisecond;
constexpr int64_t kRetireAgain = 50 * kMillisecond;

// An immediate value is 8 bits of lane and 22 bits of chunk number.
constexpr uint32_t kLanes = 256;
constexpr uint32_t kChunkBits = 22;
static_assert(kMaxChunks <= uint64_t{1} << kChunkBits);

// The kind of a work request is in its id, the only valid field of a failed completion.
enum class Work : uint64_t { write = 1, probe = 2, receive = 3, header = 4 };
constexpr uint64_t work_id(Work kind, uint32_t value) {
    return static_cast<uint64_t>(kind) << 32 | value;
}

// 4.096 µs × 2^15 is 134 ms, and six repetitions: a dead path is known within a second.
constexpr uint8_t kAckTimeout = 15;
constexpr uint8_t kRetries = 6;
// 12 is 0.64 ms, and 7 means forever: a receiver whose thread is delayed may use up its receives
// and be healthy. The progress check gives up one that does not return.
constexpr uint8_t kReceiverNotReadyTimer = 12;
constexpr uint8_t kReceiverNotReadyRetries = 7;

uint32_t random24() {
    static thread_local std::mt19937 engine{std::random_device{}()};
    return engine() & 0xffffff;
}

std::string system_error(const char* what, int error) {
    return std::string(what) + ": " + std::strerror(error);
}

}  // namespace

RdmaPath::RdmaPath(std::shared_ptr<Rail> rail, std::shared_ptr<PathHost> host, uint32_t path_index,
                   uint32_t path_epoch, Settings settings)
    : DataPath(rail->reactor(), std::move(host), path_index, path_epoch),
      settings_(settings),
      rail_(std::move(rail)),
      device_(rail_->device()),
      verbs_(device_->verbs),
      most_writes_(static_cast<uint32_t>(
          std::clamp<uint64_t>(settings.most_staged / settings.chunk_bytes, kBlocks, kMostWrites))),
      lane_message_(kLanes) {
    try {
        open();
    } catch (...) {
        destroy();
        throw;
    }
}

void RdmaPath::open() {
    const numa::OnNode here(rail_->numa_node());  // the queues' own memory, too
    const PortAddress port = rail_->address();
    add_blocks(kBlocks);
    const auto fail = [&](const std::string& why) {
        throw EngineError(rail_->describe() + ": " + why);
    };
    channel_ = verbs_.create_comp_channel(device_->context);
    if (channel_ == nullptr) fail(system_error("no completion channel", errno));
    ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
    if (!make_queues() && most_writes_ > kBlocks) {
        // Some devices have no queues of that length, which lowers the limit of chunks under way.
        most_writes_ = kBlocks;
        make_queues();
    }
    if (cq_ == nullptr) fail(system_error("no completion queue", errno));
    if (qp_ == nullptr) fail(system_error("no queue pair", errno));
    headers_ = rail_->borrow_staging(size_t{kReceives + most_writes_} * kHeaderRoom);
    writes_.resize(most_writes_);
    for (uint32_t i = most_writes_; i-- > 0;) free_writes_.push_back(i);
    abi::QpAttr attr{};
    attr.state = abi::kQpInit;
    attr.port = rail_->port();
    attr.access = abi::kLocalWrite | abi::kRemoteWrite;
    const int error = verbs_.modify_qp(
        qp_, &attr, abi::kSetState | abi::kSetPkeyIndex | abi::kSetPort | abi::kSetAccess);
    if (error != 0) fail(system_error("queue pair to INIT", error));
    for (uint32_t i = 0; i < kReceives; ++i)
        if (!post_receive(i)) fail("no room for receives");
    local_ = {qp_->number, random24(), port.gid, port.lid, port.mtu};
    gid_index_ = port.gid_index;
    infiniband_ = port.infiniband;
}

// Makes the queues for the largest possible number of chunks under way.
bool RdmaPath::make_queues() {
    const uint32_t sends = 2 * most_writes_ + 4;
    cq_ = verbs_.create_cq(device_->context, static_cast<int>(kReceives + sends), nullptr, channel_,
                           0);
    if (cq_ == nullptr) return false;
    abi::QpInitAttr init{};
    init.send_cq = init.recv_cq = cq_;
    init.cap = {sends, kReceives, 1, 1, 0};
    init.type = abi::kQpReliable;
    qp_ = verbs_.create_qp(device_->pd, &init);
    if (qp_ == nullptr && most_writes_ > kBlocks) {
        const int error = errno;
        verbs_.destroy_cq(std::exchange(cq_, nullptr));
        errno = error;
    }
    return qp_ != nullptr;
}

void RdmaPath::add_blocks(uint32_t count) {
    const size_t stride = settings_.chunk_bytes;
    auto memory = rail_->borrow_staging(stride * count);
    for (uint32_t i = 0; i < count; ++i) {
        free_blocks_.push_back(static_cast<uint32_t>(blocks_.size()));
        blocks_.push_back({memory->data() + i * stride, memory->lkey()});
    }
    staging_.push_back(std::move(memory));
}

// Adds staging memory when the window has outgrown it.
bool RdmaPath::stage_more() {
    const auto wanted = std::min<uint64_t>(pace_.window / settings_.chunk_bytes, most_writes_);
    if (staged_all_ || blocks_.size() >= wanted) return false;
    const uint64_t at_once = std::max<uint64_t>(kStageAtOnce / settings_.chunk_bytes, kBlocks);
    const uint64_t more =
        std::min({at_once, uint64_t{blocks_.size()}, most_writes_ - blocks_.size()});
    const uint64_t bytes = more * settings_.chunk_bytes;
    staged_all_ = !host_->claim_staging(bytes);
    if (!staged_all_) {
        claimed_ += bytes;
        try {
            add_blocks(static_cast<uint32_t>(more));
        } catch (const EngineError&) {
            staged_all_ = true;  // the limit of locked memory, most likely
            claimed_ -= bytes;
            host_->disclaim_staging(bytes);
        }
    }
    // The window is limited to the memory that there is.
    if (staged_all_)
        host_->path_limited(index, epoch, uint64_t{settings_.chunk_bytes} * blocks_.size());
    return !free_blocks_.empty();
}

RdmaPath::~RdmaPath() {
    destroy();
}

void RdmaPath::connect(const QpAddress& peer, bool speaks_first) {
    speaks_first_ = speaks_first;
    const RailOptions& options = rail_->options();
    abi::QpAttr attr{};
    attr.state = abi::kQpReadyToReceive;
    attr.path_mtu = std::min(local_.mtu, peer.mtu);
    attr.destination_qp = peer.number;
    attr.rq_psn = peer.first_packet;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = kReceiverNotReadyTimer;
    attr.address.port = rail_->port();
    attr.address.service_level = options.service_level;
    attr.address.dlid = peer.lid;
    // On InfiniBand the LID is enough within a subnet; RoCE needs the GID.
    if (!infiniband_ || options.gid_index >= 0) {
        attr.address.is_global = 1;
        std::memcpy(attr.address.route.destination.raw, peer.gid.data(), peer.gid.size());
        attr.address.route.source_index = static_cast<uint8_t>(gid_index_);
        attr.address.route.hop_limit = 64;
        attr.address.route.traffic_class = options.traffic_class;
    }
    int error =
        verbs_.modify_qp(qp_, &attr,
                         abi::kSetState | abi::kSetAddress | abi::kSetMtu | abi::kSetDestinationQp |
                             abi::kSetRqPsn | abi::kSetMaxDestRdAtomic | abi::kSetMinRnrTimer);
    if (error != 0)
        throw EngineError(rail_->describe() + ": queue pair to " + gid_text(peer.gid) +
                          " not ready to receive: " + std::strerror(error));
    attr = {};
    attr.state = abi::kQpReadyToSend;
    attr.timeout = kAckTimeout;
    attr.retry_count = kRetries;
    attr.rnr_retry = kReceiverNotReadyRetries;
    attr.sq_psn = local_.first_packet;
    attr.max_rd_atomic = 1;
    error = verbs_.modify_qp(qp_, &attr,
                             abi::kSetState | abi::kSetTimeout | abi::kSetRetryCount |
                                 abi::kSetRnrRetry | abi::kSetSqPsn | abi::kSetMaxRdAtomic);
    if (error != 0)
        throw EngineError(rail_->describe() + ": queue pair to " + gid_text(peer.gid) +
                          " not ready to send: " + std::strerror(error));
}

// Runs a step whose exception (no memory or descriptors) ends only this path: the fence finds the
// missing chunks. During the end there must be no exception.
void RdmaPath::guarded(void (RdmaPath::*what)()) {
    if (qp_ == nullptr || breaking_) return;
    try {
        (this->*what)();
    } catch (const std::exception& e) {
        if (breaking_) throw;
        break_off(rail_->describe() + ": " + e.what());
    }
}

void RdmaPath::begin() {
    const auto self = std::static_pointer_cast<RdmaPath>(shared_from_this());
    rail_->watch(std::shared_ptr<RailUser>(self, this));
    reactor_.add(channel_->fd, EPOLLIN,
                 [self](uint32_t) { self->guarded(&RdmaPath::on_completions); });
    watched_ = true;
    progress_ns_ = last_proof_ns_ = checked_ns_ = steady_ns();
    if (speaks_first_) post_probe();
    on_completions();
    check_progress();
}

// --- Completions ------------------------------------------------------------------------------

void RdmaPath::on_completions() {
    if (qp_ == nullptr || breaking_) return;
    abi::Cq* cq = nullptr;
    void* user = nullptr;
    unsigned int events = 0;
    while (verbs_.get_cq_event(channel_, &cq, &user) == 0) ++events;
    if (events > 0) verbs_.ack_cq_events(cq_, events);
    bool empty = drain();
    if (empty && !breaking_) {
        // Later completions cause an event; the second drain finds earlier ones.
        device_->context->ops.req_notify_cq(cq_, 0);
        empty = drain();
    }
    if (!empty) drain_later();
}

// Handles a bounded number of completions. True if there are no more.
bool RdmaPath::drain() {
    abi::Wc wcs[kTurn];
    const int n = device_->context->ops.poll_cq(cq_, kTurn, wcs);
    if (n < 0) record_error("its completion queue cannot be read");
    for (int i = 0; i < n; ++i) handle(wcs[i]);
    pump();
    if (!breaking_ && !first_error_.empty()) break_off(std::exchange(first_error_, {}));
    return n < kTurn;
}

void RdmaPath::drain_later() {
    if (std::exchange(drains_later_, true)) return;
    reactor_.post([self = std::static_pointer_cast<RdmaPath>(shared_from_this())] {
        self->drains_later_ = false;
        self->guarded(&RdmaPath::on_completions);
    });
}

void RdmaPath::handle(const abi::Wc& wc) {
    const auto kind = static_cast<Work>(wc.id >> 32);
    if (wc.status != abi::kWcSuccess) {
        // After the first error all other requests are flushed.
        if (wc.status != abi::kWcFlushed || first_error_.empty())
            record_error(std::string(verbs_.wc_status_str(wc.status)) + " (status " +
                         std::to_string(wc.status) + ", vendor error " +
                         std::to_string(wc.vendor_error) + ")");
        return;
    }
    switch (kind) {
        case Work::write:
            write_completed(static_cast<uint32_t>(wc.id));
            break;
        case Work::probe:
            probe_completed();
            break;
        case Work::receive:
            received(wc);
            break;
        case Work::header:
            break;
    }
}

void RdmaPath::record_error(const std::string& why) {
    if (first_error_.empty()) first_error_ = rail_->describe() + ": " + why;
}

// --- Receiving --------------------------------------------------------------------------------

bool RdmaPath::post_receive(uint32_t buffer) {
    const size_t at = size_t{buffer} * kHeaderRoom;
    abi::Sge sge{reinterpret_cast<uint64_t>(headers_->data() + at), kHeaderRoom, headers_->lkey()};
    abi::RecvWr wr{work_id(Work::receive, buffer), nullptr, &sge, 1};
    abi::RecvWr* bad = nullptr;
    return device_->context->ops.post_recv(qp_, &wr, &bad) == 0;
}

void RdmaPath::received(const abi::Wc& wc) {
    const auto buffer = static_cast<uint32_t>(wc.id);
    if (wc.opcode == abi::kWcRecvWriteWithImmediate)
        process_chunk(ntohl(wc.immediate), wc.bytes);
    else if (wc.bytes > 0)
        process_header(wc, buffer);
    else if (!speaks_first_ && !up_ && !probe_out_ && !breaking_)
        post_probe();  // the peer reaches us; test the other direction
    if (!breaking_ && !post_receive(buffer)) record_error("a receive could not be posted");
}

void RdmaPath::process_header(const abi::Wc& wc, uint32_t buffer) {
    const size_t at = size_t{buffer} * kHeaderRoom;
    auto header = wc.bytes == kChunkHeaderSize + sizeof(uint32_t)
                      ? decode_chunk({headers_->data() + at, kChunkHeaderSize})
                      : std::nullopt;
    uint32_t lane = 0;
    std::memcpy(&lane, headers_->data() + at + kChunkHeaderSize, sizeof lane);
    lane = ntohl(lane);
    if (!header || header->path != index || header->epoch != epoch || lane >= kLanes) {
        record_error("a damaged chunk header");
        return;
    }
    lanes_[lane] = std::move(*header);
}

void RdmaPath::process_chunk(uint32_t immediate, uint32_t bytes) {
    const uint32_t chunk = immediate & ((1U << kChunkBits) - 1);
    const auto lane = lanes_.find(immediate >> kChunkBits);
    if (lane == lanes_.end()) {
        record_error("a chunk of a message that was never opened");
        return;
    }
    ChunkHeader header = lane->second;
    header.index = chunk;
    if (chunk >= header.chunks() || bytes != header.length()) {
        host_->protocol_error("a chunk of " + header.message.key.describe() + " of the wrong size");
        return;
    }
    const ChunkSink sink = host_->begin_chunk(header);
    if (sink.verdict == ChunkSink::Verdict::invalid) {
        host_->protocol_error("a chunk for " + header.message.key.describe() +
                              " does not fit the slot it names");
        return;
    }
    if (sink.verdict != ChunkSink::Verdict::take) return;
    host_->finish_chunk(sink, true);  // the card has written it to the slot
}

// --- Sending ----------------------------------------------------------------------------------

bool RdmaPath::post(abi::SendWr& first) {
    if (writes_out_ == 0 && !probe_out_) progress_ns_ = steady_ns();
    abi::SendWr* bad = nullptr;
    if (const int error = device_->context->ops.post_send(qp_, &first, &bad); error != 0) {
        record_error(system_error("posting", error));
        return false;
    }
    return true;
}

void RdmaPath::pump() {
    while (qp_ != nullptr && up_ && !suspect_ && !breaking_ && first_error_.empty() &&
           !free_writes_.empty() && (!free_blocks_.empty() || stage_more()) && send_chunk()) {
    }
}

bool RdmaPath::send_chunk() {
    const auto task = host_->next_chunk(index, epoch);
    if (!task) return false;
    const auto remote = host_->remote_slot(index, *task->message->slot);
    if (!remote || task->header.offset() + task->bytes > remote->bytes) {
        host_->protocol_error("a slot was granted outside of the memory that its rail may write");
        return false;
    }
    const uint32_t number = free_writes_.back();
    free_writes_.pop_back();
    abi::Sge payload{0, static_cast<uint32_t>(task->bytes), 0};
    if (const auto key = host_->payload_key(*device_, task->data)) {
        writes_[number].message = task->message;
        payload.address = reinterpret_cast<uint64_t>(task->data);
        payload.lkey = *key;
    } else {
        const uint32_t block = free_blocks_.back();
        free_blocks_.pop_back();
        writes_[number].block = block;
        const auto [staged, lkey] = blocks_[block];
        std::memcpy(staged, task->data, task->bytes);
        host_->copied_out(task->bytes);
        payload.address = reinterpret_cast<uint64_t>(staged);
        payload.lkey = lkey;
    }

    const uint64_t message = task->message->info.id;
    auto lane = lane_of_.find(message);
    const bool opens = lane == lane_of_.end();
    if (opens) {
        const uint64_t next = next_lane_++;
        uint64_t& taken_by = lane_message_[next % kLanes];
        lane_of_.erase(taken_by);  // its next chunk, if any, opens a new lane
        taken_by = message;
        lane = lane_of_.emplace(message, next % kLanes).first;
    }
    abi::SendWr write{};
    write.id = work_id(Work::write, number);
    write.sges = &payload;
    write.sge_count = 1;
    write.opcode = abi::kWriteWithImmediate;
    write.flags = abi::kSignaled;
    write.immediate = htonl(static_cast<uint32_t>(lane->second) << kChunkBits | task->header.index);
    write.rdma.address = remote->address + task->header.offset();
    write.rdma.rkey = remote->key;

    abi::Sge head{};
    abi::SendWr open{};
    if (opens) {
        uint8_t* const room = headers_->data() + size_t{kReceives + number} * kHeaderRoom;
        std::array<uint8_t, kChunkHeaderSize> encoded;
        encode_chunk(task->header, encoded);
        std::memcpy(room, encoded.data(), encoded.size());
        const uint32_t its_lane = htonl(static_cast<uint32_t>(lane->second));
        std::memcpy(room + kChunkHeaderSize, &its_lane, sizeof its_lane);
        head = {reinterpret_cast<uint64_t>(room), kChunkHeaderSize + sizeof its_lane,
                headers_->lkey()};
        open.id = work_id(Work::header, number);
        open.next = &write;
        open.sges = &head;
        open.sge_count = 1;
        open.opcode = abi::kSend;
    }
    if (!post(opens ? open : write)) return false;
    ++writes_out_;
    return true;
}

void RdmaPath::write_completed(uint32_t number) {
    progress_ns_ = last_proof_ns_ = steady_ns();
    const Write done = std::exchange(writes_[number], {});
    free_writes_.push_back(number);
    if (done.block) free_blocks_.push_back(*done.block);
    --writes_out_;
    pace_ = host_->chunk_delivered(index, epoch);
    if (suspect_) {
        suspect_ = false;
        host_->path_suspect(index, epoch, false);
    }
}

void RdmaPath::post_probe() {
    abi::SendWr probe{};
    probe.id = work_id(Work::probe, 0);
    probe.opcode = abi::kSend;
    probe.flags = abi::kSignaled;
    if (!post(probe)) return;
    probe_out_ = true;
    probe_ns_ = steady_ns();
}

void RdmaPath::probe_completed() {
    const int64_t now = steady_ns();
    const int64_t rtt = now - probe_ns_;
    probe_out_ = false;
    progress_ns_ = last_proof_ns_ = now;
    if (writes_out_ == 0) host_->path_measured(index, epoch, pace_.bytes_per_second, rtt);
    if (suspect_) {
        suspect_ = false;
        host_->path_suspect(index, epoch, false);
    }
    if (!up_) {
        up_ = true;
        host_->path_up(index, epoch);
        const uint64_t most = uint64_t{settings_.chunk_bytes} * most_writes_;
        if (most < settings_.most_staged) host_->path_limited(index, epoch, most);
        pace_ = host_->pace(index, epoch);
    }
}

// Checks regularly that posted requests progress, and that an idle path is still good.
void RdmaPath::check_progress() {
    if (qp_ == nullptr || breaking_) return;
    reactor_.after(kLook, [weak = weak_from_this()] {
        if (const auto self = weak.lock())
            static_cast<RdmaPath&>(*self).guarded(&RdmaPath::check_progress);
    });
    // Completions may have gone unnoticed if this thread did not run, as in a stopped process.
    // Silence during such a pause does not count.
    const bool empty = drain();
    if (breaking_) return;
    const int64_t now = steady_ns();
    const int64_t away = now - std::exchange(checked_ns_, now) - kLook;
    if (away > kAway) progress_ns_ = std::min(now, progress_ns_ + away);
    if (!empty) {
        drain_later();  // the remaining completions may show progress
        return;
    }
    if (writes_out_ > 0 || probe_out_) {
        const int64_t silent = now - progress_ns_;
        // A slow rail is not dead: the limit allows for its measured rate.
        const double rate = pace_.bytes_per_second;
        const auto chunk_ns = rate > 0 ? to_ns(settings_.chunk_bytes / rate) : 0;
        const int64_t limit = std::max(settings_.dead_after_ns, 4 * chunk_ns);
        if (silent > limit)
            record_error("nothing completed for " + std::to_string(silent / kMillisecond) + " ms");
        else if (silent > limit / 2 && up_ && !suspect_) {
            suspect_ = true;
            host_->path_suspect(index, epoch, true);
        }
    } else if (up_ && now - last_proof_ns_ > kProbeEvery) {
        post_probe();
    }
    if (!first_error_.empty()) break_off(std::exchange(first_error_, {}));
}

// --- Ending -----------------------------------------------------------------------------------

void RdmaPath::rail_failed(const std::string& why) {
    reactor_.post([self = std::static_pointer_cast<RdmaPath>(shared_from_this()), why] {
        self->break_off(why);
    });
}

void RdmaPath::break_off(const std::string& why) {
    if (qp_ == nullptr || breaking_) return;
    end(why);
}

void RdmaPath::end(const std::string& why) {
    if (retire()) {
        host_->path_lost(index, epoch, why);
        return;
    }
    // The path carries no more, but its chunks must not move yet.
    host_->path_suspect(index, epoch, true);
    reactor_.after(kRetireAgain, [self = std::static_pointer_cast<RdmaPath>(shared_from_this()),
                                  why] { self->end(why); });
}

bool RdmaPath::retire() {
    if (qp_ == nullptr) return true;
    if (!std::exchange(breaking_, true)) {
        retiring_since_ns_ = steady_ns();
        // In the error state it neither sends nor accepts writes, and earlier completions count. If
        // the change fails, later completions are resent: only the destruction must succeed.
        abi::QpAttr attr{};
        attr.state = abi::kQpError;
        (void)verbs_.modify_qp(qp_, &attr, abi::kSetState);
        try {
            while (!drain()) {
            }
        } catch (const std::exception&) {  // unhandled completions are resent
        }
    }
    const int error = destroy();
    if (error == 0) return true;
    if (steady_ns() - retiring_since_ns_ > settings_.retire_within_ns)
        host_->path_stuck(rail_->describe() + ": " +
                          system_error("a queue pair cannot be destroyed", error) +
                          ", so it may still write to receive slots");
    return false;
}

void RdmaPath::on_close(const std::shared_ptr<void>& closed) {
    if (retire()) return;
    // The link does not wait forever for a queue pair that cannot be destroyed. This path lives as
    // long as the queue pair, and holds the link with all memory that it may write to.
    const bool in_time = steady_ns() - retiring_since_ns_ <= settings_.retire_within_ns;
    reactor_.after(kRetireAgain, [self = std::static_pointer_cast<RdmaPath>(shared_from_this()),
                                  held = in_time ? closed : nullptr] { self->on_close(held); });
}

// Destroys the queue pair; returns an error if it still exists. Only after its destruction no
// device can access slots, staging memory or leases.
int RdmaPath::destroy() {
    breaking_ = true;
    if (std::exchange(watched_, false)) reactor_.remove(channel_->fd);
    if (qp_ != nullptr) {
        const int error = verbs_.destroy_qp(qp_);
        if (error != 0 && !device_->removed()) return error;
        qp_ = nullptr;
    }
    if (cq_ != nullptr) verbs_.destroy_cq(std::exchange(cq_, nullptr));
    if (channel_ != nullptr) verbs_.destroy_comp_channel(std::exchange(channel_, nullptr));
    for (auto& piece : staging_) rail_->return_staging(std::move(piece));
    staging_.clear();
    host_->disclaim_staging(std::exchange(claimed_, 0));
    if (headers_ != nullptr) rail_->return_staging(std::move(headers_));
    writes_.clear();
    return 0;
}

}  // namespace pipemorph
