// What happens next, what goes wrong, and what must be true in the end.
#include "sim_model.hpp"

namespace sim {
namespace {

constexpr uint64_t kMaxSteps = 200'000;
constexpr int64_t kForever = 1'000'000 * kSecond;

}  // namespace

World::World(const Options& options, Tally& tally)
    : options_(options), tally_(tally), random_(options.seed), chaos_(~options.seed) {
    const uint32_t layout = random_(3);
    const uint32_t others = (layout == 2 ? 0 : 1) + random_(layout == 2 ? 2 : 3);
    if (layout == 2) rails_ = 1 + random_(2);
    kinds_.assign(rails_, Transport::rdma);
    const Transport other = layout == 1 ? Transport::shm : Transport::tcp;
    kinds_.insert(kinds_.end(), others, other);
    if (layout == 0 && random_(2) == 0) local_threads_ = 1 + random_(2);
    std::vector<std::pair<uint32_t, uint32_t>> rails;
    for (uint32_t i = 0; i < rails_; ++i) rails.emplace_back(i, i);
    flight_bytes_ = (3 + random_(18)) * kChunkBytes;
    rtt_ = random_(3) != 0 ? 20 * kMillisecond : 2 * kSecond;
    patience_ = std::array{kSecond, 4 * kSecond, 30 * kSecond}[random_(3)];
    for (int side = 0; side < 2; ++side) {
        // Faults that pass may take any time here, where a step is no moment.
        const int64_t give_up = options.persistent ? 2 * patience_ : kForever;
        ends_.emplace_back(LinkCore::Settings{side == kLow, uint32_t(1 - side), 1 + random_(3),
                                              kChunkBytes, flight_bytes_, patience_, give_up});
        End& e = ends_.back();
        // The acceptor learns from the offers which rail is whose.
        if (side != kLow) rails.assign(rails_, {0, 0});
        e.core.assign_paths(rails, other, others);
        e.core.start(now_);
        e.threads.resize(kinds_.size());
        e.to_send = 1 + random_(random_(8) == 0 ? 16 : 4);
    }
    // The order of things as in a real link: control first, then grants and paths.
    next_control_ = 1;
    ends_[0].control = ends_[1].control = next_control_++;
    sizes_change_ = options.seed % 4 == 3;
    leases_ = random_(2) == 0;
    leases_last_ = random_(2) == 0;
    for (int side = 0; side < 2; ++side)
        reserve(side, 1 + random_(2) + uint32_t{layout == 1 && leases_},
                sizes_change_ ? kChunkBytes : kSlotBytes);
    faults_left_ = options.random_faults;
    persists_from_ = chaos_(400);
    afflicted_ = static_cast<int>(1 + chaos_(3));
}

uint64_t World::run() {
    uint64_t steps = 0;
    while (!over()) {
        if (options_.persistent && steps == persists_from_) begin_to_persist();
        if (options_.planned && options_.planned->first == steps)
            planned_left_ = options_.planned->second;
        // A planned fault waits until there is something that it can happen to.
        if (planned_left_ && inject(*planned_left_)) planned_left_.reset();
        if (faults_left_ > 0 && chaos_(48) == 0 &&
            inject(static_cast<Fault>(chaos_(uint32_t{kFaults}))))
            --faults_left_;
        step();
        if (++steps > kMaxSteps) fail("no progress: " + stuck());
        if (!dead_.empty()) {
            tally_.dead += persists_;  // a link may also be without a path for too long before
            return steps;
        }
    }
    if (persists_) {
        ++tally_.over_in_time;
        return steps;  // what no end waits for may be under way for ever
    }
    settle();
    return steps;
}

void World::begin_to_persist() {
    persists_ = true;
    persists_since_ns_ = now_;
    trace("-- from now on, towards %d: fault %d", afflicted_,
          static_cast<int>(*options_.persistent));
    if (*options_.persistent == Persistent::no_paths)
        for (const ConnectionPointer& c : connections_) c->cut = true;
}

void World::step() {
    const int side = static_cast<int>(random_(2));
    const uint32_t path = random_(static_cast<uint32_t>(kinds_.size()));
    now_ += random_(10) * kMillisecond;
    switch (random_(16)) {
        case 0:
            if (end(side).to_send > 0 || !end(side).leased.empty()) return post(side);
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
            return run_next(threads(side, path).data);
        case 12:
            return run_next(random_(2) == 0 ? threads(side, path).data : threads(side, path).setup);
        case 13:
        case 14:
            if (sizes_change_ && random_(4) == 0)
                return reserve(side, 1 + random_(2), end(side).largest + random_(3));
            return receive(side);
        default:
            if (end(kLow).control == 0)
                resume_control(false);
            else
                tick();
            tidy();
    }
}

void World::tick() {
    now_ += random_(100) * kMillisecond;
    dial(false);
    const bool echoes = end(kLow).control != 0 && end(kLow).control == end(1).control;
    for (int side = 0; side < 2; ++side) {
        if (echoes) {
            core(side).frame_received(now_);
            core(side).echoed(rtt_, now_);
        }
        const std::string stuck = core(side).check_flow(now_);
        if (!stuck.empty() && !options_.persistent)
            fail("no progress, says the link, of faults that pass: " + stuck);
        if (!stuck.empty()) dead_ = stuck;
        check_patience(side);
        core(side).check_rails(random_(16) == 0, now_);
        act(side);
        for (const PathSet::Path& p : core(side).paths())
            require(!p.offered || now_ - p.offered_ns < PathSet::kConnectLimitNs,
                    "an offer stands although it has no answer");
    }
}

// Until a thread is run and a frame is read, seconds pass here.
constexpr int64_t kSlow = 60 * kSecond;

// Dead or delivered: no end waits for ever.
void World::check_patience(int side) {
    if (!persists_ || !dead_.empty()) return;
    constexpr int64_t kRoundTrips = 8;  // the watchdog's
    const int64_t patience = std::max(patience_, kRoundTrips * rtt_);
    const int64_t waited = now_ - std::max(persists_since_ns_, progress_ns_);
    tally_.longest_to_die = std::max(tally_.longest_to_die, waited * 100 / patience);
    if (waited > 6 * patience + kSlow && core(side).out().in_flight() > 0)
        fail("for " + std::to_string(waited / kMillisecond) +
             " ms nothing was delivered, and the link is not dead: " + stuck());
}

void World::run_next(std::deque<std::function<void()>>& thread) {
    if (thread.empty()) return;
    const auto task = std::move(thread.front());
    thread.pop_front();
    task();
}

void World::tidy() {
    std::erase_if(connections_, [](const ConnectionPointer& c) {
        const auto done = [&](int side) {
            return c->retired[side] && !c->held[side] && c->towards[side].empty();
        };
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
    const uint32_t path = chaos_(static_cast<uint32_t>(kinds_.size()));
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
            c = current(side, path);
            if (!c || c->cut) return false;
            c->cut = true;
            for (auto& flights : c->towards)
                for (Flight& g : flights) g.dropped = g.dropped || chaos_(2) == 0;
            return true;
        case Fault::drop:
        case Fault::swallow:
        case Fault::damage:
            f = some_flight(c, towards);
            if (f == nullptr || f->dropped || f->damaged || f->copy) return false;
            (fault == Fault::damage ? f->damaged : f->dropped) = true;
            f->swallowed = fault == Fault::swallow;
            c->overdue[1 - towards] = c->overdue[1 - towards] || fault == Fault::drop;
            ++(fault == Fault::damage ? tally_.damaged : tally_.dropped);
            return true;
        case Fault::duplicate: {
            f = some_flight(c, towards);
            if (f == nullptr || f->dropped || f->damaged || f->copy) return false;
            if (c->one_sided()) return !std::exchange(f->repeated, true);
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
            return dial(true);
        case Fault::control:
            if (end(kLow).control == 0) return false;
            lose_control();
            return true;
        case Fault::half_resume:
            if (end(kLow).control == 0) return resume_control(true);
            lose_control();
            return resume_control(true);
        case Fault::suspect:
            c = current(side, path);
            if (!c || c->kind != Transport::rdma || !c->up[side] || c->retired[side]) return false;
            core(side).path_suspect(path, c->epoch, true, now_);
            act(side);
            return !std::exchange(c->suspected[side], true);
        case Fault::quarantine_rail:
            return bar_a_rail(side);
    }
    return false;
}

// Not the last thing that carries.
bool World::bar_a_rail(int side) {
    End& e = end(side);
    std::set<uint32_t> quarantined = e.quarantined;
    quarantined.insert(end(1 - side).quarantined.begin(), end(1 - side).quarantined.end());
    const uint32_t rest = static_cast<uint32_t>(kinds_.size() - quarantined.size());
    const uint32_t rail = chaos_(std::max(rails_, 1u));
    if (rails_ == 0 || rest < 2 || quarantined.contains(rail) || e.largest >= kSlotBytes)
        return false;
    const auto slots = static_cast<uint32_t>(e.peaks.size());
    const size_t before = e.slots.size();
    reserve(side, slots, e.largest + 1, rail);
    require(e.core.paths().without_rail_since() != 0 ||
                std::any_of(
                    connections_.begin(), connections_.end(),
                    [&](const auto& c) { return c->kind == Transport::rdma && carries(side, *c); }),
            "a barred rail counts as carrying");
    return e.slots.size() > before;
}

bool World::over() const {
    for (const End& e : ends_) {
        if (e.to_send > 0 || !e.leased.empty() || !e.held.empty() || e.core.out().in_flight() > 0)
            return false;
    }
    return undelivered_ == 0;
}

void World::settle() {
    for (int round = 0; round < 10'000; ++round) {
        if (end(kLow).control == 0) resume_control(false);
        bool quiet = true;
        now_ += 10 * kMillisecond;
        if (kinds_.front() == Transport::shm) tick();  // segments may wait for a path
        for (int side = 0; side < 2; ++side) {
            if (kinds_.front() == Transport::shm) {
                send_chunk(side, 0);
                const size_t credits = core(1 - side).out().credits(side == kLow ? 1 : 0);
                quiet = quiet && credits >= end(side).slots.size();
            }
            flush(side);
            quiet = quiet && end(side).outgoing.empty();
            deliver_control(side);
            for (Threads& t : end(side).threads) {
                for (auto* thread : {&t.data, &t.setup}) {
                    quiet = quiet && thread->empty();
                    for (size_t n = thread->size(); n > 0; --n) run_next(*thread);
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
        const LinkCore::Counters& counters = e.core.counters();
        tally_.chunks_resent += e.core.out().chunks_resent;
        tally_.duplicates += counters.duplicate_chunks;
        tally_.stale += counters.stale_chunks;
        tally_.late += counters.late_messages;
        tally_.fallbacks += e.core.paths().fallbacks();
        tally_.failbacks += e.core.paths().failbacks();
        require(e.core.in().slots_in_use(direction) == 0, "a slot is still in use");
        for (uint32_t i = 0; i < rails_; ++i)
            require(!e.core.paths()[i].current || !e.core.paths().quarantined(i),
                    "a barred rail is still connected");
        if (core(1 - side).out().credits(direction) != e.slots.size())
            fail("of " + std::to_string(e.slots.size()) + " credits, " +
                 std::to_string(core(1 - side).out().credits(direction)) + " remain");
        for (const auto& [_, m] : e.sent)
            require(!core(1 - side).in().has(m.key), "a message was delivered once more");
        require(!e.core.out().has_chunks(), "chunks wait to be sent");
    }
}

std::string World::stuck() const {
    std::string s;
    for (const End& e : ends_) {
        s += std::to_string(e.to_send) + " to send, " + std::to_string(e.core.out().in_flight()) +
             " in flight, control " + std::to_string(e.control) + "; ";
        for (const auto& [id, m] : e.sent)
            if (!m.delivered) s += e.core.out().describe(id) + "; ";
    }
    return s;
}

Tally& Tally::operator+=(const Tally& o) {
    schedules += o.schedules;
    steps += o.steps;
    messages += o.messages;
    grown += o.grown;
    leases += o.leases;
    paths_lost += o.paths_lost;
    half_dials += o.half_dials;
    controls_lost += o.controls_lost;
    resumes += o.resumes;
    chunks_resent += o.chunks_resent;
    duplicates += o.duplicates;
    stale += o.stale;
    fallbacks += o.fallbacks;
    failbacks += o.failbacks;
    segments += o.segments;
    replaced += o.replaced;
    dropped += o.dropped;
    damaged += o.damaged;
    late += o.late;
    slots_added += o.slots_added;
    full_windows += o.full_windows;
    late_writes += o.late_writes;
    fenced_writes += o.fenced_writes;
    for (int i = 0; i < kFaults; ++i) faults[i] += o.faults[i];
    dead += o.dead;
    over_in_time += o.over_in_time;
    longest_to_die = std::max(longest_to_die, o.longest_to_die);
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
