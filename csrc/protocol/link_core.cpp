#include "protocol/link_core.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr uint32_t kMostDeferredGrants = 3;
constexpr size_t kPerFrame = 4096;
constexpr size_t kMaxError = 1000;

std::string stuck_text(const OutMessage& message, int64_t clock_ns) {
    return "nothing of " + message.info.key.describe() + " has got through in " +
           format_seconds(to_seconds(clock_ns - message.first_loss_ns)) + ", and " +
           std::to_string(message.losses) +
           (message.losses == 1 ? " data connection was" : " data connections were") +
           " lost with a chunk of it";
}

}  // namespace

LinkCore::LinkCore(const Settings& settings)
    : dials_(settings.dials),
      peer_rank_(settings.peer_rank),
      out_(settings.queues, settings.chunk_bytes),
      paths_(settings.chunk_bytes, settings.flight_bytes),
      watchdog_(settings.patience_ns),
      give_up_ns_(settings.give_up_ns),
      flight_bytes_(settings.flight_bytes) {}

void LinkCore::send(const Frame& frame) {
    // The order matters: a report without a message must not overtake its acknowledgement.
    collect();
    stream_.send(frame);
    actions_.flush = true;
}

bool LinkCore::is_short_of_slots(int direction) const {
    const auto wait = std::count_if(pending_acks_.slots.begin(), pending_acks_.slots.end(),
                                    [&](const SlotGrant& g) { return g.direction == direction; });
    const uint32_t free = in_.slots(direction) - in_.slots_in_use(direction);
    return wait > 0 && free <= wait + 1;
}

void LinkCore::collect() {
    deferred_grants_ = 0;
    AckFrame all = std::exchange(pending_acks_, {});
    const auto part = [](auto& from, size_t at) {
        const auto first = from.begin() + static_cast<std::ptrdiff_t>(std::min(at, from.size()));
        const auto end = from.size() - std::min(at, from.size()) > kPerFrame
                             ? first + static_cast<std::ptrdiff_t>(kPerFrame)
                             : from.end();
        return std::vector(first, end);
    };
    for (size_t at = 0; at < std::max(all.messages.size(), all.slots.size()); at += kPerFrame)
        stream_.send(AckFrame{part(all.messages, at), part(all.slots, at)});
}

// --- The application -----------------------------------------------------------------------------

void LinkCore::posted(const OutMessage& message, int64_t now_wall, int64_t now) {
    if (message.chunks == 0)
        send_empty_messages(now_wall, now);
    else
        actions_.notify = true;
}

void LinkCore::end_lease(const SlotGrant& slot) {
    out_.granted(slot);
    if (out_.has_chunks()) actions_.notify = true;
}

void LinkCore::send_empty_messages(int64_t now_wall, int64_t now) {
    while (auto message = out_.next_inline(now_wall, now)) send(InlineFrame{std::move(*message)});
    actions_.flush = true;  // also for waiting grants
}

void LinkCore::acknowledge(uint64_t message) {
    pending_acks_.messages.push_back(message);
    actions_.flush = true;
}

// Acknowledges an empty message. Such messages take no slot, so the limit of unacknowledged ones at
// the sender bounds their number here.
void LinkCore::acknowledge_empty(uint64_t message) {
    constexpr size_t kMostUnread = 4096;
    if (++unread_empty_ > kMostUnread)
        unacknowledged_empty_.push_back(message);
    else
        acknowledge(message);
}

std::optional<Arrived> LinkCore::take(const Key& key) {
    auto message = in_.take(key);
    if (!message || message->info.bytes > 0) return message;
    --unread_empty_;
    if (!unacknowledged_empty_.empty()) {
        acknowledge(unacknowledged_empty_.front());
        unacknowledged_empty_.pop_front();
    }
    return message;
}

void LinkCore::release(uint32_t slot, uint64_t serial, bool at_once) {
    const auto next = in_.release(slot, serial);
    if (!next) return;
    record_emptied(*next);
    pending_acks_.slots.push_back(*next);
    if (at_once || ++deferred_grants_ >= kMostDeferredGrants) actions_.flush = true;
}

uint32_t LinkCore::add_room(int direction, const Inbox::Room& room, std::shared_ptr<Memory> memory,
                            bool shared) {
    const uint32_t segment = in_.add_segment(direction, room, std::move(memory));
    if (shared) {
        unmapped_segments_.insert(segment);
        segments_to_offer_.push_back(segment);
        actions_.notify = true;
    }
    return segment;
}

void LinkCore::add_region(const RegionFrame& region, const std::string& error, int64_t now) {
    send(region);
    if (region.bytes == 0) quarantine_rail(true, region.rail, error, now);
}

std::optional<uint32_t> LinkCore::next_segment_to_offer() {
    while (!segments_to_offer_.empty()) {
        const uint32_t number = segments_to_offer_.front();
        segments_to_offer_.pop_front();
        if (unmapped_segments_.contains(number)) return number;
    }
    return std::nullopt;
}

void LinkCore::mapped(uint32_t segment) {
    if (unmapped_segments_.erase(segment) > 0) grant(in_.grant_segment(segment));
}

void LinkCore::grant(const std::vector<SlotGrant>& grants) {
    pending_acks_.slots.insert(pending_acks_.slots.end(), grants.begin(), grants.end());
    actions_.flush = true;
}

// --- The peer's frames ---------------------------------------------------------------------------

bool LinkCore::handles(const Frame& frame) {
    return std::visit(
        []<typename F>(const F&) {
            return std::is_same_v<F, InlineFrame> || std::is_same_v<F, AckFrame> ||
                   std::is_same_v<F, FenceFrame> || std::is_same_v<F, BitmapFrame> ||
                   std::is_same_v<F, RegionFrame>;
        },
        frame);
}

std::string LinkCore::handle(Frame& frame, int64_t now_wall, int64_t now) {
    if (auto* empty = std::get_if<InlineFrame>(&frame)) {
        const uint64_t id = empty->message.id;
        in_.deliver_empty(std::move(empty->message), now_wall);
        ++counters_.messages_received;
        acknowledge_empty(id);
        changed();
    } else if (const auto* ack = std::get_if<AckFrame>(&frame)) {
        out_.granted(ack->slots);
        actions_.wake = true;
        if (!ack->slots.empty() && out_.has_chunks()) actions_.notify = true;
        if (ack->messages.empty()) return {};
        note_progress();
        for (const uint64_t id : ack->messages) {
            const auto message = out_.find(id);
            if (!message) continue;
            if (!message->was_sent())
                return "an acknowledgement of " + message->info.key.describe() +
                       ", which has not been sent";
            for (const OutMessage::Carrier& c : message->carriers) paths_.proved(c);
            watchdog_.acknowledged(message->info.bytes);
            out_.acknowledged(id);
        }
        send_empty_messages(now_wall, now);
        changed();
    } else if (const auto* fence = std::get_if<FenceFrame>(&frame)) {
        if (fence->path >= paths_.size()) return "a fence for a path that does not exist";
        // The peer had assigned chunks to it.
        if (!fence->messages.empty() && paths_[fence->path].received_epoch < fence->epoch)
            reduce_segments(fence->path, fence->epoch,
                            now - paths_[fence->path].machine.up_since_ns());
        paths_.fenced_by_peer(*fence);
        actions_.retire.push_back({fence->path, fence->epoch});
        note_carrier(now);
        actions_.notify = true;
    } else if (const auto* report = std::get_if<BitmapFrame>(&frame)) {
        const auto [missing_since_ns, arrived] = out_.fenced(*report, watchdog_.clock_ns());
        if (arrived) note_progress();
        if (missing_since_ns && !arrived && report->path < paths_.size())
            reduce_segments(report->path, report->epoch, watchdog_.clock_ns() - *missing_since_ns);
        if (report->last && report->path < paths_.size())
            paths_.fence_answered(report->path, report->epoch);
        if (out_.has_chunks()) actions_.notify = true;
    } else if (const auto* region = std::get_if<RegionFrame>(&frame)) {
        if (region->bytes > 0)
            paths_.add_region(*region);
        else
            quarantine_rail(false, region->rail,
                            format_rank(peer_rank_) + " cannot register its memory with it", now);
    }
    return {};
}

// --- Paths ---------------------------------------------------------------------------------------

bool LinkCore::attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                      int64_t now) {
    if (!paths_.may_attach(path, epoch)) {
        // The peer gave it up before it was attached, so the dialler must dial another one.
        paths_.dial_failed(path, epoch, "the peer gave the connection up at once", now);
        return false;
    }
    replace(path);
    count_remade(path);
    paths_.attach(path, epoch, local_thread, now);
    // A new socket offers all unmapped segments again: the old one's deliveries are unknown.
    if (path == 0) segments_to_offer_.assign(unmapped_segments_.begin(), unmapped_segments_.end());
    return true;
}

// Retires the current connection, on its own thread, which may be in the middle of a copy: the
// fence must follow that.
void LinkCore::replace(uint32_t path) {
    if (const auto before = paths_.replace(path)) actions_.retire.push_back({path, *before});
}

bool LinkCore::path_lost(uint32_t path, uint32_t epoch, const std::string& why, int64_t now) {
    if (!paths_.is_current(path, epoch)) return false;
    lose(path, why, now);
    send_fence(path, epoch);
    actions_.dial = dials_;
    return true;
}

void LinkCore::lose(uint32_t path, const std::string& why, int64_t now) {
    paths_.lose(path, why, now);
    last_loss_ = "data path " + std::to_string(path) + ": " + why;
    last_loss_ns_ = now;
    note_carrier(now);
    // Unassigned chunks can take another path at once.
    actions_.notify = true;
}

// Handles a socket that delivered nothing. One that was cut soon reveals nothing about packet
// sizes, which the dialler chooses.
void LinkCore::reduce_segments(uint32_t path, uint32_t epoch, int64_t silent_ns) {
    if (!dials_ || silent_ns < give_up_ns_ / 4) return;
    for (const uint32_t other : paths_.reduce_segments(path, epoch))
        actions_.fail.push_back(
            {other,
             "nothing arrived in packets as large as its over data path " + std::to_string(path)});
}

// Fences an epoch that is over on this side: the peer reports its chunks, and retires its
// connection.
void LinkCore::send_fence(uint32_t path, uint32_t epoch) {
    const auto messages = out_.assigned_to(path, epoch);
    size_t at = 0;
    do {
        FenceFrame fence{path, epoch, {}};
        for (; at < messages.size() && fence.messages.size() < kPerFrame; ++at)
            fence.messages.push_back(messages[at]);
        send(fence);
    } while (at < messages.size());
}

void LinkCore::retired(uint32_t path, const std::vector<uint32_t>& epochs, int64_t now) {
    for (const uint32_t epoch : epochs) {
        if (paths_.forget_replaced(path, epoch))
            send_fence(path, epoch);
        else
            path_lost(path, epoch, "given up by the peer", now);
    }
    // Missing chunks must not move while they may still arrive over this connection.
    for (const FenceFrame& fence : paths_.answerable(path)) answer_fence(fence);
}

void LinkCore::answer_fence(const FenceFrame& fence) {
    constexpr size_t kMaxBits = size_t{256} << 10;
    BitmapFrame answer{fence.path, fence.epoch, {}};
    size_t bits = 0;
    for (ChunkReport& r : in_.report(fence.messages)) {
        bits += r.bits.size() + 16;
        answer.reports.push_back(std::move(r));
        if (bits < kMaxBits) continue;
        answer.last = false;
        send(std::exchange(answer, {fence.path, fence.epoch, {}}));
        bits = 0;
    }
    // Sent also without reports: the peer waits for it before it dials again.
    send(answer);
}

std::optional<ChunkTask> LinkCore::next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall,
                                              int64_t now) {
    if (!paths_.may_carry(path, epoch, out_, now) || !paths_.has_room(path, now))
        return std::nullopt;
    if (out_.bytes_under_way() == 0) watchdog_.started();
    auto task = out_.next_chunk(path, epoch, now_wall, now, watchdog_.clock_ns());
    if (task)
        paths_.chunk_assigned(path, task->bytes, now);
    else
        paths_.ran_out(path);
    return task;
}

ChunkSink LinkCore::begin_chunk(const ChunkHeader& header) {
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    if (paths_.is_current(header.path, header.epoch)) sink = in_.begin_chunk(header);
    sink.path = header.path;
    sink.epoch = header.epoch;
    if (sink.verdict == ChunkSink::Verdict::duplicate) ++counters_.duplicate_chunks;
    if (sink.verdict == ChunkSink::Verdict::stale) ++counters_.stale_chunks;
    return sink;
}

uint64_t LinkCore::finish_chunk(const ChunkSink& sink, bool intact, int64_t now_wall) {
    const auto finished = in_.finish_chunk(sink, intact, now_wall);
    if (intact) {
        paths_.received(sink.path, sink.epoch);
        note_progress();
    }
    if (!finished.message_complete) return 0;
    ++counters_.messages_received;
    counters_.bytes_received += finished.bytes;
    acknowledge(finished.message);
    changed();
    return finished.bytes;
}

// --- Rails ---------------------------------------------------------------------------------------

bool LinkCore::offer(uint32_t path, uint32_t epoch, const QpAddress& qp, std::string error,
                     int64_t now) {
    if (paths_[path].machine.epoch() != epoch) return false;
    if (error.empty()) error = paths_.quarantine_reason(path);
    if (!error.empty()) {
        paths_.dial_failed(path, epoch, error, now);
        return false;
    }
    paths_.offered(path, now);
    send(OfferFrame{path, epoch, paths_[path].our_rail, paths_[path].peer_rail, qp});
    return true;
}

bool LinkCore::take_offer(const OfferFrame& offer) {
    if (!paths_[offer.path].machine.may_take(offer.epoch))
        return false;  // superseded before it was read
    replace(offer.path);
    paths_.take(offer);
    return true;
}

bool LinkCore::answer(const OfferFrame& offer, const QpAddress& qp, std::string error,
                      int64_t now) {
    const uint32_t path = offer.path;
    if (paths_[path].machine.epoch() != offer.epoch) return false;
    if (error.empty()) error = why_not_connected(path, offer.epoch);
    AnswerFrame answer{path, offer.epoch, error, error.empty() ? qp : QpAddress{}};
    answer.error.resize(std::min(answer.error.size(), kMaxError));
    if (error.empty())
        paths_.hold(path);
    else
        paths_.dial_failed(path, offer.epoch, error, now);
    send(answer);
    return error.empty();
}

bool LinkCore::take_answer(const AnswerFrame& answer, int64_t now) {
    if (answer.path >= paths_.rails() || paths_[answer.path].machine.epoch() != answer.epoch ||
        !paths_.withdraw(answer.path))
        return false;  // too late
    if (answer.error.empty()) return true;
    actions_.withdraw.push_back(answer.path);
    paths_.dial_failed(answer.path, answer.epoch, format_rank(peer_rank_) + ": " + answer.error,
                       now);
    return false;
}

bool LinkCore::connected(uint32_t path, uint32_t epoch, std::string error, int64_t now) {
    if (paths_[path].machine.epoch() != epoch) return false;
    if (error.empty()) error = why_not_connected(path, epoch);
    if (error.empty()) {
        paths_.hold(path);
        return true;
    }
    lose(path, error, now);
    send_fence(path, epoch);
    return false;
}

// Reason against a queue pair that was being made when a fence or a quarantine arrived.
std::string LinkCore::why_not_connected(uint32_t path, uint32_t epoch) const {
    if (std::string quarantined = paths_.quarantine_reason(path); !quarantined.empty())
        return quarantined;
    return paths_[path].machine.is_fenced(epoch) ? "given up by the peer" : "";
}

bool LinkCore::path_up(uint32_t path, uint32_t epoch, int64_t now) {
    if (paths_[path].machine.epoch() != epoch) return false;
    count_remade(path);
    paths_.connected(path, epoch, now);
    note_carrier(now);
    actions_.notify = true;
    changed();
    return true;
}

void LinkCore::path_suspect(uint32_t path, uint32_t epoch, bool suspicious, int64_t now) {
    paths_.suspected(path, epoch, suspicious);
    note_carrier(now);
    actions_.notify = true;
}

// Quarantines a rail that cannot reach every slot: a message's slot is unknown when its rail is
// chosen.
void LinkCore::quarantine_rail(bool ours, uint32_t rail, const std::string& why, int64_t now) {
    paths_.quarantine(ours, rail, why);
    for (uint32_t i = 0; i < paths_.rails(); ++i) {
        if (!paths_.quarantined(i)) continue;
        paths_.set_last_error(i, why);
        if (paths_[i].offered) {
            withdraw(i, why, now);
        } else if (paths_[i].current) {
            actions_.fail.push_back({i, why});
            // Other paths carry at once, before its thread has ended it.
            note_carrier(now);
            actions_.notify = true;
        }
    }
}

void LinkCore::withdraw(uint32_t path, const std::string& why, int64_t now) {
    paths_.withdraw(path);
    actions_.withdraw.push_back(path);
    lose(path, why, now);
    send_fence(path, paths_[path].machine.epoch());
}

void LinkCore::check_rails(bool recovered, int64_t now) {
    if (recovered) paths_.reset_backoff();
    for (const uint32_t path : paths_.unanswered(now))
        withdraw(path,
                 format_rank(peer_rank_) + " did not answer the offer of a queue pair within " +
                     format_seconds(to_seconds(PathSet::kConnectLimitNs)),
                 now);
    if (paths_.head_start_over(now)) actions_.notify = true;
}

// --- Long links ----------------------------------------------------------------------------------

std::string LinkCore::check_flow(int64_t now) {
    give_up_late_paths();
    for (int direction = 0; direction < kDirections; ++direction) grow_slots(direction, now);
    return why_stuck();
}

// Reason to end a link whose paths are remade without any use: a message for which the receiver has
// had no new chunk for too long, or no path.
std::string LinkCore::why_stuck() {
    const int64_t clock = watchdog_.clock_ns();
    const int64_t limit = std::max(give_up_ns_, 2 * watchdog_.patience_ns(out_.bytes_under_way()));
    // One failure may break several connections, a moment apart.
    const auto stuck = out_.stuck(give_up_ns_ / 4);
    if (out_.in_flight() == 0 || paths_.any_carries()) note_progress();
    const bool without_path = clock - carried_ns_ > give_up_ns_;
    if (stuck && (without_path || clock - stuck->first_loss_ns > limit))
        return stuck_text(*stuck, clock) + last_loss() +
               ". Does something on the way drop large packets (path MTU), or cut connections?";
    if (without_path)
        return "there is something to send, and no data path has been up for " +
               format_seconds(to_seconds(clock - carried_ns_)) + last_loss();
    return {};
}

std::string LinkCore::last_loss() const {
    return last_loss_.empty() ? "" : " (last: " + last_loss_ + ")";
}

std::string LinkCore::path_errors(int64_t now) const {
    constexpr int64_t kRecent = 30 * kSecond;
    std::string text;
    if (const auto stuck = out_.stuck())
        text = stuck_text(*stuck, watchdog_.clock_ns()) + last_loss();
    else if (!last_loss_.empty() && now - last_loss_ns_ < kRecent)
        text = "data paths were lost " + std::to_string(paths_.times_lost()) +
               (paths_.times_lost() == 1 ? " time, last " : " times, last ") +
               format_seconds(to_seconds(now - last_loss_ns_)) + " ago (" + last_loss_ + ")";
    if (const uint32_t bytes = paths_.segment_bytes(); bytes > 0)
        text += (text.empty() ? "" : "; ") + std::string("packets of more than ") +
                std::to_string(bytes) +
                " bytes seem not to get through (path MTU), so none are sent";
    return text;
}

void LinkCore::give_up_late_paths() {
    const int64_t patience = watchdog_.patience_ns(out_.bytes_under_way());
    for (const auto& message : out_.late(watchdog_.clock_ns(), patience))
        fail_suspect_path(*message);
}

// Gives up one path of a late message: its fence reveals the missing chunks, which move. It is a
// path without a proof of delivery since its chunk was assigned; else the one with the oldest
// chunk.
void LinkCore::fail_suspect_path(OutMessage& message) {
    const OutMessage::Carrier* suspect = nullptr;
    for (const OutMessage::Carrier& c : message.carriers) {
        if (c.confirmed) continue;
        // A fence for it is in progress.
        if (!paths_.may_be_at_fault(c)) return;
        const auto rank = [&](const OutMessage::Carrier& one) {
            return std::pair(paths_[one.path].proved_ns >= one.assigned_ns, one.assigned_ns);
        };
        if (suspect == nullptr || rank(c) < rank(*suspect)) suspect = &c;
    }
    if (suspect == nullptr) return;
    const int64_t waited = watchdog_.clock_ns() - message.watched_ns;
    ++counters_.late_messages;
    ++message.times_late;
    message.watched_ns = watchdog_.clock_ns();
    paths_.give_up(suspect->path);
    actions_.fail.push_back(
        {suspect->path, message.info.key.describe() + " was not acknowledged by " +
                            format_rank(peer_rank_) + " for " + format_seconds(to_seconds(waited)) +
                            " after its last chunk had been sent"});
}

// Adds slots to a long link. A slot returns after a round trip and the time in the application, so
// the slots must hold twice the bytes that are emptied per round trip; as with a window, this
// doubles them until they suffice. Bytes that the application does not empty need no more slots.
void LinkCore::grow_slots(int direction, int64_t now) {
    // With a shorter round trip, a few slots suffice for every wire.
    constexpr int64_t kLong = kMillisecond;
    constexpr int64_t kRoundTrips = 4;
    constexpr int64_t kLeastSpan = 100 * kMillisecond;
    constexpr uint64_t kMostAtOnce = uint64_t{64} << 20;  // takes some 20 ms to be allocated
    constexpr uint64_t kMostSlots = 4096;
    Turnover& t = turnover_[static_cast<size_t>(direction)];
    const int64_t rtt = watchdog_.least_round_trip_ns();
    const int64_t span = now - t.since_ns;
    if (span < std::max(kLeastSpan, kRoundTrips * rtt)) return;
    const double in_a_round_trip =
        static_cast<double>(t.bytes) * static_cast<double>(rtt) / static_cast<double>(span);
    t.bytes = 0;
    t.since_ns = now;
    if (rtt < kLong || paths_.within_a_host() || t.growing > 0 || t.full) return;
    const Inbox::Extent have = in_.extent(direction);
    const uint64_t wanted =
        std::min({static_cast<uint64_t>(2.0 * in_a_round_trip), 2 * have.bytes, flight_bytes_,
                  have.bytes + std::max(kMostAtOnce, have.largest)});
    if (wanted <= have.bytes) return;
    const uint64_t slots = std::min((wanted - have.bytes) / have.largest,
                                    kMostSlots - std::min<uint64_t>(have.places, kMostSlots));
    if (slots == 0) return;
    t.growing = static_cast<uint32_t>(slots);
    actions_.grow.push_back({direction, {have.places, t.growing, have.largest}});
}

void LinkCore::grown(int direction, bool there) {
    Turnover& t = turnover_[static_cast<size_t>(direction)];
    t.growing = 0;
    t.full = !there;
}

}  // namespace pipemorph
