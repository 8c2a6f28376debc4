#include "planner/core.hpp"

namespace pipemorph::planner {

void Costs::set_factors(const std::vector<std::vector<double>>& rows) {
    const size_t n = microbatches;
    factors.clear();
    for (const auto& row : rows) factors.insert(factors.end(), row.begin(), row.end());
    for (int kind = 0; kind <= kKinds; ++kind) {
        times[kind].clear();
        for (int i = 0; i < stages; ++i) {
            double sum = 0.0;
            for (const double factor : rows[i]) {
                times[kind].push_back(took[kind][i] * factor);
                sum += times[kind].back();
            }
            took[kind][i] = sum / static_cast<double>(n);
        }
    }
}

void Costs::swap_microbatches(int a, int b) {
    for (int i = 0; i < stages; ++i) {
        const size_t row = static_cast<size_t>(i) * microbatches;
        std::swap(factors[row + a], factors[row + b]);
        for (auto& its : times) std::swap(its[row + a], its[row + b]);
    }
}

EventCore::EventCore(const Costs& costs)
    : costs_(costs),
      delay_(&costs.delay),
      arrivals_(costs.stages, costs.microbatches),
      shared_(costs.delay.size()),
      wires_(2 * costs.delay.size()),
      agenda_(ranks()),
      running_(ranks()),
      idle_(ranks()),
      now_(ranks()) {
    for (auto& done : done_) done.resize(costs.stages);
    for (int stage = 0; stage < costs.stages; ++stage)
        for (const int kind : {kForward, kBackward, kWeight, kFused}) {
            OpClass its{.stage = stage, .kind = kind, .took = costs.took[kind][stage]};
            if (costs.varies())
                its.times =
                    costs.times[kind].data() + static_cast<size_t>(stage) * costs.microbatches;
            const int counted = kind == kFused ? kBackward : kind;
            its.done = &done_[counted][stage];
            if (kind != kWeight) its.input = arrivals_.row(counted, stage);
            its.to = kind == kForward ? stage + 1 : kind == kWeight ? -1 : stage - 1;
            if (its.to > last_stage()) {
                its.to = -1;
                its.output = arrivals_.row(kBackward, stage);
            } else if (its.to >= 0) {
                its.link = std::min(stage, its.to);
                its.is_within_rank = costs.is_within_rank(its.link);
                its.outstanding = costs.outstanding[its.link];
                its.queues = costs.queues[its.link];
                its.half_duplex = costs.half_duplex[its.link];
                its.transfer = costs.transfer[its.link];
                its.wire = &wires_[2 * its.link + (kind != kForward && !its.half_duplex)];
                its.output = arrivals_.row(counted, its.to);
            }
            op_classes_.push_back(its);
        }
    if (costs.offloads())
        for (const int limit : costs.device_limits) residency_.emplace_back(limit);
}

void EventCore::reset() {
    for (const int kind : {kForward, kBackward})
        std::fill(arrivals_.of[kind].begin(), arrivals_.of[kind].end(), kNever);
    std::fill(arrivals_.row(kForward, 0), arrivals_.row(kForward, 0) + costs_.microbatches, 0.0);
    for (auto& done : done_) std::fill(done.begin(), done.end(), 0);
    for (auto& residency : residency_) residency.clear();
    std::fill(wires_.begin(), wires_.end(), 0.0);
    std::fill(idle_.begin(), idle_.end(), false);
}

void EventCore::set_tail(const Times* tail) {
    // The local search runs thousands of orders with the same one.
    std::array<const double*, kKinds> rows{};
    if (tail)
        for (int kind = 0; kind < kKinds; ++kind) rows[kind] = tail->row(kind, 0);
    if (rows == tails_) return;
    tails_ = rows;
    for (OpClass& its : op_classes_)
        its.tail = tail && its.kind != kFused ? tail->row(its.kind, its.stage) : nullptr;
}

}  // namespace pipemorph::planner
