#include "planner/online.hpp"

namespace pipemorph::planner {

FirstReady::FirstReady(const Costs& costs, const Rules& rules)
    : rules_(rules), core_(costs, one_stage_each(costs.stages)), ran_(costs.stages) {}

void FirstReady::run(DelayAt delay_at, DelayAt transfer_at) {
    core_.set_delay_at(std::move(delay_at), std::move(transfer_at));
    core_.run_in_time(*this);
}

Choice FirstReady::choose(const Core& core, int stage, double now) const {
    const int n = core.costs().microbatches, warmup = rules_.warmup[stage];
    const int f = core.done(kForward, stage), b = core.done(kBackward, stage),
              w = core.done(kWeight, stage);
    const int backward = rules_.fused[stage] ? kFused : kBackward;
    double backward_at = b < f && f >= warmup ? core.arrival(kBackward, stage, b) : kNever;
    if (backward_at <= now && !core.fits(stage, backward, b)) backward_at = kNever;

    double forward_at = kNever;
    const bool held = rules_.exact_warmup && b == 0 && f >= warmup;
    const bool full = !rules_.slots.empty() && stage < core.last_stage() &&
                      f - core.done(kForward, stage + 1) >= rules_.slots[stage];
    if (f < n && f - w < rules_.caps[stage] && !held && !full && core.fits(stage, kForward, f)) {
        // An F waits for a free send before it starts, so that another op may run first.
        forward_at = core.arrival(kForward, stage, f);
        if (forward_at < kNever)
            forward_at = std::max(forward_at, core.clear({stage, kForward, f}));
    }

    if (backward_at <= now) return {true, {stage, backward, b}};
    if (forward_at <= now) return {true, {stage, kForward, f}};
    if (w < b) return {true, {stage, kWeight, w}};
    return {false, {}, std::min(forward_at, backward_at)};
}

void FirstReady::began(Core& core, int stage, const Op& op, double now, double end) {
    Ran& ran = ran_[stage];
    ran.codes.push_back(static_cast<unsigned char>(op.kind));
    ran.start.push_back(now);
    ran.end.push_back(end);
    // Its input is used now, which frees a slot.
    if (!rules_.slots.empty() && op.kind == kForward && stage > 0) core.wake(stage - 1, now);
}

}  // namespace pipemorph::planner
