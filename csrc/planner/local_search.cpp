#include "planner/local_search.hpp"

#include <algorithm>

#include "planner/search.hpp"

namespace pipemorph::planner {
namespace {

// Ops that follow each other on a rank without a gap, first to last, on the critical path.
struct Block {
    int rank, first, last;
};

// Follows a critical path from its end. If an op waited for its rank and its message alike, `rng`
// chooses between the two. Input from the same rank is no message.
void find_critical_blocks(const Costs& costs, const OrderExecutor& executor, const Order& order,
                          Rng& rng, std::vector<Block>& blocks) {
    const int last = costs.stages - 1;
    blocks.clear();
    const auto at_end = [&](int rank) { return static_cast<int>(order[rank].size()) - 1; };
    const auto ends = [&](int rank) {
        return executor.end(rank, at_end(rank)) + costs.after[rank];
    };
    int rank = 0;
    for (int i = 1; i < costs.ranks(); ++i)
        if (ends(i) > ends(rank)) rank = i;
    int position = at_end(rank), end = position;
    while (true) {
        const double start = executor.start(rank, position);
        const unsigned char code = order[rank][position];
        const int kind = code & 3, stage = costs.stages_of[rank][code >> 2];
        const int m = executor.microbatch(rank, position);
        const int from = kind == kForward ? stage - 1 : stage + 1;
        const bool received =
            kind != kWeight && from >= 0 && from <= last && costs.rank_of[from] != rank;
        const bool message = received && executor.core().arrival(kind, stage, m) == start;
        bool machine = position > 0 && executor.free(rank, position - 1) == start;
        if (machine && message && rng.draw_below(2)) machine = false;
        if (machine) {
            --position;
            continue;
        }
        if (end > position) blocks.push_back({rank, position, end});
        if (!message) return;
        rank = costs.rank_of[from];
        position = end = executor.position(kind, from, m);
    }
}

// True if a rank may run its ops in an order that was allowed before an op moved between positions
// `from` and `moved`: only ops of its stage between them have new predecessors.
bool is_allowed_order(const Costs& costs, int rank, const std::vector<unsigned char>& codes,
                      int moved, int from) {
    const std::vector<int>& mine = costs.stages_of[rank];
    const int chunk = codes[moved] >> 2, stage = mine[chunk];
    const auto first = codes.begin() + std::min(from, moved);
    const auto last = codes.begin() + std::max(from, moved) + 1;
    int done[kKinds];
    for (int kind = 0; kind < kKinds; ++kind)
        done[kind] = static_cast<int>(
            std::count(codes.begin(), first, static_cast<unsigned char>(4 * chunk + kind)));
    const int warmup = costs.warmup.empty() ? 0 : costs.warmup[stage];
    for (auto at = first; at != last; ++at) {
        if (*at >> 2 != chunk) continue;
        const int kind = *at & 3;
        ++done[kind];
        if (done[kBackward] > done[kForward] || done[kWeight] > done[kBackward]) return false;
        if (done[kForward] - done[kWeight] > costs.caps[stage]) return false;
        if (warmup && kind == kBackward && done[kBackward] == 1 && done[kForward] != warmup)
            return false;
    }
    if (costs.memory == kNever) return true;
    double held = 0.0;
    for (auto at = codes.begin(); at != last; ++at) {
        const double size = costs.sizes[mine[*at >> 2]];
        if ((*at & 3) != kBackward) held += (*at & 3) == kForward ? size : -size;
        if (held > costs.memory) return false;
    }
    return true;
}

void move_op(std::vector<unsigned char>& codes, int from, int to) {
    const auto at = codes.begin();
    if (from < to)
        std::rotate(at + from, at + from + 1, at + to + 1);
    else
        std::rotate(at + to, at + from, at + from + 1);
}

}  // namespace

double search_by_shifting(const Costs& costs, const Times& tail, OrderExecutor& executor, Rng& rng,
                          double unit, double enough, long effort, Order& order, double makespan) {
    Order present = order;
    std::vector<Block> blocks;
    const double all = static_cast<double>(effort);
    const bool shared = costs.shares_queues();
    const double heat = costs.ranks() < costs.stages ? kHeatOfMultiStage : kHeat;
    double length = executor.run(present);
    effort -= executor.ops_run();
    find_critical_blocks(costs, executor, present, rng, blocks);
    while (effort > 0 && makespan > enough && !blocks.empty()) {
        Block block = blocks[rng.draw_below(static_cast<int>(blocks.size()))];
        // A message may have waited for one of the other direction, which is not on the path.
        if (shared && rng.draw_below(2)) {
            block.rank = rng.draw_below(costs.ranks());
            block.first = 0;
            block.last = static_cast<int>(present[block.rank].size()) - 1;
        }
        const auto [rank, first, last] = block;
        int from = first, to = first + 1;
        switch (rng.draw_below(4)) {
            case 0:
                from = last;
                to = last - 1;
                break;
            case 1:
                break;
            default:
                from = first + rng.draw_below(last - first + 1);
                to = first + rng.draw_below(last - first + 1);
        }
        auto& codes = present[rank];
        // Count a step that is not run, too, or the search of a short path might not end.
        --effort;
        if (codes[from] == codes[to] && (from - to) * (from - to) <= 1) continue;
        move_op(codes, from, to);
        const double patience = heat * unit * (static_cast<double>(effort) / all);
        const double within = length + patience * rng.draw_unit();
        double found = kNever;
        if (is_allowed_order(costs, rank, codes, to, from)) {
            // With rounding slack, so that an equally long order is not given up.
            found = executor.run(present, costs.delay, &tail, within * (1 + kSame));
            effort -= executor.ops_run();
        }
        if (found > within * (1 + kSame)) {
            move_op(codes, to, from);
            continue;
        }
        length = found;
        if (found < makespan * (1 - kSame)) {
            makespan = found;
            order = present;
        }
        find_critical_blocks(costs, executor, present, rng, blocks);
    }
    return makespan;
}

}  // namespace pipemorph::planner
