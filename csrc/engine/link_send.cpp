// What a link sends: messages in, tickets out.
#include <algorithm>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/numa.hpp"

namespace pipemorph {

uint8_t* Link::Lease::memory() {
    if (data == nullptr) {
        auto own = std::make_shared_for_overwrite<uint8_t[]>(bytes);
        data = own.get();
        hold = std::move(own);
    }
    return data;
}

Link::Lease Link::lease(int direction, uint64_t bytes) {
    Lease out;
    out.bytes = bytes;
    const Lock lock(mu_);
    if (ended()) throw_over();
    if (bytes > 0 && terms_.transport == Transport::rdma) {
        if (auto piece = lease_pool_->take(bytes)) {
            out.data = piece->data;
            out.hold = std::move(piece->hold);
            out.in_place = true;
        } else if (const uint64_t more = lease_pool_->to_add(bytes)) {
            aside().post([self = shared_from_this(), more] { self->grow_leases(more); });
        }
        return out;
    }
    // What is proved has to be kept here: of a slot, whoever can write there would have a changed
    // payload proved anew when it is sent again.
    if (bytes > 0 && terms_.transport == Transport::shm &&
        runtime_->config.integrity == Integrity::crc)
        out.slot = core_.lease(direction, bytes);
    if (!out.slot) return out;
    const auto segment = peer_segments_.find(out.slot->segment);
    const uint64_t size = segment != peer_segments_.end() ? segment->second->size() : 0;
    if (out.slot->offset < size && out.slot->bytes <= size - out.slot->offset) {
        out.data = segment->second->data() + out.slot->offset;
        out.hold = segment->second;
        out.in_place = true;
        return out;
    }
    // Whoever sends into it says so: a broken promise of the peer's.
    or_die([&] {
        core_.end_lease(*std::exchange(out.slot, std::nullopt));
        act();
    });
    return out;
}

// Until it is there, messages are sent without it.
void Link::grow_leases(uint64_t bytes) {
    std::shared_ptr<Memory> memory;
    std::vector<std::shared_ptr<Registration>> registered;
    try {
        const numa::OnNode here(runtime_->memory_node);
        auto made = Memory::anonymous(bytes);
        for (const auto& rail : runtime_->rails) {
            try {
                registered.push_back(
                    std::make_shared<Registration>(rail->device(), made, abi::kLocalWrite));
            } catch (const EngineError&) {  // its paths stage what is in there
            }
        }
        if (!registered.empty()) memory = std::move(made);
    } catch (const std::exception&) {  // no memory
    }
    lease_pool_->add(std::move(memory), std::move(registered));
}

std::vector<std::shared_ptr<Memory>> Link::lease_memory() const {
    std::vector<std::shared_ptr<Memory>> out = lease_pool_->memory();
    const Lock lock(mu_);
    for (const auto& [_, memory] : peer_segments_) out.push_back(memory);
    return out;
}

void Link::end_lease(const Lease& lease) {
    const Lock lock(mu_);
    if (!lease.slot || over()) return;
    or_die([&] {
        core_.end_lease(*lease.slot);
        act();
    });
}

uint64_t Link::send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold,
                    const std::optional<SlotGrant>& leased) {
    std::vector<std::shared_ptr<DataPath>> live;
    uint64_t id = 0;
    bool alone = false;
    {
        const Lock lock(mu_);
        if (ended()) throw_over();
        alone = info.bytes <= DataPath::kSmall;
        info.posted_ns = wall_ns();
        const int64_t now_wall = info.posted_ns;
        const int64_t now = steady_ns();
        std::shared_ptr<OutMessage> message;
        try {
            message = core_.enqueue(std::move(info), data, std::move(hold), now, leased);
        } catch (const EngineError& e) {
            throw EngineError(describe() + ": " + e.what());
        }
        id = message->info.id;
        // It will be sent. Whoever was told otherwise would send it again, or give its slot back.
        or_die([&] {
            core_.posted(*message, now_wall, now);
            Actions actions = core_.take_actions();
            if (std::exchange(actions.kick, false)) live = live_paths();
            alone = alone && core_.out().ready_chunks() == 1;
            carry_out(actions);
        });
    }
    or_die_without_lock([&] {
        if (alone && !live.empty() && live.front()->send_here()) return;
        // Without the lock, for which their threads would otherwise wait as soon as they wake up.
        for (const auto& path : live) path->kick();
    });
    return id;
}

bool Link::sent(uint64_t ticket) {
    const Lock lock(mu_);
    switch (core_.out().ticket(ticket)) {
        case Outbox::Ticket::done:
            return true;
        case Outbox::Ticket::failed:
            throw EngineError(describe() + ": " + core_.out().failure(ticket));
        case Outbox::Ticket::unknown:
            throw EngineError(describe() + ": there is no ticket " + std::to_string(ticket));
        case Outbox::Ticket::abandoned:
            throw_over();
        case Outbox::Ticket::in_flight:
            break;
    }
    if (ended()) throw_over();
    return false;
}

bool Link::wait_sent(uint64_t ticket, int64_t deadline_ns, int64_t slice_ns, double timeout) {
    const int64_t slice_end = steady_ns() + slice_ns;
    for (;;) {
        if (sent(ticket)) return true;
        Lock lock(mu_);
        if (core_.out().ticket(ticket) != Outbox::Ticket::in_flight || ended()) continue;
        const int64_t now = steady_ns();
        if (now >= deadline_ns)
            throw EngineTimeout(describe() + ": " + core_.out().describe(ticket) +
                                ", not acknowledged by rank " +
                                std::to_string(identity_.peer_rank) + " within " +
                                seconds_text(timeout) + "; " + before_more(paths_text()) +
                                "link is " + (state_ == State::up ? "up" : "reconnecting"));
        if (now >= slice_end) return false;
        wait_slice(lock, deadline_ns, slice_end - now);
    }
}

uint64_t Link::send_slots(int direction) const {
    const Lock lock(mu_);
    return core_.out().credits(direction);
}

}  // namespace pipemorph
