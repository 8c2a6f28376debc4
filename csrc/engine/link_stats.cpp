// What a link says of itself.
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

std::vector<SentRecord> Link::drain_telemetry() {
    const Lock lock(mu_);
    echo_.drain();
    for (Held& held : held_) held.rtt.drain();
    return core_.drain_telemetry();
}

PathStats Link::describe(uint32_t index) const {
    const PathSet::Path& p = core_.paths()[index];
    PathStats s;
    s.kind = name_of(p.kind);
    if (p.kind == Transport::rdma) s.rail = runtime_->rail(p.our_rail)->describe();
    s.state = name_of(p.machine.state());
    s.trouble = p.trouble;
    s.epoch = p.machine.epoch();
    s.chunks = p.chunks;
    s.bytes = p.bytes;
    s.times_lost = p.machine.times_lost();
    if (const double rate = p.paced ? p.flow.busy_rate() : p.bytes_per_second; rate > 0)
        s.bytes_per_second = rate;
    s.window = p.paced ? p.flow.window() : 0;
    if (const auto rtt = held_[index].rtt.summary()) {
        s.rtt_min = to_seconds(rtt->min_ns);
        s.rtt_mean = to_seconds(rtt->mean_ns);
        s.rtt_p99 = to_seconds(rtt->p99_ns);
    }
    return s;
}

// For errors, if something is wrong: "1 of 2 data paths up (rxe0 port 1 DOWN: ...)".
std::string Link::paths_text() const {
    std::string down;
    size_t up = 0;
    for (uint32_t i = 0; i < held_.size(); ++i) {
        if (core_.paths()[i].machine.carries()) {
            ++up;
            continue;
        }
        const PathStats s = describe(i);
        down += (down.empty() ? "" : "; ") + (s.rail.empty() ? s.kind : s.rail) + " " + s.state +
                (s.trouble.empty() ? "" : ": " + s.trouble);
    }
    if (down.empty()) return {};
    return std::to_string(up) + " of " + std::to_string(held_.size()) + " data paths up (" + down +
           ")";
}

LinkStats Link::stats() const {
    const Lock lock(mu_);
    LinkStats s;
    switch (state_) {
        case State::connecting:
            s.state = "connecting";
            break;
        case State::up:
            s.state = "up";
            break;
        case State::reconnecting:
            s.state = "reconnecting";
            break;
        case State::ending:
            s.state = "ending";
            break;
        case State::dead:
            s.state = "dead";
            break;
        case State::closed:
            s.state = "closed";
            break;
    }
    const PathSet& paths = core_.paths();
    s.transport =
        name_of(paths.rails() > 0 && paths.fell_back() ? Transport::tcp : terms_.transport);
    s.fallbacks = paths.fallbacks();
    s.failbacks = paths.failbacks();
    for (uint32_t i = 0; i < held_.size(); ++i) s.paths.push_back(describe(i));
    const LinkCore::Counters& counters = core_.counters();
    s.messages_sent = core_.out().messages_sent;
    s.messages_received = counters.messages_received;
    s.bytes_sent = core_.out().bytes_sent;
    s.bytes_received = counters.bytes_received;
    s.bytes_copied_out = bytes_copied_out_.load(std::memory_order_relaxed);
    s.bytes_copied_in = bytes_copied_in_.load(std::memory_order_relaxed);
    s.chunks_resent = core_.out().chunks_resent;
    s.duplicate_chunks = counters.duplicate_chunks;
    s.stale_chunks = counters.stale_chunks;
    s.reconnects = reconnects_ + counters.paths_remade;
    s.frames_refused = frames_refused_;
    s.slots_added = counters.slots_added;
    s.late_messages = counters.late_messages;
    s.trouble = last_trouble_;
    if (const auto echo = echo_.summary()) {
        s.rtt_min = to_seconds(echo->min_ns);
        s.rtt_mean = to_seconds(echo->mean_ns);
        s.rtt_p99 = to_seconds(echo->p99_ns);
    }
    if (const auto offset = echo_.clock_offset_ns()) s.clock_offset = to_seconds(*offset);
    s.sends_in_flight = core_.out().in_flight();
    for (int d = 0; d < kDirections; ++d) {
        s.slots_granted += core_.in().slots(d);
        s.slots_in_use += core_.in().slots_in_use(d);
    }
    return s;
}

}  // namespace pipemorph
