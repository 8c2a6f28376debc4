// What a link says of itself.
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

std::vector<SentRecord> Link::drain_telemetry() {
    const Lock lock(mu_);
    echo_.drain();
    for (Path& p : paths_) p.rtt.drain();
    return out_.telemetry.drain();
}

PathStats Link::describe(const Path& p) const {
    PathStats s;
    s.kind = name_of(p.kind);
    if (p.kind == Transport::rdma) s.rail = runtime_->rails[p.our_rail]->describe();
    s.state = name_of(p.machine.state());
    s.trouble = p.trouble;
    s.epoch = p.machine.epoch();
    s.chunks = p.chunks;
    s.bytes = p.bytes;
    s.times_lost = p.machine.times_lost();
    if (p.bytes_per_second > 0) s.bytes_per_second = p.bytes_per_second;
    if (const auto rtt = p.rtt.summary()) {
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
    for (const Path& p : paths_) {
        if (p.machine.carries()) {
            ++up;
            continue;
        }
        const PathStats s = describe(p);
        down += (down.empty() ? "" : "; ") + (s.rail.empty() ? s.kind : s.rail) + " " + s.state +
                (s.trouble.empty() ? "" : ": " + s.trouble);
    }
    if (down.empty()) return {};
    return std::to_string(up) + " of " + std::to_string(paths_.size()) + " data paths up (" + down +
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
    s.transport = name_of(rails_ > 0 && fell_back_ ? Transport::tcp : terms_.transport);
    s.fallbacks = fallbacks_;
    s.failbacks = failbacks_;
    for (const Path& p : paths_) s.paths.push_back(describe(p));
    s.messages_sent = out_.messages_sent;
    s.messages_received = messages_received_;
    s.bytes_sent = out_.bytes_sent;
    s.bytes_received = bytes_received_;
    s.chunks_resent = out_.chunks_resent;
    s.duplicate_chunks = duplicate_chunks_;
    s.stale_chunks = stale_chunks_;
    s.reconnects = reconnects_;
    s.frames_refused = frames_refused_;
    s.trouble = last_trouble_;
    if (const auto echo = echo_.summary()) {
        s.rtt_min = to_seconds(echo->min_ns);
        s.rtt_mean = to_seconds(echo->mean_ns);
        s.rtt_p99 = to_seconds(echo->p99_ns);
    }
    if (const auto offset = echo_.clock_offset_ns()) s.clock_offset = to_seconds(*offset);
    s.sends_in_flight = out_.in_flight();
    for (int d = 0; d < kDirections; ++d) {
        s.slots_granted += in_.slots(d);
        s.slots_in_use += in_.slots_in_use(d);
    }
    return s;
}

}  // namespace pipemorph
