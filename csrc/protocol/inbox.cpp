#include "protocol/inbox.hpp"

#include <algorithm>
#include <utility>

namespace pipemorph {

std::vector<Inbox::Room> Inbox::missing(int direction, uint32_t wanted, uint64_t bytes) const {
    struct Place {
        uint64_t largest = 0;
        uint64_t together = 0;
    };
    std::vector<Place> places(wanted);
    for (const Slot& s : slots_) {
        if (s.direction != direction || s.place >= wanted) continue;
        Place& p = places[s.place];
        p.largest = std::max(p.largest, s.bytes);
        p.together += s.bytes;
    }
    std::vector<Room> out;
    for (uint32_t i = 0; i < wanted; ++i) {
        if (places[i].largest >= bytes) continue;
        const uint64_t size = std::max(bytes, places[i].together);
        const bool extends_last =
            !out.empty() && out.back().place + out.back().slots == i && out.back().bytes == size;
        if (!extends_last) out.push_back({i, 0, size});
        ++out.back().slots;
    }
    return out;
}

uint32_t Inbox::add_segment(int direction, const Room& room, std::shared_ptr<Memory> memory) {
    const auto number = static_cast<uint32_t>(segments_.size());
    uint64_t stride = room.slots > 0 ? memory->size() / room.slots : 0;
    // Strides are whole pages, so that the tensors in the slots are aligned.
    if (stride >= 4096) stride -= stride % 4096;
    segments_.push_back(std::move(memory));
    for (uint32_t i = 0; i < room.slots; ++i) {
        Slot s;
        s.direction = static_cast<uint8_t>(direction);
        s.place = room.place + i;
        s.segment = number;
        s.offset = i * stride;
        s.bytes = room.bytes;
        slots_.push_back(std::move(s));
    }
    return number;
}

SlotGrant Inbox::grant(uint32_t number) {
    Slot& s = slots_[number];
    s.state = State::granted;
    ++s.serial;
    return {s.direction, number, s.serial, s.segment, s.offset, s.bytes};
}

std::vector<SlotGrant> Inbox::grant_segment(uint32_t segment) {
    std::vector<SlotGrant> out;
    for (uint32_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].segment == segment && slots_[i].state == State::reserved)
            out.push_back(grant(i));
    return out;
}

std::shared_ptr<Memory> Inbox::segment(uint32_t number) const {
    return number < segments_.size() ? segments_[number] : nullptr;
}

ChunkSink Inbox::begin_chunk(const ChunkHeader& h) {
    ChunkSink sink;
    if (h.slot >= slots_.size()) return sink;
    Slot& s = slots_[h.slot];
    if (h.serial < s.serial) {
        sink.verdict = ChunkSink::Verdict::stale;
        return sink;
    }
    if (h.serial != s.serial || s.direction != h.message.key.direction || h.message.bytes > s.bytes)
        return sink;
    switch (s.state) {
        case State::reserved:
            return sink;
        case State::full:
        case State::held:
            sink.verdict = ChunkSink::Verdict::duplicate;
            return sink;
        case State::granted:
            s.state = State::receiving;
            s.message = h.message;
            s.chunk_bytes = h.chunk_bytes;
            s.claimed = Bitmap(h.chunks());
            s.arrived = Bitmap(h.chunks());
            receiving_[h.message.id] = h.slot;
            break;
        case State::receiving:
            if (s.message.id != h.message.id || s.message.bytes != h.message.bytes ||
                s.chunk_bytes != h.chunk_bytes)
                return sink;
            break;
    }
    if (s.arrived.test(h.index)) {
        sink.verdict = ChunkSink::Verdict::duplicate;
        return sink;
    }
    // Two live paths never carry the same chunk: the sender moves one only after a fence.
    if (!s.claimed.set(h.index)) return sink;
    sink.verdict = ChunkSink::Verdict::take;
    sink.slot = h.slot;
    sink.serial = h.serial;
    sink.index = h.index;
    sink.keep = segments_[s.segment];
    sink.data = segments_[s.segment]->data() + s.offset + h.offset();
    return sink;
}

Inbox::Finished Inbox::finish_chunk(const ChunkSink& sink, bool intact, int64_t now_wall_ns) {
    Slot& s = slots_[sink.slot];
    if (sink.verdict != ChunkSink::Verdict::take || s.serial != sink.serial ||
        s.state != State::receiving)
        return {};
    s.claimed.clear(sink.index);
    if (!intact || !s.arrived.set(sink.index) || !s.arrived.full()) return {};

    receiving_.erase(s.message.id);
    Arrived a;
    a.info = s.message;
    a.arrived_ns = now_wall_ns;
    a.data = segments_[s.segment]->data() + s.offset;
    a.keep = segments_[s.segment];
    a.slot = sink.slot;
    a.serial = s.serial;
    s.state = State::full;
    mailbox_[a.info.key].push_back(std::move(a));
    return {true, s.message.id, s.message.bytes};
}

void Inbox::deliver_empty(MessageInfo info, int64_t now_wall_ns) {
    Arrived a;
    a.info = std::move(info);
    a.arrived_ns = now_wall_ns;
    mailbox_[a.info.key].push_back(std::move(a));
}

std::vector<ChunkReport> Inbox::report(const std::vector<uint64_t>& messages) const {
    std::vector<ChunkReport> out;
    for (const uint64_t id : messages) {
        ChunkReport r;
        r.message = id;
        if (const auto it = receiving_.find(id); it != receiving_.end()) {
            const Slot& s = slots_[it->second];
            r.chunks = static_cast<uint32_t>(s.arrived.size());
            r.bits = s.arrived.bytes();
        }
        out.push_back(std::move(r));
    }
    return out;
}

std::optional<Arrived> Inbox::take(const Key& key) {
    const auto it = mailbox_.find(key);
    if (it == mailbox_.end()) return std::nullopt;
    Arrived a = std::move(it->second.front());
    it->second.pop_front();
    if (it->second.empty()) mailbox_.erase(it);
    if (a.slot) slots_[*a.slot].state = State::held;
    return a;
}

std::optional<SlotGrant> Inbox::release(uint32_t slot, uint64_t serial) {
    Slot& s = slots_[slot];
    if (s.serial != serial || s.state != State::held) return std::nullopt;
    return grant(slot);
}

std::optional<Inbox::Progress> Inbox::progress(const Key& key) const {
    for (const auto& [id, slot] : receiving_) {
        const Slot& s = slots_[slot];
        if (s.message.key == key) return Progress{s.arrived.count(), s.arrived.size()};
    }
    return std::nullopt;
}

Inbox::Extent Inbox::extent(int direction) const {
    Extent all;
    for (const Slot& s : slots_) {
        if (s.direction != direction) continue;
        all.bytes += s.bytes;
        all.largest = std::max(all.largest, s.bytes);
        all.places = std::max(all.places, s.place + 1);
    }
    return all;
}

uint32_t Inbox::slots(int direction) const {
    uint32_t n = 0;
    for (const Slot& s : slots_) n += s.direction == direction;
    return n;
}

uint32_t Inbox::slots_in_use(int direction) const {
    uint32_t n = 0;
    for (const Slot& s : slots_)
        n += s.direction == direction && s.state != State::granted && s.state != State::reserved;
    return n;
}

}  // namespace pipemorph
