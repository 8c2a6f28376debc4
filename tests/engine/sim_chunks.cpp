// Chunks on their way into slots, and what every write has to hold to.
#include "sim_model.hpp"

namespace sim {

void World::send_chunk(int side, uint32_t path) {
    const ConnectionPointer c = at(side, path).live;
    if (!c || !c->started[side] || c->given_up[side]) return;
    auto task = end(side).out.next_chunk(path, c->epoch, 2, 2);
    if (!task) return;
    c->towards[1 - side].push_back({std::move(*task), 0, false, false, false, false});
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
    if (c->one_sided)
        land(side, c);
    else
        read(side, c);
}

void World::land(int side, const ConnectionPointer& c) {
    auto& flights = c->towards[side];
    if (flights.empty()) return;
    const auto f = std::next(flights.begin(), random_(static_cast<uint32_t>(flights.size())));
    if (f->dropped) {
        flights.erase(f);
        return;
    }
    End& e = end(side);
    const ChunkHeader& h = f->task.header;
    const SlotGrant& g = *f->task.message->slot;
    if (f->landed < f->task.bytes && !f->copy) {
        check_write(side, *f);
        const size_t n =
            std::min<size_t>(f->task.bytes - f->landed, random_(2) == 0 ? 4 : kChunkBytes);
        std::memcpy(e.in.segment(g.segment)->data() + g.offset + h.offset() + f->landed,
                    f->task.data + f->landed, n);
        f->landed += static_cast<uint32_t>(n);
        tally_.late_writes += c->given_up[1 - side];
        return;
    }
    if (!c->started[side]) return;
    const Flight told = std::move(*f);
    flights.erase(f);
    if (told.repeated) {
        flights.push_back(told);
        flights.back().repeated = false;
        flights.back().copy = true;
    }
    const ChunkSink sink = begin(side, *c, told);
    if (sink.verdict != ChunkSink::Verdict::take) return;
    if (told.damaged) {  // it cannot know; its sender gets a completion error instead
        e.in.finish_chunk(sink, false, 3);
        path_lost(1 - side, c);
        return;
    }
    if (sink.data != sink.slot_data) std::memcpy(sink.data, sink.slot_data, told.task.bytes);
    finish(side, sink);
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
        ChunkSink sink = begin(side, *c, f);
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
    const ChunkSink sink = std::move(reading->sink);
    reading.reset();
    if (taken) finish(side, sink);
}

ChunkSink World::begin(int side, const Connection& c, const Flight& f) {
    const PathEnd& p = at(side, c.path);
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    if (p.live && p.epoch == f.task.header.epoch) sink = end(side).in.begin_chunk(f.task.header);
    if (sink.verdict == ChunkSink::Verdict::invalid) fail("a chunk that fits no slot");
    tally_.duplicates += sink.verdict == ChunkSink::Verdict::duplicate;
    tally_.stale += sink.verdict == ChunkSink::Verdict::stale;
    return sink;
}

void World::finish(int side, const ChunkSink& sink) {
    End& e = end(side);
    const auto finished = e.in.finish_chunk(sink, true, 3);
    if (!finished.message_complete) return;
    whole(side, finished.message);
    e.slots[sink.slot].open = false;
    e.stream.send(AckFrame{finished.message});
    if (finished.grant) grant(side, *finished.grant);
    flush(side);
}

}  // namespace sim
