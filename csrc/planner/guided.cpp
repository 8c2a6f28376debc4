#include "planner/guided.hpp"

#include <cstdint>
#include <limits>

namespace pipemorph::planner {

Guided::Guided(const Costs& costs, const Guide& guide)
    : guide_(guide),
      core_(costs, one_stage_each(costs.stages)),
      stages_(costs.stages),
      ran_(costs.stages) {
    for (int i = 0; i < costs.stages; ++i) {
        Stage& stage = stages_[i];
        std::array<int, kKinds> done{};
        for (const unsigned char code : guide.order[i]) {
            const int counted = code == kFused ? int{kBackward} : code;
            if (counted == kBackward) stage.backward.push_back(code);
            stage.position[counted].push_back(static_cast<int>(stage.ops.size()));
            // The W of a fused backward has its place, too: positions are by microbatch.
            if (code == kFused) {
                stage.position[kWeight].push_back(static_cast<int>(stage.ops.size()));
                ++done[kWeight];
            }
            stage.ops.push_back({i, code, done[counted]++});
        }
    }
}

void Guided::run(DelayAt delay_at, DelayAt transfer_at) {
    for (Stage& stage : stages_) stage.next = 0;
    for (auto& ran : ran_) ran = {};
    core_.set_delay_at(std::move(delay_at), std::move(transfer_at));
    core_.run_in_time(*this);
}

Choice Guided::choose(const Core& core, int stage, double now) {
    Stage& its = stages_[stage];
    const int size = static_cast<int>(its.ops.size());
    const auto has_run = [&](const Op& op) { return core.done(op.kind, stage) > op.microbatch; };
    while (its.next < size && has_run(its.ops[its.next])) ++its.next;
    if (its.next == size) return {};
    const Op& turn = its.ops[its.next];
    // Where the device has no room for it, a W has to make some.
    const bool waits =
        guide_.waits[stage].count(its.next) && core.fits(stage, turn.kind, turn.microbatch);

    const int n = core.costs().microbatches;
    const int f = core.done(kForward, stage), b = core.done(kBackward, stage),
              w = core.done(kWeight, stage);
    int first = std::numeric_limits<int>::max();
    Op found{};
    double until = kNever;
    const auto consider = [&](int kind, int microbatch, bool may_go_first) {
        const int position = its.position[kind == kFused ? kBackward : kind][microbatch];
        const bool in_turn = position == its.next;
        if (!in_turn && (waits || !may_go_first)) return;
        if (kind != kWeight && !core.fits(stage, kind, microbatch)) return;
        double at = kind == kWeight ? 0.0 : core.arrival(kind, stage, microbatch);
        // An F waits for a free send before it starts, so that another op may run first.
        if (kind == kForward && at < kNever && !(in_turn && waits))
            at = std::max(at, core.clear({stage, kForward, microbatch}));
        if (at > now) {
            until = std::min(until, at);
        } else if (position < first) {
            first = position;
            found = {stage, kind, microbatch};
        }
    };
    if (f < n) {
        const bool full = !guide_.slots.empty() && stage < core.last_stage() &&
                          f - core.done(kForward, stage + 1) >= guide_.slots[stage];
        consider(kForward, f, f - w < guide_.caps[stage] && !full);
    }
    if (b < f && (its.backward[b] == kBackward || w == b)) consider(its.backward[b], b, true);
    if (w < b) consider(kWeight, w, true);
    if (first < std::numeric_limits<int>::max()) return {true, found};
    return {false, {}, until};
}

void Guided::began(Core& core, int stage, const Op& op, double now, double end) {
    FirstReady::Ran& ran = ran_[stage];
    ran.codes.push_back(static_cast<unsigned char>(op.kind));
    ran.start.push_back(now);
    ran.end.push_back(end);
    // Its input is used now, which frees a slot.
    if (!guide_.slots.empty() && op.kind == kForward && stage > 0) core.wake(stage - 1, now);
}

namespace {

// From 0 to 1, the same on every machine.
double drawn(double sent, double most, int link, int draw) {
    const auto moment = static_cast<std::uint64_t>(std::min(sent / most * 1e6, 9e18));
    auto mixed = static_cast<std::uint32_t>(
        moment * 0x9E3779B1u + link * std::uint64_t{0x85EBCA6B} + draw * std::uint64_t{0xC2B2AE35});
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6Du;
    mixed = (mixed ^ mixed >> 12) * 0x297A2D39u;
    return (mixed ^ mixed >> 15) / 4294967296.0;
}

}  // namespace

std::array<double, 2> jittered(const Costs& costs, const Guide& guide, double most, int draws) {
    InOrder in_order(costs);
    Guided guided(costs, guide);
    std::array<double, 2> sum{};
    for (int draw = 0; draw < draws; ++draw) {
        const DelayAt delay_at = [&](int link, double sent) {
            return costs.delay[link] + most * drawn(sent, most, link, draw);
        };
        sum[0] += in_order.run(guide.order, delay_at);
        guided.run(delay_at);
        double makespan = 0.0;
        for (int i = 0; i < costs.stages; ++i)
            makespan = std::max(makespan, guided.ran()[i].end.back() + costs.after[i]);
        sum[1] += makespan;
    }
    for (double& each : sum) each /= draws;
    return sum;
}

}  // namespace pipemorph::planner
