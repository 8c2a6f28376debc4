// Paths: making, losing and fencing them, by the rules of engine/link_paths.cpp and
// engine/link_fences.cpp.
#include "sim_model.hpp"

namespace sim {

void World::dial(uint32_t path, bool half) {
    PathEnd& low = at(kLow, path);
    if (low.live) return;
    auto c = std::make_shared<Connection>();
    c->path = path;
    c->epoch = ++low.epoch;
    c->one_sided = one_sided_[path];
    connections_.push_back(c);
    require(c->epoch > at(1, path).epoch, "an epoch was used twice");
    attach(1, c);
    trace("path %u epoch %u is made%s", path, c->epoch, half ? " by halves" : "");
    if (half) {
        ++tally_.half_dials;
        c->cut = true;
        c->retired[kLow] = c->given_up[kLow] = true;
    } else {
        attach(kLow, c);
    }
}

void World::attach(int side, const ConnectionPointer& c) {
    PathEnd& p = at(side, c->path);
    if (c->epoch <= p.fenced) {
        c->cut = true;
        c->retired[side] = c->given_up[side] = true;
        return;
    }
    const ConnectionPointer before = std::exchange(p.live, c);
    p.epoch = c->epoch;
    c->attached[side] = true;
    if (before) {
        p.replaced.push_back(before);
        p.thread.push_back([this, side, before] {
            std::erase(at(side, before->path).replaced, before);
            retire(side, *before);
            send_fence(side, before->path, before->epoch);
        });
    }
    p.thread.push_back([side, c] { c->started[side] = true; });
}

void World::retire(int side, Connection& c) {
    c.given_up[side] = true;
    stop_reading(side, c);
    c.retired[side] = true;
}

void World::stop_reading(int side, Connection& c) {
    if (!c.reading[side]) return;
    end(side).in.finish_chunk(c.reading[side]->sink, false, 3);
    c.reading[side].reset();
}

void World::send_fence(int side, uint32_t path, uint32_t epoch) {
    End& e = end(side);
    FenceFrame fence{path, epoch, e.out.entrusted_to(path, epoch)};
    if (!options_.rules.ask_before_resend) {
        BitmapFrame guess{path, epoch, {}};
        for (const uint64_t id : fence.messages) guess.reports.push_back({id, 0, {}});
        e.out.fenced(guess);
    }
    e.stream.send(fence);
    flush(side);
}

void World::path_lost(int side, const ConnectionPointer& c) {
    if (c->retired[side]) return;
    retire(side, *c);
    PathEnd& p = at(side, c->path);
    if (p.live != c) return;
    ++tally_.paths_lost;
    trace("%d loses path %u epoch %u", side, c->path, c->epoch);
    p.live.reset();
    send_fence(side, c->path, c->epoch);
}

void World::fence_requested(int side, const FenceFrame& fence) {
    uint32_t& fenced = at(side, fence.path).fenced;
    fenced = std::max(fenced, fence.epoch);
    at(side, fence.path).thread.push_back([this, side, fence] { answer_fence(side, fence); });
}

void World::answer_fence(int side, const FenceFrame& fence) {
    PathEnd& p = at(side, fence.path);
    // A newer connection may have taken its place after the fence was posted to this thread.
    if (options_.rules.fence_retires_replaced)
        for (const ConnectionPointer& c : p.replaced)
            if (c->epoch <= fence.epoch) retire(side, *c);
    if (p.live && p.epoch <= fence.epoch) {
        const ConnectionPointer live = std::exchange(p.live, nullptr);
        live->given_up[side] = true;
        if (options_.rules.retire_before_report)
            retire(side, *live);
        else
            stop_reading(side, *live);
        send_fence(side, live->path, live->epoch);
    }
    trace("%d answers the fence of path %u epoch %u", side, fence.path, fence.epoch);
    BitmapFrame answer{fence.path, fence.epoch, end(side).in.report(fence.messages)};
    if (!answer.reports.empty()) end(side).stream.send(answer);
    flush(side);
}

}  // namespace sim
