// Paths: making, losing and retiring their connections, as engine/link_paths.cpp does it for the
// core.
#include "sim_model.hpp"

namespace sim {
namespace {

QpAddress queue_pair() {
    QpAddress qp;
    qp.mtu = 1;
    return qp;
}

}  // namespace

void World::act(int side) {
    const Actions actions = core(side).take_actions();
    for (const uint32_t path : actions.withdraw)
        retire(side, *find(path, core(side).paths()[path].machine.epoch()));
    for (const Actions::Fail& f : actions.fail) {
        const ConnectionPointer c = current(side, f.path);
        require(c != nullptr, "a path has no connection to give up");
        threads(side, f.path).data.push_back([this, side, c] { path_lost(side, c); });
    }
    for (const Actions::Retire& what : actions.retire)
        threads(side, what.path).data.push_back([this, side, what] { retire_up_to(side, what); });
    for (const Actions::Grow& what : actions.grow)
        threads(side, 0).setup.push_back([this, side, what] { grow(side, what); });
    // A reader may put it off until it has done what it read for.
    if (actions.flush && random_(4) != 0) flush(side);
}

ConnectionPointer World::find(uint32_t path, uint32_t epoch) const {
    for (const ConnectionPointer& c : connections_)
        if (c->path == path && c->epoch == epoch) return c;
    return nullptr;
}

ConnectionPointer World::current(int side, uint32_t path) {
    for (const ConnectionPointer& c : connections_)
        if (c->path == path && c->held[side] && core(side).paths().is_current(path, c->epoch))
            return c;
    return nullptr;
}

bool World::dial(bool half) {
    const auto calls = core(kLow).due(now_);
    for (const auto& [path, epoch] : calls) {
        auto c = std::make_shared<Connection>();
        c->path = path;
        c->epoch = epoch;
        c->kind = kinds_[path];
        connections_.push_back(c);
        if (half) ++tally_.half_dials;
        if (c->kind == Transport::rdma) {
            threads(kLow, path).setup.push_back([this, c, half] { offer(c, half); });
            continue;
        }
        if (persists_ && *options_.persistent == Persistent::no_paths) {
            connections_.pop_back();
            core(kLow).dial_failed(path, epoch, "no answer", now_);
            continue;
        }
        require(epoch > core(1).paths()[path].machine.epoch(), "an epoch was used twice");
        attach(1, c);
        trace("path %u epoch %u is made%s", path, epoch, half ? " by halves" : "");
        if (half) {
            c->cut = true;
            give_up(kLow, *c);
            core(kLow).dial_failed(path, epoch, "no answer", now_);
        } else {
            threads(kLow, path).setup.push_back([this, c] { attach(kLow, c); });
        }
    }
    return !calls.empty();
}

void World::attach(int side, const ConnectionPointer& c) {
    std::optional<uint32_t> thread;
    if (local_threads_ > 0) thread = c->path % local_threads_;
    if (!core(side).attach(c->path, c->epoch, thread, now_)) {
        c->cut = true;
        give_up(side, *c);
        return;
    }
    c->attached[side] = c->up[side] = true;
    start(side, c);
    act(side);
}

void World::start(int side, const ConnectionPointer& c) {
    require(!c->fenced[side], "a connection that the peer has given up is taken");
    c->held[side] = true;
    threads(side, c->path).data.push_back([side, c] { c->started[side] = true; });
}

// By halves: the dialler's queue pair cannot be connected when the answer comes.
void World::offer(const ConnectionPointer& c, bool half) {
    c->half = half;
    if (random_(8) == 0) c->stalled_until_ns = now_ + random_(8) * kSecond;
    const bool none =
        random_(8) == 0 || (persists_ && *options_.persistent == Persistent::no_paths);
    if (!core(kLow).offer(c->path, c->epoch, queue_pair(), none ? "no queue pair" : "", now_)) {
        give_up(kLow, *c);
        give_up(1, *c);
    }
    act(kLow);
}

void World::answer_offer(const OfferFrame& offer) {
    const ConnectionPointer c = find(offer.path, offer.epoch);
    require(c != nullptr, "an offer that was not made");
    if (now_ < c->stalled_until_ns)
        return threads(1, c->path).setup.push_back([this, offer] { answer_offer(offer); });
    const bool made = random_(8) != 0;
    c->attached[1] = made;
    if (core(1).answer(offer, queue_pair(), made ? "" : "no queue pair", now_))
        start(1, c);
    else
        give_up(1, *c);
    act(1);
}

void World::connect_offered(const AnswerFrame& answer) {
    const ConnectionPointer c = find(answer.path, answer.epoch);
    require(c != nullptr, "an answer to an offer that was not made");
    c->attached[kLow] = !c->half;
    trace("rail %u epoch %u is connected", c->path, c->epoch);
    if (core(kLow).connected(c->path, c->epoch, c->half ? "no route" : "", now_))
        start(kLow, c);
    else
        give_up(kLow, *c);
    act(kLow);
}

void World::give_up(int side, Connection& c) {
    c.retired[side] = c.given_up[side] = true;
}

void World::retire(int side, Connection& c) {
    stop_reading(side, c);
    give_up(side, c);
}

void World::stop_reading(int side, Connection& c) {
    if (!c.reading[side]) return;
    core(side).finish_chunk(c.reading[side]->sink, false, 3);
    c.reading[side].reset();
}

void World::path_lost(int side, const ConnectionPointer& c) {
    if (c->retired[side] || !c->started[side]) return;
    retire(side, *c);
    if (!core(side).path_lost(c->path, c->epoch, "it broke", now_)) return;
    c->held[side] = false;
    ++tally_.paths_lost;
    trace("%d loses path %u epoch %u", side, c->path, c->epoch);
    act(side);
}

void World::retire_up_to(int side, const Actions::Retire& what) {
    std::vector<uint32_t> epochs;
    bool stuck = false;
    for (const ConnectionPointer& c : connections_) {
        if (c->path != what.path || c->epoch > what.epoch || !c->held[side]) continue;
        c->given_up[side] = true;
        // A queue pair in error: its memory can be reached until it has been destroyed.
        if (c->kind == Transport::rdma && !c->retired[side] && random_(4) == 0) {
            stuck = true;
            continue;
        }
        tally_.replaced += !core(side).paths().is_current(c->path, c->epoch);
        retire(side, *c);
        c->held[side] = false;
        epochs.push_back(c->epoch);
    }
    core(side).retired(what.path, epochs, now_);
    if (stuck)
        threads(side, what.path).data.push_back([this, side, what] { retire_up_to(side, what); });
    act(side);
}

}  // namespace sim
