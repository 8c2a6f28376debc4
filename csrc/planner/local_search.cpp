#include "planner/local_search.hpp"

#include <algorithm>

#include "planner/search.hpp"

namespace pipemorph::planner {
namespace {

// Ops that follow each other on a stage without a gap, first to last, on the critical path.
struct Block {
    int stage, first, last;
};

// A critical path, from its end. Where an op waited for its stage and its message alike, the
// generator says which is followed.
void trace(const Costs& costs, const InOrder& executor, const Order& order, Rng& rng,
           std::vector<Block>& blocks) {
    const int last = costs.stages - 1;
    blocks.clear();
    int stage = 0;
    int position = kKinds * costs.microbatches - 1, end = position;
    const auto ends = [&](int i) { return executor.end(i, position) + costs.after[i]; };
    for (int i = 1; i < costs.stages; ++i)
        if (ends(i) > ends(stage)) stage = i;
    while (true) {
        const double start = executor.start(stage, position);
        const int kind = order[stage][position], m = executor.microbatch(stage, position);
        const bool received = kind == kForward ? stage > 0 : kind == kBackward && stage < last;
        const bool message = received && executor.core().arrival(kind, stage, m) == start;
        bool machine = position > 0 && executor.free(stage, position - 1) == start;
        if (machine && message && rng.below(2)) machine = false;
        if (machine) {
            --position;
            continue;
        }
        if (end > position) blocks.push_back({stage, position, end});
        if (!message) return;
        stage += kind == kForward ? -1 : 1;
        position = end = executor.position(kind, stage, m);
    }
}

// Whether a stage may run its ops in this order.
bool allowed(const Costs& costs, int stage, const std::vector<unsigned char>& kinds, int until) {
    int done[kKinds] = {0, 0, 0};
    const int cap = costs.caps[stage], warmup = costs.warmup.empty() ? 0 : costs.warmup[stage];
    for (int position = 0; position <= until; ++position) {
        const int kind = kinds[position];
        ++done[kind];
        if (done[kBackward] > done[kForward] || done[kWeight] > done[kBackward]) return false;
        if (done[kForward] - done[kWeight] > cap) return false;
        if (warmup && kind == kBackward && done[kBackward] == 1 && done[kForward] != warmup)
            return false;
    }
    return true;
}

void move(std::vector<unsigned char>& kinds, int from, int to) {
    const auto at = kinds.begin();
    if (from < to)
        std::rotate(at + from, at + from + 1, at + to + 1);
    else
        std::rotate(at + to, at + from, at + from + 1);
}

}  // namespace

double shift(const Costs& costs, const Times& tail, InOrder& executor, Rng& rng, double unit,
             double enough, long effort, Order& order, double makespan) {
    Order present = order;
    std::vector<Block> blocks;
    const double all = static_cast<double>(effort);
    const bool shared = costs.shares_queues();
    const int all_ops = kKinds * costs.microbatches;
    double length = executor.run(present);
    effort -= executor.ops_run();
    trace(costs, executor, present, rng, blocks);
    while (effort > 0 && makespan > enough && !blocks.empty()) {
        Block block = blocks[rng.below(static_cast<int>(blocks.size()))];
        // A message may have waited for one of the other direction, which the path does not show.
        if (shared && rng.below(2)) block = {rng.below(costs.stages), 0, all_ops - 1};
        const auto [stage, first, last] = block;
        int from = first, to = first + 1;
        switch (rng.below(4)) {
            case 0:
                from = last;
                to = last - 1;
                break;
            case 1:
                break;
            default:
                from = first + rng.below(last - first + 1);
                to = first + rng.below(last - first + 1);
        }
        auto& kinds = present[stage];
        // A step that was not run still counts, or a short path could be searched for ever.
        --effort;
        if (kinds[from] == kinds[to] && (from - to) * (from - to) <= 1) continue;
        move(kinds, from, to);
        const double patience = kHeat * unit * (static_cast<double>(effort) / all);
        const double within = length + patience * rng.unit();
        double found = kNever;
        if (allowed(costs, stage, kinds, std::max(from, to))) {
            // A hair more, so that what is just as long is not given up.
            found = executor.run(present, costs.delay, &tail, within * (1 + kSame));
            effort -= executor.ops_run();
        }
        if (found > within * (1 + kSame)) {
            move(kinds, to, from);
            continue;
        }
        length = found;
        if (found < makespan * (1 - kSame)) {
            makespan = found;
            order = present;
        }
        trace(costs, executor, present, rng, blocks);
    }
    return makespan;
}

}  // namespace pipemorph::planner
