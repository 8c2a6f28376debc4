#include "planner/online.hpp"

namespace pipemorph::planner {

FirstReady::FirstReady(const Costs& costs, const Rules& rules,
                       std::vector<std::vector<int>> stages_of)
    : rules_(rules),
      stages_of_(std::move(stages_of)),
      place_of_(places(stages_of_)),
      core_(costs, stages_of_),
      ran_(stages_of_.size()) {}

void FirstReady::run(DelayAt delay_at, DelayAt transfer_at) {
    core_.set_delay_at(std::move(delay_at), std::move(transfer_at));
    if (core_.foresees())
        core_.run_in_time<true>(*this);
    else
        core_.run_in_time<false>(*this);
}

Choice FirstReady::choose(const Core& core, int rank, double now) const {
    const int n = core.costs().microbatches;
    const std::vector<int>& mine = stages_of_[rank];
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
        const bool full = !rules_.slots.empty() && stage < core.last_stage() &&
                          f - core.done(kForward, stage + 1) >= rules_.slots[stage];
        if (f == n || f - core.done(kWeight, stage) >= rules_.caps[stage] || held || full ||
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

void FirstReady::began(Core& core, int rank, const Op& op, double now, double end) {
    Ran& ran = ran_[rank];
    ran.codes.push_back(static_cast<unsigned char>(4 * place_of_[op.stage] + op.kind));
    ran.start.push_back(now);
    ran.end.push_back(end);
    // Its input is used now, which frees a slot.
    if (!rules_.slots.empty() && op.kind == kForward && op.stage > 0) core.wake(op.stage - 1, now);
}

}  // namespace pipemorph::planner
