// What a link sends: messages in, tickets out.
#include <algorithm>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

uint64_t Link::send(MessageInfo info, const uint8_t* data, std::shared_ptr<void> hold) {
    std::vector<std::shared_ptr<DataPath>> live;
    uint64_t id = 0;
    {
        const Lock lock(mu_);
        if (ended()) throw_over();
        info.posted_ns = wall_ns();
        try {
            const auto message = out_.post(std::move(info), data, std::move(hold), steady_ns());
            id = message->info.id;
            if (message->chunks == 0)
                send_empty_messages();
            else
                live = live_paths();
        } catch (const EngineError& e) {
            throw EngineError(describe() + ": " + e.what());
        }
    }
    // Without the lock, for which their threads would otherwise wait as soon as they wake up.
    for (const auto& path : live) path->kick();
    return id;
}

bool Link::sent(uint64_t ticket) {
    const Lock lock(mu_);
    switch (out_.ticket(ticket)) {
        case Outbox::Ticket::done:
            return true;
        case Outbox::Ticket::failed:
            throw EngineError(describe() + ": " + out_.failure(ticket));
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
        if (out_.ticket(ticket) != Outbox::Ticket::in_flight || ended()) continue;
        const int64_t now = steady_ns();
        if (now >= deadline_ns)
            throw EngineTimeout(describe() + ": " + out_.describe(ticket) +
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
    return out_.credits(direction);
}

void Link::send_empty_messages() {
    while (auto message = out_.next_inline(wall_ns(), steady_ns()))
        stream_.send(InlineFrame{std::move(*message)});
    flush();
}

}  // namespace pipemorph
