// Python module `pipemorph.planning._planner`: checks its arguments, executes schedules, searches
// orders, and computes bounds. Its contract is `_planner.pyi`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "binding/calls.hpp"
#include "planner/guided.hpp"
#include "planner/in_order.hpp"
#include "planner/lower_bound.hpp"
#include "planner/microbatch_order.hpp"
#include "planner/online.hpp"
#include "planner/search.hpp"
#include "planner/valid.hpp"
#include "planner/windows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace pipemorph::planner {
namespace {

using CostsTuple =
    std::tuple<int, std::array<std::vector<double>, kKinds + 1>, std::vector<double>,
               std::vector<double>, std::vector<int>, std::vector<int>, std::vector<bool>,
               std::vector<double>, std::vector<double>, std::vector<int>, std::vector<double>,
               std::vector<double>, std::vector<std::vector<int>>, std::vector<double>, double,
               std::vector<std::vector<double>>>;
// By rank: codes, starts, ends and free times of the ops. By stage: arrivals of activations and of
// gradients.
using ExecutionTuple =
    std::tuple<std::vector<nb::bytes>, std::vector<std::vector<double>>,
               std::vector<std::vector<double>>, std::vector<std::vector<double>>,
               std::vector<std::vector<double>>, std::vector<std::vector<double>>>;

void expect(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

void check_placement(const std::vector<std::vector<int>>& stages_of, size_t stages) {
    std::vector<int> seen(stages);
    for (const auto& mine : stages_of) {
        expect(mine.size() <= kMostChunks, "expected at most 64 stages on a rank");
        for (const int stage : mine) {
            expect(stage >= 0 && static_cast<size_t>(stage) < stages,
                   "expected stages of the problem");
            ++seen[stage];
        }
    }
    expect(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }),
           "expected each stage on one rank");
}

Costs to_costs(CostsTuple given, std::vector<int> caps = {}, std::vector<int> warmup = {}) {
    Costs costs;
    auto& [n, took, delay, transfer, queues, outstanding, half_duplex, leaving, returning,
           device_limits, after, before, stages_of, sizes, memory, factors] = given;
    costs.microbatches = n;
    costs.stages = static_cast<int>(took[kForward].size());
    for (int kind = 0; kind <= kKinds; ++kind) costs.took[kind] = std::move(took[kind]);
    costs.delay = std::move(delay);
    costs.transfer = std::move(transfer);
    costs.queues = std::move(queues);
    costs.outstanding = std::move(outstanding);
    costs.half_duplex = std::move(half_duplex);
    costs.leaving = std::move(leaving);
    costs.returning = std::move(returning);
    costs.device_limits = std::move(device_limits);
    costs.after = std::move(after);
    costs.before = std::move(before);
    costs.sizes = std::move(sizes);
    costs.memory = memory;
    costs.caps = std::move(caps);
    costs.warmup = std::move(warmup);
    const size_t stages = costs.took[kForward].size(), links = stages - 1;
    expect(n >= 1 && stages >= 1, "expected at least one microbatch and one stage");
    if (costs.caps.empty()) costs.caps.assign(stages, n);
    for (const auto& times : costs.took)
        expect(times.size() == stages, "expected an op time of each kind per stage");
    if (!factors.empty()) {
        const auto fits = [n = n](const auto& row) { return row.size() == static_cast<size_t>(n); };
        expect(factors.size() == stages && std::all_of(factors.begin(), factors.end(), fits),
               "expected a factor per stage and microbatch");
        costs.set_factors(factors);
    }
    expect(costs.caps.size() == stages && costs.sizes.size() == stages,
           "expected an in-flight cap and a size per stage");
    expect(costs.leaving.size() == stages && costs.returning.size() == stages &&
               costs.device_limits.size() == stages,
           "expected times to leave and return and a device limit per stage");
    check_placement(stages_of, stages);
    costs.place(std::move(stages_of));
    expect(costs.after.size() == costs.stages_of.size() &&
               costs.before.size() == costs.stages_of.size(),
           "expected an earliest start and a tail per rank");
    expect(costs.warmup.empty() || costs.warmup.size() == stages, "expected a warm-up per stage");
    expect(costs.delay.size() == links && costs.transfer.size() == links &&
               costs.queues.size() == links && costs.outstanding.size() == links &&
               costs.half_duplex.size() == links,
           "expected one link fewer than stages");
    const auto in_range = [n = n](int cap) { return cap >= 1 && cap <= n; };
    expect(std::all_of(costs.caps.begin(), costs.caps.end(), in_range) &&
               std::all_of(costs.warmup.begin(), costs.warmup.end(), in_range),
           "expected caps and warm-up counts from 1 to the number of microbatches");
    return costs;
}

// Checks that a rank has only ops of its stages, at most one per kind and microbatch: the core uses
// them as indices.
Order to_order(const std::vector<nb::bytes>& ranks, const Costs& costs) {
    expect(ranks.size() == costs.stages_of.size(), "expected ops for every rank");
    Order order;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto* data = static_cast<const unsigned char*>(ranks[rank].data());
        order.emplace_back(data, data + ranks[rank].size());
        std::vector<std::array<int, kKinds>> done(costs.stages_of[rank].size());
        for (const unsigned char code : order.back()) {
            expect(size_t{code} >> 2 < done.size(), "expected ops of the rank's own stages");
            auto& ops = done[code >> 2];
            const int kind = code & 3;
            ++ops[kind == kFused ? kBackward : kind];
            if (kind == kFused) ++ops[kWeight];
            expect(*std::max_element(ops.begin(), ops.end()) <= costs.microbatches,
                   "expected each kind at most once per microbatch");
        }
    }
    return order;
}

std::pair<std::vector<std::vector<double>>, std::vector<std::vector<double>>> collect_arrivals(
    const EventCore& core) {
    std::vector<std::vector<double>> found[2];
    for (const int kind : {kForward, kBackward})
        for (int stage = 0; stage < core.costs().stages; ++stage) {
            auto& row = found[kind].emplace_back();
            for (int m = 0; m < core.costs().microbatches; ++m)
                row.push_back(core.arrival(kind, stage, m));
        }
    return {std::move(found[kForward]), std::move(found[kBackward])};
}

ExecutionTuple execute_in_order(const CostsTuple& given, const std::vector<nb::bytes>& ranks,
                                DelayAt delay_at, DelayAt transfer_at) {
    const Costs costs = to_costs(given);
    const Order order = to_order(ranks, costs);
    OrderExecutor execution(costs);
    if (delay_at)
        execution.run(order, std::move(delay_at), std::move(transfer_at));
    else
        execution.run(order);
    std::vector<nb::bytes> codes;
    std::vector<std::vector<double>> start, end, free;
    for (int rank = 0; rank < execution.core().ranks(); ++rank) {
        codes.emplace_back(order[rank].data(), execution.ran(rank));
        for (auto* times : {&start, &end, &free}) times->emplace_back();
        for (int position = 0; position < execution.ran(rank); ++position) {
            start.back().push_back(execution.start(rank, position));
            end.back().push_back(execution.end(rank, position));
            free.back().push_back(execution.free(rank, position));
        }
    }
    auto [above, below] = collect_arrivals(execution.core());
    return {std::move(codes), std::move(start), std::move(end),
            std::move(free),  std::move(above), std::move(below)};
}

double compute_makespan(const CostsTuple& given, const std::vector<nb::bytes>& ranks) {
    const Costs costs = to_costs(given);
    const Order order = to_order(ranks, costs);
    const Calls::WithoutGil no_gil;
    return OrderExecutor(costs).run(order);
}

// Order of running the first ready op, and the end of the iteration.
std::pair<std::vector<nb::bytes>, double> schedule_online(const CostsTuple& given,
                                                          std::vector<int> caps,
                                                          std::vector<int> warmup,
                                                          bool exact_warmup,
                                                          std::vector<bool> fused) {
    const Costs costs = to_costs(given, std::move(caps), std::move(warmup));
    expect(!costs.warmup.empty(), "expected a warm-up per stage");
    expect(fused.size() == costs.caps.size(), "expected a flag for fused backwards per stage");
    const DispatchRules rules{costs.warmup, costs.caps, exact_warmup, std::move(fused)};
    OnlineScheduler execution(costs, rules);
    {
        const Calls::WithoutGil no_gil;
        execution.run();
    }
    std::vector<nb::bytes> order;
    double makespan = 0.0;
    for (size_t rank = 0; rank < costs.stages_of.size(); ++rank) {
        const auto& ran = execution.ran()[rank];
        order.emplace_back(ran.codes.data(), ran.codes.size());
        if (!ran.end.empty()) makespan = std::max(makespan, ran.end.back() + costs.after[rank]);
    }
    return {std::move(order), makespan};
}

void check_complete(const Order& order, const Costs& costs) {
    for (size_t rank = 0; rank < order.size(); ++rank)
        for (size_t place = 0; place < costs.stages_of[rank].size(); ++place) {
            const auto count = [&](int kind) {
                return std::count(order[rank].begin(), order[rank].end(),
                                  static_cast<unsigned char>(4 * place + kind));
            };
            const long whole = count(kFused);
            expect(count(kForward) == costs.microbatches &&
                       count(kBackward) + whole == costs.microbatches &&
                       count(kWeight) + whole == costs.microbatches,
                   "expected each kind once per microbatch in the order");
        }
}

// Checked guide: the order, and the limits of ops out of turn.
DispatchGuide to_guide(const std::vector<nb::bytes>& order,
                       const std::vector<std::vector<int>>& waits, const Costs& costs) {
    expect(waits.size() == costs.stages_of.size(), "expected the positions of waits per rank");
    DispatchGuide guide{to_order(order, costs), waits, costs.caps};
    check_complete(guide.order, costs);
    for (size_t rank = 0; rank < waits.size(); ++rank)
        for (const int position : waits[rank])
            expect(position >= 0 && static_cast<size_t>(position) < guide.order[rank].size(),
                   "expected waits at positions of the rank's order");
    return guide;
}

ExecutionTuple execute_guided(const CostsTuple& given, const std::vector<nb::bytes>& order,
                              const std::vector<std::vector<int>>& waits, std::vector<int> caps,
                              DelayAt delay_at, DelayAt transfer_at) {
    const Costs costs = to_costs(given, std::move(caps));
    const DispatchGuide guide = to_guide(order, waits, costs);
    GuidedExecutor execution(costs, guide);
    execution.run(std::move(delay_at), std::move(transfer_at));
    auto [above, below] = collect_arrivals(execution.core());
    ExecutionTuple all{{}, {}, {}, {}, std::move(above), std::move(below)};
    for (const auto& ran : execution.ran()) {
        std::get<0>(all).emplace_back(ran.codes.data(), ran.codes.size());
        std::get<1>(all).push_back(ran.start);
        std::get<2>(all).push_back(ran.end);
        std::get<3>(all).push_back(ran.free);
    }
    return all;
}

double compute_guided_makespan(const CostsTuple& given, const std::vector<nb::bytes>& order,
                               const std::vector<std::vector<int>>& waits, std::vector<int> caps) {
    const Costs costs = to_costs(given, std::move(caps));
    const DispatchGuide guide = to_guide(order, waits, costs);
    const Calls::WithoutGil no_gil;
    GuidedExecutor execution(costs, guide);
    execution.run();
    return execution.makespan();
}

std::vector<std::vector<int>> waits_of(const CostsTuple& given, const std::vector<nb::bytes>& order,
                                       const std::vector<int>& peaks) {
    const Costs costs = to_costs(given);
    expect(peaks.size() == costs.caps.size(), "expected a peak of microbatches per stage");
    const Order ranks = to_order(order, costs);
    check_complete(ranks, costs);
    const Calls::WithoutGil no_gil;
    return find_planned_waits(costs, ranks, peaks);
}

std::pair<std::vector<int>, double> order_given_microbatches(
    const CostsTuple& given, const std::vector<nb::bytes>& order,
    const std::vector<std::vector<int>>& waits, std::vector<int> caps, bool guided, double enough,
    long effort) {
    Costs costs = to_costs(given, std::move(caps));
    expect(costs.varies(), "expected factors of the microbatches");
    const DispatchGuide guide = to_guide(order, waits, costs);
    const Calls::WithoutGil no_gil;
    auto [microbatches, makespan] =
        order_microbatches(std::move(costs), guide, guided, enough, effort);
    return {std::move(microbatches), makespan};
}

std::array<double, 2> jittered_makespans(const CostsTuple& given,
                                         const std::vector<nb::bytes>& order,
                                         const std::vector<std::vector<int>>& waits,
                                         std::vector<int> caps, double most, int draws) {
    const Costs costs = to_costs(given, std::move(caps));
    const DispatchGuide guide = to_guide(order, waits, costs);
    expect(most > 0.0 && draws > 0, "expected draws of a delay above 0");
    const Calls::WithoutGil no_gil;
    return compute_jittered_makespans(costs, guide, most, draws);
}

bool valid(int microbatches, const std::vector<std::vector<int>>& stages_of,
           const std::vector<nb::bytes>& ranks, const std::vector<std::vector<int>>& numbers,
           const std::vector<int>& caps, const std::vector<int>& device_limits) {
    check_placement(stages_of, caps.size());
    expect(ranks.size() == stages_of.size() && numbers.size() == stages_of.size() &&
               device_limits.size() == caps.size(),
           "expected ops and numbers for every rank and limits for every stage");
    Order order;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto* data = static_cast<const unsigned char*>(ranks[rank].data());
        order.emplace_back(data, data + ranks[rank].size());
        const auto own = [&](unsigned char code) {
            return size_t{code} >> 2 < stages_of[rank].size();
        };
        expect(std::all_of(order.back().begin(), order.back().end(), own),
               "expected ops of the rank's own stages");
        expect(numbers[rank].size() == order.back().size(), "expected a number for every op");
    }
    return is_valid(microbatches, stages_of, order, numbers, caps, device_limits);
}

std::tuple<std::vector<nb::bytes>, double, double> run_search(
    const CostsTuple& given, std::vector<int> caps, std::vector<int> warmup,
    const std::vector<int>& paper_warmup, const std::vector<nb::bytes>& start, long listing_effort,
    long shifting_effort, double near) {
    const Costs costs = to_costs(given, std::move(caps), std::move(warmup));
    Order from;
    if (!start.empty()) check_complete(from = to_order(start, costs), costs);
    for (const auto& codes : from)
        expect(
            std::none_of(codes.begin(), codes.end(), [](int code) { return (code & 3) == kFused; }),
            "expected split backwards in the order");
    expect(paper_warmup.size() == costs.caps.size(), "expected a paper warm-up per stage");
    SearchResult found;
    {
        const Calls::WithoutGil no_gil;
        found = search(costs, paper_warmup, from, {listing_effort, shifting_effort, near});
    }
    std::vector<nb::bytes> order;
    for (const auto& codes : found.order) order.emplace_back(codes.data(), codes.size());
    return {std::move(order), found.makespan, found.bound};
}

double compute_lower_bound(const CostsTuple& given, std::vector<int> caps, bool any_order) {
    const Costs costs = to_costs(given, std::move(caps));
    const Calls::WithoutGil no_gil;
    if (any_order && costs.varies()) return compute_any_order_bound(costs, costs.caps);
    return compute_machine_bound(costs, compute_heads(costs, costs.caps),
                                 compute_tails(costs, costs.caps));
}

double compute_tight_lower_bound(const CostsTuple& given, std::vector<int> caps, double makespan,
                                 long effort) {
    const Costs costs = to_costs(given, std::move(caps));
    const Calls::WithoutGil no_gil;
    const Times head = compute_heads(costs, costs.caps), tail = compute_tails(costs, costs.caps);
    return tighten_bound(costs, head, tail, compute_machine_bound(costs, head, tail), makespan,
                         effort);
}

}  // namespace
}  // namespace pipemorph::planner

NB_MODULE(_planner, module) {
    pipemorph::Calls::register_atexit(0);  // 0: an exit does not wait for a search of seconds
    namespace planner = pipemorph::planner;
    module.doc() = "Executes schedules and searches orders for the pipemorph policy.";
    module.def("execute_in_order", &planner::execute_in_order, "costs"_a, "ranks"_a,
               "delay_at"_a.none(), "transfer_at"_a.none());
    module.def("compute_makespan", &planner::compute_makespan, "costs"_a, "ranks"_a);
    module.def("schedule_online", &planner::schedule_online, "costs"_a, "caps"_a, "warmup"_a,
               "exact_warmup"_a, "fused"_a);
    module.def("execute_guided", &planner::execute_guided, "costs"_a, "order"_a, "waits"_a,
               "caps"_a, "delay_at"_a.none(), "transfer_at"_a.none());
    module.def("compute_guided_makespan", &planner::compute_guided_makespan, "costs"_a, "order"_a,
               "waits"_a, "caps"_a);
    module.def("find_planned_waits", &planner::waits_of, "costs"_a, "order"_a, "peaks"_a);
    module.def("compute_jittered_makespans", &planner::jittered_makespans, "costs"_a, "order"_a,
               "waits"_a, "caps"_a, "most"_a, "draws"_a);
    module.def("search_order", &planner::run_search, "costs"_a, "caps"_a, "warmup"_a,
               "paper_warmup"_a, "start"_a, "listing_effort"_a, "shifting_effort"_a, "near"_a);
    module.def("is_valid", &planner::valid, "microbatches"_a, "stages_of"_a, "ranks"_a, "numbers"_a,
               "caps"_a, "device_limits"_a);
    module.def("order_microbatches", &planner::order_given_microbatches, "costs"_a, "order"_a,
               "waits"_a, "caps"_a, "guided"_a, "enough"_a, "effort"_a);
    module.def("compute_lower_bound", &planner::compute_lower_bound, "costs"_a, "caps"_a,
               "any_order"_a);
    module.def("compute_tight_lower_bound", &planner::compute_tight_lower_bound, "costs"_a,
               "caps"_a, "makespan"_a, "effort"_a);
}
