// What a link says of itself.
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

std::vector<SentRecord> Link::drain_telemetry() {
    const Lock lock(mu_);
    echo_.drain();
    return out_.telemetry.drain();
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
        case State::dead:
            s.state = "dead";
            break;
        case State::closed:
            s.state = "closed";
            break;
    }
    s.transport = name_of(transport_);
    s.messages_sent = out_.messages_sent;
    s.messages_received = messages_received_;
    s.bytes_sent = out_.bytes_sent;
    s.bytes_received = bytes_received_;
    s.chunks_resent = out_.chunks_resent;
    s.duplicate_chunks = duplicate_chunks_;
    s.stale_chunks = stale_chunks_;
    s.reconnects = reconnects_;
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
