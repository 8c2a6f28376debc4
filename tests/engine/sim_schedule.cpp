// What happens next, what goes wrong, and what must be true in the end.
#include "sim_model.hpp"

namespace sim {
namespace {

constexpr uint64_t kMaxSteps = 200'000;

}  // namespace

World::World(const Options& options, Tally& tally)
    : options_(options), tally_(tally), random_(options.seed), chaos_(~options.seed) {
    const uint32_t paths = 1 + random_(3);
    for (int side = 0; side < 2; ++side) {
        ends_.emplace_back(1 + random_(3));
        End& e = ends_.back();
        e.paths.resize(paths);
        e.to_send = 1 + random_(4);
    }
    for (uint32_t i = 0; i < paths; ++i) one_sided_.push_back(random_(3) != 0);
    // The order of things as in a real link: control first, then grants and paths.
    next_control_ = 1;
    ends_[0].control = ends_[1].control = next_control_++;
    sizes_change_ = options.seed % 4 == 3;
    for (int side = 0; side < 2; ++side)
        reserve(side, 1 + random_(2), sizes_change_ ? kChunkBytes : kSlotBytes);
    faults_left_ = options.random_faults;
}

uint64_t World::run() {
    uint64_t step = 0;
    while (!over()) {
        if (options_.planned && options_.planned->first == step)
            planned_left_ = options_.planned->second;
        // A planned fault waits until there is something that it can happen to.
        if (planned_left_ && inject(*planned_left_)) planned_left_.reset();
        if (faults_left_ > 0 && chaos_(48) == 0 &&
            inject(static_cast<Fault>(chaos_(uint32_t{kFaults}))))
            --faults_left_;
        act();
        if (++step > kMaxSteps) fail("no progress: " + stuck());
    }
    settle();
    return step;
}

void World::act() {
    const int side = static_cast<int>(random_(2));
    const uint32_t path = random_(static_cast<uint32_t>(one_sided_.size()));
    switch (random_(16)) {
        case 0:
            if (end(side).to_send > 0) return post(side);
            [[fallthrough]];
        case 1:
        case 2:
        case 3:
            return send_chunk(side, path);
        case 4:
        case 5:
        case 6:
        case 7:
            if (!connections_.empty())
                move_chunk(side, connections_[random_(static_cast<uint32_t>(connections_.size()))]);
            return;
        case 8:
        case 9:
        case 10:
            flush(side);
            return deliver_control(side);
        case 11:
        case 12: {
            auto& thread = at(side, path).thread;
            if (thread.empty()) return;
            const auto task = std::move(thread.front());
            thread.pop_front();
            return task();
        }
        case 13:
        case 14:
            if (sizes_change_ && random_(4) == 0)
                return reserve(side, 1 + random_(2), end(side).largest + random_(3));
            return receive(side);
        default:
            if (end(kLow).control == 0)
                resume_control(false);
            else
                dial(path, false);
            tidy();
    }
}

void World::tidy() {
    std::erase_if(connections_, [](const ConnectionPointer& c) {
        const auto done = [&](int side) { return c->retired[side] && c->towards[side].empty(); };
        return done(0) && done(1);
    });
}

Flight* World::some_flight(ConnectionPointer& which, int& towards) {
    for (const ConnectionPointer& c : connections_) {
        for (int side = 0; side < 2; ++side) {
            if (c->towards[side].empty() || c->retired[side] || c->given_up[1 - side]) continue;
            which = c;
            towards = side;
            auto& flights = c->towards[side];
            return &*std::next(flights.begin(), chaos_(static_cast<uint32_t>(flights.size())));
        }
    }
    return nullptr;
}

bool World::inject(Fault fault) {
    const int side = static_cast<int>(chaos_(2));
    const uint32_t path = chaos_(static_cast<uint32_t>(one_sided_.size()));
    if (!happen(fault, side, path)) return false;
    ++tally_.faults[static_cast<int>(fault)];
    trace("-- fault %d", static_cast<int>(fault));
    return true;
}

bool World::happen(Fault fault, int side, uint32_t path) {
    ConnectionPointer c;
    Flight* f = nullptr;
    int towards = 0;
    switch (fault) {
        case Fault::sender_loses_path:
            // Whichever end has chunks under way; the other learns of it by the fence.
            f = some_flight(c, towards);
            if (f != nullptr) path_lost(1 - towards, c);
            return f != nullptr;
        case Fault::receiver_loses_path:
            f = some_flight(c, towards);
            if (f != nullptr) path_lost(towards, c);
            return f != nullptr;
        case Fault::cut:
            c = at(side, path).live;
            if (!c || c->cut) return false;
            c->cut = true;
            for (auto& flights : c->towards)
                for (Flight& g : flights) g.dropped = g.dropped || chaos_(2) == 0;
            return true;
        case Fault::drop:
        case Fault::damage:
            f = some_flight(c, towards);
            if (f == nullptr || f->dropped || f->damaged || f->copy) return false;
            (fault == Fault::drop ? f->dropped : f->damaged) = true;
            if (fault == Fault::drop) {
                ++tally_.dropped;
                c->overdue[1 - towards] = true;
            } else {
                ++tally_.damaged;
            }
            return true;
        case Fault::duplicate: {
            f = some_flight(c, towards);
            if (f == nullptr || f->dropped || f->damaged || f->copy) return false;
            if (c->one_sided) return !std::exchange(f->repeated, true);
            Flight copy = *f;
            copy.copy = true;
            // Behind the original, but possibly behind much else, too.
            auto& flights = c->towards[towards];
            auto place = flights.begin();
            while (&*place != f) ++place;
            ++place;
            while (place != flights.end() && chaos_(2) == 0) ++place;
            flights.insert(place, std::move(copy));
            return true;
        }
        case Fault::half_dial:
            if (at(kLow, path).live) return false;
            dial(path, true);
            return true;
        case Fault::control:
            if (end(kLow).control == 0) return false;
            lose_control();
            return true;
        case Fault::half_resume:
            if (end(kLow).control == 0) return resume_control(true);
            lose_control();
            return resume_control(true);
    }
    return false;
}

bool World::over() const {
    for (const End& e : ends_) {
        if (e.to_send > 0 || !e.held.empty() || e.out.in_flight() > 0) return false;
    }
    return undelivered_ == 0;
}

void World::settle() {
    for (int round = 0; round < 10'000; ++round) {
        if (end(kLow).control == 0) resume_control(false);
        bool quiet = true;
        for (int side = 0; side < 2; ++side) {
            flush(side);
            quiet = quiet && end(side).outgoing.empty();
            deliver_control(side);
            for (PathEnd& p : end(side).paths) {
                quiet = quiet && p.thread.empty();
                while (!p.thread.empty()) {
                    const auto task = std::move(p.thread.front());
                    p.thread.pop_front();
                    task();
                }
            }
            for (const ConnectionPointer& c : connections_) {
                quiet =
                    quiet && (c->towards[side].empty() || !c->started[side]) && !c->reading[side];
                move_chunk(side, c);
            }
        }
        if (quiet) return count();
    }
    fail("nothing comes to rest after the last message: " + stuck());
}

void World::count() {
    for (int side = 0; side < 2; ++side) {
        End& e = end(side);
        const int direction = side == kLow ? 1 : 0;
        tally_.chunks_resent += e.out.chunks_resent;
        require(e.in.slots_in_use(direction) == 0, "a slot is still in use");
        if (end(1 - side).out.credits(direction) != e.slots.size())
            fail("of " + std::to_string(e.slots.size()) + " credits, " +
                 std::to_string(end(1 - side).out.credits(direction)) + " are left");
        for (const auto& [_, m] : e.sent)
            require(!end(1 - side).in.has(m.key), "a message was delivered once more");
        require(!e.out.has_chunks(), "chunks are left to send");
    }
}

std::string World::stuck() const {
    std::string s;
    for (const End& e : ends_) {
        s += std::to_string(e.to_send) + " to send, " + std::to_string(e.out.in_flight()) +
             " in flight, control " + std::to_string(e.control) + "; ";
        for (const auto& [id, m] : e.sent)
            if (!m.delivered) s += e.out.describe(id) + "; ";
    }
    return s;
}

Tally& Tally::operator+=(const Tally& o) {
    schedules += o.schedules;
    steps += o.steps;
    messages += o.messages;
    posted_destinations += o.posted_destinations;
    grown += o.grown;
    paths_lost += o.paths_lost;
    half_dials += o.half_dials;
    controls_lost += o.controls_lost;
    resumes += o.resumes;
    chunks_resent += o.chunks_resent;
    duplicates += o.duplicates;
    stale += o.stale;
    dropped += o.dropped;
    damaged += o.damaged;
    late_writes += o.late_writes;
    fenced_writes += o.fenced_writes;
    for (int i = 0; i < kFaults; ++i) faults[i] += o.faults[i];
    return *this;
}

std::string play(const Options& options, Tally& tally, uint64_t* steps) {
    ++tally.schedules;
    try {
        const uint64_t took = World(options, tally).run();
        tally.steps += took;
        if (steps != nullptr) *steps = took;
    } catch (const Violation& v) {
        return v.why;
    } catch (const EngineError& e) {
        return std::string("the engine refused: ") + e.what();
    }
    return {};
}

}  // namespace sim
