// Chunks on their way into slots, and what every write has to hold to.
#include <numeric>

#include "sim_model.hpp"

namespace sim {

void World::send_chunk(int side, uint32_t path) {
    const ConnectionPointer c = current(side, path);
    if (!c || !c->started[side] || c->given_up[side]) return;
    if (c->kind == Transport::rdma) look_after_rail(side, c);
    if (c->kind == Transport::shm && path == 0) {
        if (const auto segment = core(side).next_segment_to_offer()) {
            c->segments[1 - side].push_back(*segment);
            return;
        }
    }
    auto task = core(side).next_chunk(path, c->epoch, 2, now_);
    if (!task) return;
    if (c->kind == Transport::rdma) {
        c->under_way[side].push_back(task->bytes);
        const uint64_t bytes =
            std::accumulate(c->under_way[side].begin(), c->under_way[side].end(), uint64_t{0});
        const uint64_t most =
            std::max<uint64_t>(flight_bytes_ / rails_, uint64_t{Flow::kLeastChunks} * kChunkBytes);
        require(bytes <= most, "more is under way than there is memory for");
        tally_.full_windows += bytes + kChunkBytes > most;
    }
    Flight f;
    f.task = std::move(*task);
    if (persists(1 - side)) {
        const Persistent fault = *options_.persistent;
        f.swallowed = fault == Persistent::swallow ||
                      (fault == Persistent::large && f.task.bytes == kChunkBytes);
        f.dropped = f.swallowed || fault == Persistent::cut;
        c->cut = c->cut || fault == Persistent::cut;
    }
    c->towards[1 - side].push_back(std::move(f));
    check_carrier(side, *c);
}

void World::acknowledge(int from, const ConnectionPointer& c, Flight& f) {
    if (c->kind != Transport::rdma || std::exchange(f.acknowledged, true)) return;
    const int side = 1 - from;
    threads(side, c->path).data.push_back([this, side, c] {
        c->under_way[side].pop_front();
        if (!c->retired[side]) core(side).delivered(c->path, c->epoch, now_);
    });
}

void World::look_after_rail(int side, const ConnectionPointer& c) {
    if (!c->up[side] && c->attached[1 - side] && !c->retired[1 - side] && !c->cut) {
        c->up[side] = core(side).path_up(c->path, c->epoch, now_);
        core(side).pace(c->path, c->epoch);
    } else if (c->suspected[side] && random_(4) == 0) {
        c->suspected[side] = false;
        core(side).path_suspect(c->path, c->epoch, false, now_);
    } else if (random_(16) == 0) {
        core(side).path_measured(c->path, c->epoch, 1.0 + random_(1000), now_);
    }
    act(side);
}

bool World::carries(int side, const Connection& c) const {
    return c.held[side] && c.up[side] && !c.suspected[side] && !c.given_up[side] &&
           !c.fenced[side] && !ends_[size_t(side)].quarantined.contains(c.path) &&
           ends_[size_t(side)].core.paths().is_current(c.path, c.epoch);
}

void World::check_carrier(int side, const Connection& c) {
    require(carries(side, c), "a chunk was given to a path that does not carry");
    for (const ConnectionPointer& other : connections_) {
        if (!carries(side, *other)) continue;
        require(c.kind == Transport::rdma || other->kind != Transport::rdma,
                "a chunk was given to a socket while a rail carries");
        require(local_threads_ == 0 || other->path >= c.path ||
                    (c.path - other->path) % local_threads_ != 0,
                "a chunk was given to a socket that stands by");
    }
    if (c.kind == Transport::rdma) {
        const SlotGrant& g = *c.towards[1 - side].back().task.message->slot;
        require(core(side).paths().region(c.path, g) != nullptr,
                "a chunk was given to a rail that does not reach its slot");
    }
}

void World::check_write(int side, const Flight& f) const {
    const ChunkHeader& h = f.task.header;
    const End::Use& use = ends_[size_t(side)].slots[h.slot];
    if (use.open && use.serial == h.serial) return;
    fail("chunk " + std::to_string(h.index) + " of message " + std::to_string(h.message.id) +
         " was written into slot " + std::to_string(h.slot) + " as of grant " +
         std::to_string(h.serial) + ", which is now at grant " + std::to_string(use.serial) +
         (use.open ? "" : " and not the sender's"));
}

void World::move_chunk(int side, const ConnectionPointer& c) {
    auto& flights = c->towards[side];
    if (c->retired[side]) {
        for (const Flight& f : flights) tally_.fenced_writes += !f.dropped;
        flights.clear();
        return;
    }
    if (c->cut && random_(8) == 0) {
        path_lost(side, c);
        return;
    }
    if (c->overdue[1 - side] && random_(8) == 0) {
        path_lost(1 - side, c);
        return;
    }
    if (!c->attached[side]) return;
    if (!c->segments[side].empty() && c->started[side] && !c->cut) {
        core(side).send(MappedFrame{c->segments[side].front(), {}});
        c->segments[side].pop_front();
        ++tally_.segments;
        return act(side);
    }
    if (c->one_sided())
        land(side, c);
    else
        read(side, c);
}

void World::land(int side, const ConnectionPointer& c) {
    auto& flights = c->towards[side];
    if (flights.empty()) return;
    const auto f = std::next(flights.begin(), random_(static_cast<uint32_t>(flights.size())));
    if (f->dropped) {
        if (f->swallowed) acknowledge(side, c, *f);
        flights.erase(f);
        return;
    }
    End& e = end(side);
    const ChunkHeader& h = f->task.header;
    const SlotGrant& g = *f->task.message->slot;
    if (f->landed < f->task.bytes && !f->copy) {
        const size_t n =
            std::min<size_t>(f->task.bytes - f->landed, random_(2) == 0 ? 4 : kChunkBytes);
        uint8_t* const to = slot_of(side, g) + h.offset() + f->landed;
        if (to != f->task.data + f->landed) {  // it was not leased
            check_write(side, *f);
            std::memcpy(to, f->task.data + f->landed, n);
        }
        f->landed += static_cast<uint32_t>(n);
        if (f->landed == f->task.bytes) acknowledge(side, c, *f);
        tally_.late_writes += c->given_up[1 - side];
        return;
    }
    if (!c->started[side]) return;
    const Flight flight = std::move(*f);
    flights.erase(f);
    if (flight.repeated) {
        flights.push_back(flight);
        flights.back().repeated = false;
        flights.back().copy = true;
    }
    const ChunkSink sink = begin(side, flight);
    if (sink.verdict != ChunkSink::Verdict::take) return;
    if (flight.damaged) {  // it cannot know; its sender gets a completion error instead
        e.core.finish_chunk(sink, false, 3);
        path_lost(1 - side, c);
        return;
    }
    finish(side, sink, flight);
}

void World::read(int side, const ConnectionPointer& c) {
    auto& flights = c->towards[side];
    auto& reading = c->reading[side];
    if (!reading) {
        if (flights.empty() || !c->started[side]) return;
        Flight f = std::move(flights.front());
        flights.pop_front();
        if (f.dropped) {  // nothing behind a hole is ever read
            flights.clear();
            return;
        }
        ChunkSink sink = begin(side, f);
        reading.emplace(Connection::Reading{std::move(sink), std::move(f), 0});
        return;
    }
    const Flight& f = reading->flight;
    const bool taken = reading->sink.verdict == ChunkSink::Verdict::take;
    if (reading->done < f.task.bytes) {
        const size_t n =
            std::min<size_t>(f.task.bytes - reading->done, random_(2) == 0 ? 3 : kChunkBytes);
        if (taken) {
            check_write(side, f);
            std::memcpy(reading->sink.data + reading->done, f.task.data + reading->done, n);
        }
        reading->done += n;
        return;
    }
    if (taken && f.damaged) {
        path_lost(side, c);  // which gives the chunk back as not intact
        return;
    }
    const Connection::Reading done = std::move(*reading);
    reading.reset();
    if (taken) finish(side, done.sink, done.flight);
}

ChunkSink World::begin(int side, const Flight& f) {
    const ChunkSink sink = core(side).begin_chunk(f.task.header);
    if (sink.verdict == ChunkSink::Verdict::invalid) fail("a chunk that fits no slot");
    return sink;
}

void World::finish(int side, const ChunkSink& sink, const Flight& f) {
    progress_ns_ = now_;
    const uint64_t before = core(side).counters().messages_received;
    core(side).finish_chunk(sink, true, 3);
    if (core(side).counters().messages_received > before) {
        whole(side, f.task.header.message.id);
        end(side).slots[sink.slot].open = false;
    }
    act(side);
}

}  // namespace sim
