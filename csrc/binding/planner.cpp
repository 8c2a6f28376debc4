// The Python module `pipemorph.planning._planner`. Its contract is `_planner.pyi`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "planner/lower_bound.hpp"
#include "planner/search.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace pipemorph::planner {
namespace {

using CostsTuple =
    std::tuple<int, std::array<std::vector<double>, kKinds>, std::vector<double>, std::vector<int>,
               std::vector<int>, std::vector<bool>, std::vector<int>, std::vector<int>>;

void expect(bool holds, const char* message) {
    if (!holds) throw nb::value_error(message);
}

Costs to_costs(CostsTuple given) {
    Costs costs;
    auto& [n, took, delay, queues, outstanding, half_duplex, caps, warmup] = given;
    costs.microbatches = n;
    costs.stages = static_cast<int>(caps.size());
    for (int kind = 0; kind < kKinds; ++kind) costs.took[kind] = std::move(took[kind]);
    costs.delay = std::move(delay);
    costs.queues = std::move(queues);
    costs.outstanding = std::move(outstanding);
    costs.half_duplex = std::move(half_duplex);
    costs.caps = std::move(caps);
    costs.warmup = std::move(warmup);
    const size_t stages = costs.caps.size(), links = stages - 1;
    expect(n >= 1 && stages >= 1, "expected at least one microbatch and one stage");
    for (const auto& times : costs.took)
        expect(times.size() == stages, "op times and in-flight caps differ in their stages");
    expect(costs.warmup.empty() || costs.warmup.size() == stages, "expected a warm-up per stage");
    expect(costs.delay.size() == links && costs.queues.size() == links &&
               costs.outstanding.size() == links && costs.half_duplex.size() == links,
           "expected one link fewer than stages");
    const auto in_range = [n = n](int cap) { return cap >= 1 && cap <= n; };
    expect(std::all_of(costs.caps.begin(), costs.caps.end(), in_range) &&
               std::all_of(costs.warmup.begin(), costs.warmup.end(), in_range),
           "expected caps and warm-up counts from 1 to the number of microbatches");
    return costs;
}

Order to_order(const std::vector<nb::bytes>& stages, const Costs& costs) {
    Order order;
    if (stages.empty()) return order;
    expect(stages.size() == costs.caps.size(), "the order has another number of stages");
    for (const nb::bytes& kinds : stages) {
        const auto* data = static_cast<const unsigned char*>(kinds.data());
        order.emplace_back(data, data + kinds.size());
        for (int kind = 0; kind < kKinds; ++kind)
            expect(std::count(order.back().begin(), order.back().end(), kind) == costs.microbatches,
                   "expected each kind once per microbatch in the order");
        expect(kinds.size() == static_cast<size_t>(kKinds) * costs.microbatches,
               "expected kinds 0, 1 and 2 in the order");
    }
    return order;
}

std::tuple<std::vector<nb::bytes>, double, double> run(const CostsTuple& given,
                                                       const std::vector<int>& paper_warmup,
                                                       const std::vector<nb::bytes>& start,
                                                       long listing_effort, long shifting_effort) {
    const Costs costs = to_costs(given);
    const Order from = to_order(start, costs);
    expect(paper_warmup.size() == costs.caps.size(), "expected a paper warm-up per stage");
    Found found;
    {
        const nb::gil_scoped_release release;
        found = search(costs, paper_warmup, from, {listing_effort, shifting_effort});
    }
    std::vector<nb::bytes> order;
    for (const auto& kinds : found.order) order.emplace_back(kinds.data(), kinds.size());
    return {std::move(order), found.makespan, found.bound};
}

double lower_bound(const CostsTuple& given) {
    const Costs costs = to_costs(given);
    const nb::gil_scoped_release release;
    return machine_bound(costs, heads(costs, costs.caps), tails(costs, costs.caps));
}

}  // namespace
}  // namespace pipemorph::planner

NB_MODULE(_planner, module) {
    module.doc() = "The search of the pipemorph policy, compiled.";
    module.def("search", &pipemorph::planner::run, "costs"_a, "paper_warmup"_a, "start"_a,
               "listing_effort"_a, "shifting_effort"_a);
    module.def("lower_bound", &pipemorph::planner::lower_bound, "costs"_a);
}
