#include "planner/list_scheduler.hpp"

namespace pipemorph::planner {
namespace {

struct Chooser {
    const Costs& costs;
    const Times& tail;
    const Times& urgent;
    const Tuning& tuning;
    const double bound;
    Order& order;
    std::vector<double>& left;
    double makespan = 0.0;
    long ops_run = 0;

    Choice choose(const Core& core, int i, double now) const {
        const int f = core.done(kForward, i), b = core.done(kBackward, i),
                  w = core.done(kWeight, i);
        const Bias& bias = tuning.biases[i];
        const double weigh = tuning.by_kind ? 0.0 : 1.0;
        const auto urgency_of = [&](int kind, int m) {
            return weigh * urgent.row(kind, i)[m] + bias.of[kind];
        };
        double forward_at = f < costs.microbatches && f - w < tuning.caps[i]
                                ? core.arrival(kForward, i, f)
                                : kNever;
        double backward_at = b < f ? core.arrival(kBackward, i, b) : kNever;
        if (!tuning.warmup.empty()) {
            if (f < tuning.warmup[i])
                backward_at = kNever;
            else if (b == 0 && !tuning.at_least)
                forward_at = kNever;
        }

        // At a tie B, then F, then W.
        Choice choice;
        double urgency = -kNever;
        const auto consider = [&](int kind, int m) {
            if (const double its = urgency_of(kind, m); its > urgency) {
                choice.found = true;
                choice.op = {i, kind, m};
                urgency = its;
            }
        };
        if (backward_at <= now) consider(kBackward, b);
        if (forward_at <= now) consider(kForward, f);
        if (w < b) consider(kWeight, w);

        if (!choice.found) {
            choice.until = std::min(forward_at, backward_at);
            return choice;
        }
        if (bias.patience != 0) {
            const double horizon = now + bias.patience * costs.took[choice.op.kind][i];
            if (now < backward_at && backward_at < horizon && urgency_of(kBackward, b) > urgency)
                choice.until = backward_at;
            if (now < forward_at && forward_at < horizon && forward_at < choice.until &&
                urgency_of(kForward, f) > urgency)
                choice.until = forward_at;
            choice.found = choice.until == kNever;
            if (!choice.found) return choice;
        }
        choice.give_up = now + tail.row(choice.op.kind, i)[choice.op.microbatch] >= bound ||
                         now + left[i] >= bound;
        return choice;
    }

    void began(Core&, int i, const Op& op, double, double end) {
        ++ops_run;
        left[i] -= costs.took[op.kind][i];
        makespan = std::max(makespan, end + costs.after[i]);
        order[i].push_back(static_cast<unsigned char>(op.kind));
    }
    void ended(int, double) {}
};

}  // namespace

MostUrgent::MostUrgent(const Costs& costs)
    : costs_(costs), core_(costs), order_(costs.stages), left_(costs.stages) {
    for (auto& row : order_) row.reserve(static_cast<size_t>(kKinds) * costs.microbatches);
}

double MostUrgent::run(const Times& tail, const Times& urgency, const Tuning& tuning,
                       double bound) {
    for (int i = 0; i < costs_.stages; ++i) {
        order_[i].clear();
        left_[i] = costs_.microbatches * (costs_.took[kForward][i] + costs_.took[kBackward][i] +
                                          costs_.took[kWeight][i]) +
                   costs_.after[i];
    }
    Chooser chooser{costs_, tail, urgency, tuning, bound, order_, left_};
    const bool finished = core_.run_in_time<true>(chooser);
    ops_run_ = chooser.ops_run;
    const long all = static_cast<long>(kKinds) * costs_.microbatches * costs_.stages;
    return finished && ops_run_ == all ? chooser.makespan : kNever;
}

}  // namespace pipemorph::planner
