#include "planner/list_scheduler.hpp"

#include <array>

namespace pipemorph::planner {
namespace {

// `kMost`: stages of a rank.
template <int kMost>
struct UrgencySelector {
    const Costs& costs;
    const Times& tail;
    const Times& urgent;
    const ListTuning& tuning;
    const double bound;
    Order& order;
    std::vector<double>& time_remaining;
    const bool limited = costs.memory < kNever;
    double makespan = 0.0;
    long ops_run = 0;

    Choice choose(const EventCore& core, int rank, double now) const {
        const int* mine = costs.stages_of[rank].data();
        const int chunks = kMost == 1 ? 1 : static_cast<int>(costs.stages_of[rank].size());
        const double weigh = tuning.by_kind ? 0.0 : 1.0;

        // Ties: B, then F, then W; the later stage first.
        constexpr int kTurn[] = {1, 0, 2};
        Choice choice;
        double urgency = -kNever;
        const auto urgency_of = [&](int i, int kind, int m) {
            return weigh * urgent.row(kind, i)[m] + tuning.stage_tunings[i].of[kind];
        };
        const auto consider = [&](int i, int kind, int m) {
            const double its = urgency_of(i, kind, m);
            if (its < urgency || (its == urgency && kTurn[kind] >= kTurn[choice.op.kind])) return;
            choice.found = true;
            choice.op = {i, kind, m};
            urgency = its;
        };
        std::array<double, kMost> forwards_at, backwards_at;
        for (int chunk = chunks; chunk-- > 0;) {
            const int i = mine[chunk], f = core.done(kForward, i), b = core.done(kBackward, i),
                      w = core.done(kWeight, i);
            const bool open =
                f < costs.microbatches && f - w < tuning.caps[i] && (!limited || core.has_room(i));
            double forward_at = open ? core.arrival(kForward, i, f) : kNever;
            double backward_at = b < f ? core.arrival(kBackward, i, b) : kNever;
            if (!tuning.warmup.empty()) {
                if (f < tuning.warmup[i])
                    backward_at = kNever;
                else if (b == 0 && !tuning.at_least)
                    forward_at = kNever;
            }
            if (backward_at <= now) consider(i, kBackward, b);
            if (forward_at <= now) consider(i, kForward, f);
            if (w < b) consider(i, kWeight, w);
            forwards_at[chunk] = forward_at;
            backwards_at[chunk] = backward_at;
        }
        if (!choice.found) {
            for (int chunk = 0; chunk < chunks; ++chunk)
                choice.until = std::min({choice.until, forwards_at[chunk], backwards_at[chunk]});
            return choice;
        }

        const auto [stage, kind, m] = choice.op;
        if (const double patience = tuning.stage_tunings[stage].patience; patience != 0) {
            const double horizon = now + patience * costs.time(kind, stage, m);
            const auto await = [&](int i, int its, double at) {
                if (now < at && at < horizon && at < choice.until &&
                    urgency_of(i, its, core.done(its, i)) > urgency)
                    choice.until = at;
            };
            for (int chunk = 0; chunk < chunks; ++chunk) {
                await(mine[chunk], kBackward, backwards_at[chunk]);
                await(mine[chunk], kForward, forwards_at[chunk]);
            }
            choice.found = choice.until == kNever;
            if (!choice.found) return choice;
        }
        choice.give_up =
            now + tail.row(kind, stage)[m] >= bound || now + time_remaining[rank] >= bound;
        return choice;
    }

    void began(EventCore& core, int rank, const Op& op, double, double end) {
        ++ops_run;
        time_remaining[rank] -= costs.time(op.kind, op.stage, op.microbatch);
        makespan = std::max(makespan, end + costs.after[rank]);
        order[rank].push_back(core.code(op));
    }
    void ended(int, double) {}
};

}  // namespace

UrgencyScheduler::UrgencyScheduler(const Costs& costs)
    : costs_(costs), core_(costs), order_(costs.ranks()), time_remaining_(costs.ranks()) {
    for (int rank = 0; rank < costs.ranks(); ++rank)
        order_[rank].reserve(costs.stages_of[rank].size() * kKinds * costs.microbatches);
}

double UrgencyScheduler::run(const Times& tail, const Times& urgency, const ListTuning& tuning,
                             double bound) {
    for (int rank = 0; rank < costs_.ranks(); ++rank) {
        order_[rank].clear();
        time_remaining_[rank] = costs_.after[rank];
        for (const int i : costs_.stages_of[rank])
            time_remaining_[rank] +=
                costs_.microbatches *
                (costs_.took[kForward][i] + costs_.took[kBackward][i] + costs_.took[kWeight][i]);
    }
    const auto run_with = [&](auto selector) {
        const bool finished = core_.run_event_driven<true>(selector);
        ops_run_ = selector.ops_run;
        const long all = static_cast<long>(kKinds) * costs_.microbatches * costs_.stages;
        return finished && ops_run_ == all ? selector.makespan : kNever;
    };
    if (costs_.ranks() == costs_.stages)
        return run_with(
            UrgencySelector<1>{costs_, tail, urgency, tuning, bound, order_, time_remaining_});
    return run_with(UrgencySelector<kMostChunks>{costs_, tail, urgency, tuning, bound, order_,
                                                 time_remaining_});
}

}  // namespace pipemorph::planner
