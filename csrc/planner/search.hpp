// Search of the pipemorph policy; its steps: pipemorph/planning/search/order_search.py.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// Relative tolerance of equal makespans: sums of times in another order.
constexpr double kSame = 1e-9;
// Mean ops by which a step may lengthen the schedule at the start of the search; 0 at its end.
constexpr double kHeat = 1.0, kHeatOfMultiStage = 1.5;  // for one or several stages per rank

struct Effort {
    long listing, shifting;  // ops
    // Gap to the bound, as a fraction, that is short enough.
    double near = kSame;
};

struct SearchResult {
    Order order;
    double makespan = kNever;
    double bound = 0.0;
};

// `paper_warmup`: counts of the paper's rules; `start`: schedule that bounds the result, or empty.
SearchResult search(const Costs& costs, const std::vector<int>& paper_warmup, const Order& start,
                    Effort effort);

}  // namespace pipemorph::planner
