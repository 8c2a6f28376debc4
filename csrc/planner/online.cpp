#include "planner/online.hpp"

namespace pipemorph::planner {

void OnlineScheduler::run() {
    if (core_.knows_arrivals())
        core_.run_event_driven<true>(*this);
    else
        core_.run_event_driven<false>(*this);
}

Choice OnlineScheduler::choose(const EventCore& core, int rank, double now) const {
    const int n = core.costs().microbatches;
    const std::vector<int>& mine = core.costs().stages_of[rank];
    double until = kNever;

    for (auto each = mine.rbegin(); each != mine.rend(); ++each) {
        const int stage = *each, b = core.done(kBackward, stage);
        const int f = core.done(kForward, stage);
        if (b == f || f < rules_.warmup[stage]) continue;
        const int backward = rules_.fused[stage] ? kFused : kBackward;
        const double at = core.arrival(kBackward, stage, b);
        if (at > now)
            until = std::min(until, at);
        else if (core.fits(stage, backward, b))
            return {true, {stage, backward, b}};
    }

    for (auto each = mine.rbegin(); each != mine.rend(); ++each) {
        const int stage = *each, f = core.done(kForward, stage);
        const bool held =
            rules_.exact_warmup && core.done(kBackward, stage) == 0 && f >= rules_.warmup[stage];
        if (f == n || f - core.done(kWeight, stage) >= rules_.caps[stage] || held ||
            !core.fits(stage, kForward, f))
            continue;
        // An F waits for a free send before it starts, so that another op may run first.
        double at = core.arrival(kForward, stage, f);
        if (at < kNever) at = std::max(at, core.clear({stage, kForward, f}));
        if (at <= now) return {true, {stage, kForward, f}};
        until = std::min(until, at);
    }

    for (auto each = mine.rbegin(); each != mine.rend(); ++each)
        if (const int w = core.done(kWeight, *each); w < core.done(kBackward, *each))
            return {true, {*each, kWeight, w}};
    return {false, {}, until};
}

}  // namespace pipemorph::planner
