#include "protocol/outbox.hpp"

#include <algorithm>

namespace pipemorph {
namespace {

// Limit of empty messages under way, which take no slot.
constexpr size_t kMaxInlineInFlight = 4096;
constexpr size_t kMaxReasonsKept = 4096;
// Interval in chunks at which the oldest message is served.
constexpr uint64_t kOldestEvery = 8;

}  // namespace

Outbox::Outbox(size_t queues, uint32_t chunk_bytes)
    : queues_(queues), chunk_bytes_(chunk_bytes), queue_(queues * kDirections) {}

std::string Outbox::too_large(const MessageInfo& info, uint64_t largest) {
    return info.key.describe() + " has " + std::to_string(info.bytes) +
           " bytes, but the receiver's largest slot in this direction holds " +
           std::to_string(largest) + " bytes: reserve larger slots there";
}

std::shared_ptr<OutMessage> Outbox::post(MessageInfo info, const uint8_t* data,
                                         std::shared_ptr<void> hold,
                                         const std::optional<SlotGrant>& leased) {
    const auto direction = static_cast<size_t>(info.key.direction);
    if (keys_.contains(info.key))
        throw EngineError(info.key.describe() + " is in flight already: a key names one message");
    if (const uint64_t largest = largest_slot_[direction]; largest > 0 && info.bytes > largest)
        throw EngineError(too_large(info, largest));
    if ((info.bytes + chunk_bytes_ - 1) / chunk_bytes_ > kMaxChunks)
        throw EngineError(info.key.describe() + " has " + std::to_string(info.bytes) +
                          " bytes, more than " + std::to_string(kMaxChunks) + " chunks of " +
                          std::to_string(chunk_bytes_) + " bytes");

    auto m = std::make_shared<OutMessage>();
    m->info = std::move(info);
    m->info.id = next_id_;
    m->data = data;
    m->hold = std::move(hold);
    m->chunks = static_cast<uint32_t>((m->info.bytes + chunk_bytes_ - 1) / chunk_bytes_);
    m->carriers.resize(m->chunks);
    m->queue = direction * queues_ + turn_[direction];
    if (leased) {
        m->slot = leased;
        m->promised = leased->bytes;
    }
    auto& queue = m->chunks == 0 ? inline_ : queue_[m->queue];
    const bool waits = m->chunks > 0 && !leased;
    try {
        by_id_[m->info.id] = m;
        keys_.insert(m->info.key);
        queue.push_back(m);
        if (waits) waiting_[direction].push_back(m);
    } catch (...) {  // no memory
        if (!queue.empty() && queue.back() == m) queue.pop_back();
        forget(m);
        throw;
    }
    ++next_id_;
    if (m->chunks > 0) turn_[direction] = (turn_[direction] + 1) % queues_;
    if (waits) promise_slots(direction);
    return m;
}

std::optional<SlotGrant> Outbox::lease(int direction, uint64_t bytes) {
    auto& credits = credits_[static_cast<size_t>(direction)];
    const auto found = std::find_if(credits.lower_bound(bytes), credits.end(), [](const auto& c) {
        return c.second.free.size() > c.second.promised + 1;
    });
    if (found == credits.end()) return std::nullopt;
    const SlotGrant slot = found->second.free.back();
    found->second.free.pop_back();
    return slot;
}

std::optional<MessageInfo> Outbox::next_inline(int64_t now_wall_ns, int64_t now_steady_ns) {
    if (inline_.empty() || inline_in_flight_ >= kMaxInlineInFlight) return std::nullopt;
    const Pointer m = std::move(inline_.front());
    inline_.pop_front();
    ++inline_in_flight_;
    m->info.started_ns = now_wall_ns;
    m->started_steady_ns = now_steady_ns;
    return m->info;
}

void Outbox::granted(std::span<const SlotGrant> grants) {
    for (const SlotGrant& grant : grants) {
        const size_t d = grant.direction;
        credits_[d][grant.bytes].free.push_back(grant);
        largest_slot_[d] = std::max(largest_slot_[d], grant.bytes);
    }
    for (size_t d = 0; d < kDirections; ++d) promise_slots(d);
}

// Reserves slots for waiting messages, each one of the smallest that hold it, in the order of the
// messages: the receiver may need them in that order, and free no slot before.
void Outbox::promise_slots(size_t direction) {
    auto& waiting = waiting_[direction];
    if (waiting.empty()) return;
    auto& credits = credits_[direction];
    size_t unreserved = Outbox::credits(static_cast<int>(direction));
    for (auto it = waiting.begin(); it != waiting.end() && unreserved > 0;) {
        const Pointer m = *it;
        if (m->info.bytes > largest_slot_[direction]) {
            it = waiting.erase(it);
            fail(m, too_large(m->info, largest_slot_[direction]));
            continue;
        }
        const auto found =
            std::find_if(credits.lower_bound(m->info.bytes), credits.end(),
                         [](const auto& c) { return c.second.free.size() > c.second.promised; });
        if (found == credits.end()) {
            ++it;
            continue;
        }
        ++found->second.promised;
        m->promised = found->first;
        --unreserved;
        it = waiting.erase(it);
    }
}

// Takes a slot for a message's first chunk: the one released last, which may still be in a cache.
// If the receiver empties slots at once, only few are used in this way.
void Outbox::take_slot(OutMessage& m) {
    auto& credits = credits_[static_cast<size_t>(m.info.key.direction)].at(m.promised);
    m.slot = credits.free.back();
    credits.free.pop_back();
    --credits.promised;
}

size_t Outbox::credits(int direction) const {
    size_t n = 0;
    for (const auto& [bytes, c] : credits_[static_cast<size_t>(direction)])
        n += c.free.size() - c.promised;
    return n;
}

bool Outbox::has_chunks() const {
    if (!resend_queue_.empty()) return true;
    return std::any_of(queue_.begin(), queue_.end(),
                       [](const auto& q) { return !q.empty() && q.front()->promised > 0; });
}

ChunkTask Outbox::assign_chunk(const Pointer& m, uint32_t index, uint32_t path, uint32_t epoch,
                               int64_t now_wall_ns, int64_t now_steady_ns, int64_t clock_ns) {
    if (m->started_steady_ns == 0) {
        m->started_steady_ns = now_steady_ns;
        m->info.started_ns = now_wall_ns;
        under_way_ += m->info.bytes;
    }
    m->carriers[index] = {path, epoch, false, clock_ns};
    m->watched_ns = clock_ns;
    ChunkTask task;
    task.message = m;
    task.header.path = path;
    task.header.epoch = epoch;
    task.header.slot = m->slot->slot;
    task.header.serial = m->slot->serial;
    task.header.index = index;
    task.header.chunk_bytes = chunk_bytes_;
    task.header.message = m->info;
    task.data = m->data + task.header.offset();
    task.bytes = task.header.length();
    return task;
}

std::optional<ChunkTask> Outbox::next_chunk(uint32_t path, uint32_t epoch, int64_t now_wall_ns,
                                            int64_t now_steady_ns, int64_t clock_ns) {
    while (!resend_queue_.empty()) {
        const auto [m, index] = resend_queue_.front();
        resend_queue_.pop_front();
        if (!by_id_.contains(m->info.id)) continue;
        ++chunks_resent;
        --m->resend_count;
        return assign_chunk(m, index, path, epoch, now_wall_ns, now_steady_ns, clock_ns);
    }
    std::deque<Pointer>* queue = next_queue();
    if (queue == nullptr) return std::nullopt;
    const Pointer m = queue->front();
    if (!m->slot) take_slot(*m);
    const uint32_t index = m->next_chunk++;
    if (m->next_chunk == m->chunks) queue->pop_front();
    return assign_chunk(m, index, path, epoch, now_wall_ns, now_steady_ns, clock_ns);
}

// Queue whose head has the fewest unsent chunks; of equals, that of the oldest message. So messages
// of one size are sent one after the other, each complete as early as possible, and a small one
// does not wait for the rest of a large one. Regularly the oldest is served, whatever its size.
std::deque<Outbox::Pointer>* Outbox::next_queue() {
    const bool oldest = ++turns_ % kOldestEvery == 0;
    std::deque<Pointer>* best = nullptr;
    std::pair<uint64_t, uint64_t> least;
    for (auto& q : queue_) {
        if (q.empty() || q.front()->promised == 0) continue;
        const OutMessage& m = *q.front();
        const std::pair rank{oldest ? uint64_t{0} : m.chunks - m.next_chunk, m.info.id};
        if (best != nullptr && rank >= least) continue;
        best = &q;
        least = rank;
    }
    return best;
}

uint64_t Outbox::ready_chunks() const {
    uint64_t n = resend_queue_.size();
    for (const auto& q : queue_)
        for (const Pointer& m : q) {
            if (m->promised == 0) break;
            n += m->chunks - m->next_chunk;
        }
    return n;
}

void Outbox::forget(const Pointer& m) {
    keys_.erase(m->info.key);
    by_id_.erase(m->info.id);
}

void Outbox::fail(const Pointer& m, std::string why) {
    std::erase(queue_[m->queue], m);
    failed_[m->info.id] = std::move(why);
    explained_.push_back(m->info.id);
    if (explained_.size() > kMaxReasonsKept) {
        // The ticket stays: an unknown one counts as sent.
        failed_[explained_.front()] = std::string();
        explained_.pop_front();
    }
    forget(m);
}

bool Outbox::acknowledged(uint64_t id) {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return false;
    const Pointer m = it->second;
    if (m->chunks == 0)
        --inline_in_flight_;
    else
        under_way_ -= m->info.bytes;
    ++messages_sent;
    bytes_sent += m->info.bytes;
    forget(m);
    return true;
}

std::vector<uint64_t> Outbox::assigned_to(uint32_t path, uint32_t epoch) const {
    std::vector<uint64_t> out;
    for (const auto& [id, m] : by_id_) {
        const bool any = std::any_of(m->carriers.begin(), m->carriers.begin() + m->next_chunk,
                                     [&](const OutMessage::Carrier& c) {
                                         return c.path == path && c.epoch == epoch && !c.confirmed;
                                     });
        if (any) out.push_back(id);
    }
    return out;
}

Outbox::Fenced Outbox::fenced(const BitmapFrame& report, int64_t clock_ns) {
    Fenced all;
    for (const ChunkReport& r : report.reports) {
        const auto it = by_id_.find(r.message);
        if (it == by_id_.end()) continue;
        const Pointer& m = it->second;
        bool progress = false;
        bool lost = false;
        for (uint32_t i = 0; i < m->next_chunk; ++i) {
            OutMessage::Carrier& c = m->carriers[i];
            if (c.path != report.path || c.epoch != report.epoch || c.confirmed) continue;
            // Marked in both cases, so that a repeated report cannot queue a chunk twice.
            c.confirmed = true;
            if (r.has(i)) {
                progress = true;
                continue;
            }
            lost = true;
            all.missing_since_ns =
                std::min(all.missing_since_ns.value_or(c.assigned_ns), c.assigned_ns);
            resend_queue_.emplace_back(m, i);
            ++m->resend_count;
        }
        all.arrived = all.arrived || progress;
        if (progress) m->losses = m->times_late = 0;
        if (progress || !lost) continue;
        if (m->losses++ == 0) m->first_loss_ns = clock_ns;
        m->last_loss_ns = clock_ns;
    }
    return all;
}

Outbox::Pointer Outbox::stuck(int64_t repeated_after_ns) const {
    Pointer longest;
    for (const auto& [_, m] : by_id_)
        if (m->losses > 0 && m->last_loss_ns - m->first_loss_ns >= repeated_after_ns &&
            (!longest || m->first_loss_ns < longest->first_loss_ns))
            longest = m;
    return longest;
}

std::vector<Outbox::Pointer> Outbox::late(int64_t clock_ns, int64_t patience_ns) const {
    constexpr uint32_t kMostDoubled = 6;
    std::vector<Pointer> out;
    for (const auto& [_, m] : by_id_) {
        if (m->next_chunk < m->chunks || m->chunks == 0 || m->resend_count > 0) continue;
        // A message without any delivery must fail soon; a slow one gets more time.
        const uint32_t doubled = std::min(m->times_late, m->losses > 0 ? 1 : kMostDoubled);
        const int64_t patience = patience_ns << doubled;
        if (clock_ns - m->watched_ns > patience) out.push_back(m);
    }
    return out;
}

void Outbox::abandon() noexcept {
    for (auto& [_, m] : by_id_) m.reset();
    abandoned_.merge(by_id_);
    under_way_ = 0;
    keys_.clear();
    resend_queue_.clear();
    inline_.clear();
    for (auto& q : queue_) q.clear();
    for (auto& w : waiting_) w.clear();
    for (auto& c : credits_) c.clear();
}

Outbox::Ticket Outbox::ticket(uint64_t id) const {
    if (id == 0 || id >= next_id_) return Ticket::unknown;
    if (by_id_.contains(id)) return Ticket::in_flight;
    if (abandoned_.contains(id)) return Ticket::abandoned;
    return failed_.contains(id) ? Ticket::failed : Ticket::done;
}

std::string Outbox::failure(uint64_t id) const {
    const auto it = failed_.find(id);
    if (it == failed_.end()) return std::string();
    return it->second.empty() ? "a message failed, and thousands after it: the reason is not stored"
                              : it->second;
}

std::string Outbox::describe(uint64_t id) const {
    const auto it = by_id_.find(id);
    if (it == by_id_.end()) return "ticket " + std::to_string(id);
    const OutMessage& m = *it->second;
    std::string s = m.info.key.describe() + ", ";
    if (m.chunks == 0) return s + (m.started_steady_ns ? "sent" : "waiting in its queue");
    if (m.promised == 0) return s + "waiting for a slot at the receiver";
    return s + std::to_string(m.next_chunk) + " of " + std::to_string(m.chunks) + " chunks sent";
}

}  // namespace pipemorph
