// The application on both ends, and the control connection between them.
#include "sim_model.hpp"

namespace sim {

// Link::reserve, while messages are on their way to smaller slots.
void World::reserve(int side, uint32_t slots, uint64_t bytes, std::optional<uint32_t> quarantined) {
    End& e = end(side);
    const int direction = side == kLow ? 1 : 0;
    e.largest = bytes = std::min(bytes, uint64_t{kSlotBytes});
    if (e.peaks.size() < slots) e.peaks.resize(slots);
    for (uint32_t i = 0; i < slots; ++i) e.peaks[i] = std::max(e.peaks[i], bytes);
    for (const Inbox::Room& room : e.core.in().missing(direction, slots, bytes)) {
        tally_.grown += !e.slots.empty();
        e.slot_bytes += room.slots * room.bytes;
        add_slots(side, room, quarantined);
    }
    uint64_t requested = 0;
    for (const uint64_t peak : e.peaks) requested += peak;
    require(e.slot_bytes < 4 * requested, "slots have four times the requested memory");
}

// LinkPaths::make_room
void World::add_slots(int side, const Inbox::Room& room, std::optional<uint32_t> quarantined) {
    End& e = end(side);
    const bool shared = kinds_.front() == Transport::shm;
    const size_t number = e.core.in().segments().size() * 2 + static_cast<size_t>(side);
    auto memory = slot_memory(number);
    const uint64_t size = memory->size();
    const uint32_t segment = e.core.add_room(side == kLow ? 1 : 0, room, std::move(memory), shared);
    e.slots.resize(e.slots.size() + room.slots);
    for (uint32_t rail = 0; rail < rails_; ++rail)
        e.core.add_region({rail, segment, 0, quarantined == rail ? 0 : size, 0}, "no memory", now_);
    if (quarantined) e.quarantined.insert(*quarantined);
    if (!shared) e.core.grant_room(segment);
    act(side);
}

void World::grow(int side, const Actions::Grow& what) {
    End& e = end(side);
    const bool there = random_(8) != 0;
    if (there) {
        e.added_bytes += what.room.slots * what.room.bytes;
        tally_.slots_added += what.room.slots;
        require(e.added_bytes <= flight_bytes_, "slots were added beyond the memory for them");
        add_slots(side, what.room, std::nullopt);
    }
    core(side).grown(what.direction, there);
}

void World::post(int side) {
    End& e = end(side);
    if (!e.leased.empty() && (e.to_send == 0 || random_(2) == 0)) return end_lease(side);
    if (e.to_send == 0) return;
    const bool shared = kinds_.front() == Transport::shm;
    // Only a slot that is granted already can be leased.
    if (shared && leases_ && e.core.out().credits(side == kLow ? 0 : 1) < 2 && random_(16) != 0)
        return;
    --e.to_send;
    Sent m;
    m.key = {0, 0, static_cast<int64_t>(e.to_send), side == kLow ? 0 : 1, 0};
    // What it knows to have room for; before it knows anything, the smallest that there can be.
    const uint64_t known = e.core.out().largest_slot(side == kLow ? 0 : 1);
    const uint64_t most = sizes_change_ ? std::max<uint64_t>(known, kChunkBytes) : kSlotBytes;
    const uint32_t bytes = random_(8) == 0 ? 0 : 1 + random_(static_cast<uint32_t>(most));
    Random fill(options_.seed * 64 + e.to_send * 2 + uint64_t(side));
    m.content.resize(bytes);
    for (uint8_t& b : m.content) b = static_cast<uint8_t>(fill(256));
    m.hash = hash(m.content.data(), bytes);
    if (shared && leases_ && bytes > 0 && random_(4) != 0 && lease(side, m)) return;
    post(side, std::move(m), std::nullopt);
}

void World::post(int side, Sent m, const std::optional<SlotGrant>& leased) {
    End& e = end(side);
    MessageInfo info;
    info.key = m.key;
    info.bytes = m.content.size();
    if (leased) {
        const uint8_t* data = slot_of(1 - side, *leased);
        m.id = e.core.post(info, data, nullptr, 2, now_, leased)->info.id;
    } else {
        // Its own copy, scribbled over when the engine lets go of it: a thread that still reads it
        // sends rubbish.
        auto payload = std::shared_ptr<std::vector<uint8_t>>(
            new std::vector<uint8_t>(m.content), [](std::vector<uint8_t>* p) {
                std::fill(p->begin(), p->end(), uint8_t{0xdd});
                delete p;
            });
        const uint8_t* data = payload->data();
        m.id = e.core.post(info, data, std::move(payload), 2, now_)->info.id;
    }
    trace("%d posts message %llu of %llu bytes", side, (unsigned long long)m.id,
          (unsigned long long)info.bytes);
    ++tally_.messages;
    ++undelivered_;
    e.sent.emplace(m.id, std::move(m));
    act(side);
}

// LinkPaths::lease, and the producer that fills it.
bool World::lease(int side, Sent& m) {
    End& e = end(side);
    const auto slot = e.core.lease(m.key.direction, m.content.size());
    if (!slot) return false;
    ++tally_.leases;
    const End::Use& use = end(1 - side).slots[slot->slot];
    require(use.open && use.serial == slot->serial, "a slot was leased that is not granted");
    require(slot->bytes >= m.content.size(), "a leased slot is too small");
    std::memcpy(slot_of(1 - side, *slot), m.content.data(), m.content.size());
    e.leased.push_back({*slot, std::move(m)});
    return true;
}

void World::end_lease(int side) {
    End& e = end(side);
    if (leases_last_ && (e.to_send > 0 || e.core.out().in_flight() > 0)) return;
    const size_t i = random_(static_cast<uint32_t>(e.leased.size()));
    End::Leased l = std::move(e.leased[i]);
    e.leased.erase(e.leased.begin() + static_cast<std::ptrdiff_t>(i));
    if (random_(4) != 0) return post(side, std::move(l.message), l.slot);
    e.core.end_lease(l.slot);
    act(side);
}

uint8_t* World::slot_of(int side, const SlotGrant& slot) {
    return core(side).in().segment(slot.segment)->data() + slot.offset;
}

Sent& World::pick(int side) {
    auto& sent = end(side).sent;
    return std::next(sent.begin(), random_(static_cast<uint32_t>(sent.size())))->second;
}

void World::receive(int side) {
    End& e = end(side);
    if (!e.held.empty() && random_(2) == 0) {
        const size_t i = random_(static_cast<uint32_t>(e.held.size()));
        const auto [slot, serial] = e.held[i];
        e.held.erase(e.held.begin() + static_cast<std::ptrdiff_t>(i));
        give_back(side, slot, serial);
        return;
    }
    if (end(1 - side).sent.empty()) return;
    Sent& m = pick(1 - side);
    const auto arrived = e.core.take(m.key);
    if (!arrived) return;
    trace("%d takes message %llu", side, (unsigned long long)m.id);
    if (m.delivered) fail("message " + std::to_string(m.id) + " was delivered twice");
    m.delivered = true;
    --undelivered_;
    require(arrived->info.id == m.id, "another message came under this key");
    require(arrived->info.bytes == m.content.size(), "a message changed its size");
    if (hash(arrived->data, arrived->info.bytes) != m.hash)
        fail("message " + std::to_string(m.id) + " arrived with another content");
    if (arrived->slot) e.held.push_back({*arrived->slot, arrived->serial});
}

void World::give_back(int side, uint32_t slot, uint64_t serial) {
    const auto direction = side == kLow ? 1 : 0;
    const auto in_use = [&] { return core(side).in().slots_in_use(direction); };
    const uint32_t before = in_use();
    core(side).release(slot, serial, random_(2) == 0);
    require(in_use() == before - 1, "a slot could not be released");
    core(side).release(slot, serial, true);
    require(in_use() == before - 1, "a slot was released twice");
    act(side);
}

void World::granted(int side, const SlotGrant& g) {
    End& e = end(side);
    End::Use& use = e.slots[g.slot];
    require(g.serial > use.serial, "a slot's serial number did not rise");
    require(!use.open, "a slot was granted while it was granted");
    use = {g.serial, true};
    std::memset(e.core.in().segment(g.segment)->data() + g.offset, 0xee, g.bytes);
}

void World::flush(int side) {
    End& e = end(side);
    e.core.collect();
    if (e.control != 0 && e.control == end(1 - side).control)
        e.core.stream().write(e.outgoing, 4096);
}

void World::deliver_control(int side) {
    End& from = end(1 - side);
    End& to = end(side);
    if (to.control == 0 || to.control != from.control || from.outgoing.empty()) return;
    const auto size = static_cast<uint32_t>(from.outgoing.size());
    const uint32_t n = random_(3) == 0 ? 1 + random_(size) : size;
    to.core.frame_received(now_);
    to.incoming.insert(to.incoming.end(), from.outgoing.begin(), from.outgoing.begin() + n);
    from.outgoing.erase(from.outgoing.begin(), from.outgoing.begin() + n);
    read_control(side);
}

void World::read_control(int side) {
    End& e = end(side);
    size_t used = 0;
    const auto bytes = std::exchange(e.incoming, {});
    while (bytes.size() - used >= kFrameHeaderSize) {
        const Bytes rest = Bytes(bytes).subspan(used);
        const auto header = decode_frame_header(rest.first(kFrameHeaderSize));
        require(header.has_value(), "a malformed frame header");
        if (rest.size() < kFrameHeaderSize + header->body_bytes) break;
        auto frame = decode_frame(header->type, rest.subspan(kFrameHeaderSize, header->body_bytes));
        require(frame.has_value(), "a malformed frame");
        used += kFrameHeaderSize + header->body_bytes;
        require(e.core.stream().acknowledged(header->acknowledged), "an impossible counter");
        const auto verdict = e.core.stream().received(header->sequence);
        require(verdict != ReliableStream::Verdict::gap, "a gap in the frames");
        // Both ends say where to resume before anything is written, so nothing is repeated.
        require(verdict == ReliableStream::Verdict::deliver, "a frame was repeated");
        handle(side, *frame);
    }
    e.incoming.assign(bytes.begin() + static_cast<std::ptrdiff_t>(used), bytes.end());
}

void World::handle(int side, Frame& frame) {
    End& e = end(side);
    if (const auto* empty = std::get_if<InlineFrame>(&frame)) {
        whole(side, empty->message.id);
    } else if (const auto* ack = std::get_if<AckFrame>(&frame)) {
        for (const SlotGrant& g : ack->slots) granted(1 - side, g);
        for (const uint64_t message : ack->messages) {
            require(e.core.out().ticket(message) == Outbox::Ticket::in_flight,
                    "an acknowledgement came twice");
            require(e.sent.at(message).complete, "a message completed that had not arrived");
        }
    } else if (const auto* fence = std::get_if<FenceFrame>(&frame)) {
        for (const ConnectionPointer& c : connections_)
            if (c->path == fence->path && c->epoch <= fence->epoch) c->fenced[side] = true;
    } else if (const auto* region = std::get_if<RegionFrame>(&frame)) {
        if (region->bytes == 0) e.quarantined.insert(region->rail);
    }
    if (LinkCore::handles(frame)) {
        const std::string last_error = e.core.handle(frame, 3, now_);
        if (!last_error.empty()) fail("the protocol was broken: " + last_error);
    } else if (const auto* mapped = std::get_if<MappedFrame>(&frame)) {
        e.core.mapped(mapped->segment);
    } else if (const auto* offer = std::get_if<OfferFrame>(&frame)) {
        if (e.core.take_offer(*offer))
            threads(side, offer->path).setup.push_back([this, o = *offer] { answer_offer(o); });
        else
            give_up(side, *find(offer->path, offer->epoch));
    } else if (const auto* answer = std::get_if<AnswerFrame>(&frame)) {
        if (e.core.take_answer(*answer, now_))
            threads(side, answer->path).setup.push_back([this, a = *answer] {
                connect_offered(a);
            });
    } else {
        fail("an unexpected frame");
    }
    act(side);
}

void World::whole(int side, uint64_t id) {
    Sent& m = end(1 - side).sent.at(id);
    if (m.complete) fail("message " + std::to_string(id) + " became whole twice");
    m.complete = true;
}

void World::lose_control() {
    ++tally_.controls_lost;
    for (int side = 0; side < 2; ++side) {
        End& from = end(side);
        from.outgoing.resize(chaos_(static_cast<uint32_t>(from.outgoing.size()) + 1));
        deliver_rest(1 - side);
        end(1 - side).incoming.clear();
    }
    end(kLow).control = 0;
    if (chaos_(2) == 0) end(1).control = 0;
    trace("the control connection breaks");
}

void World::deliver_rest(int side) {
    End& from = end(1 - side);
    End& to = end(side);
    if (to.control != 0 && to.control == from.control) {
        to.incoming.insert(to.incoming.end(), from.outgoing.begin(), from.outgoing.end());
        from.outgoing.clear();
        read_control(side);
    }
    from.outgoing.clear();
}

bool World::resume_control(bool half) {
    End& low = end(kLow);
    End& high = end(1);
    if (low.control != 0) return false;
    const uint64_t number = next_control_++;
    const uint64_t low_received = low.core.stream().last_received();  // in the hello
    high.outgoing.clear();
    high.incoming.clear();
    high.control = number;
    const uint64_t high_received = high.core.stream().last_received();  // in the reply
    require(high.core.stream().resume(low_received), "the acceptor cannot resume");
    // It writes at once. On a half resume no end will ever read that.
    high.core.collect();
    high.core.stream().write(high.outgoing, 4096);
    if (half) return true;
    ++tally_.resumes;
    low.outgoing.clear();
    low.incoming.clear();
    low.control = number;
    require(low.core.stream().resume(high_received), "the dialler cannot resume");
    flush(kLow);
    trace("the control connection is resumed");
    return true;
}

}  // namespace sim
