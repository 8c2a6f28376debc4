// The pipemorph policy's search; its steps: pipemorph/planning/search/search.py.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// What a makespan may differ by and still be the same: sums of times in another order.
constexpr double kSame = 1e-9;
// A step may lengthen the schedule by this many mean ops at first, by nothing at the end.
constexpr double kHeat = 1.0, kHeatOfSeveral = 1.5;  // of one or several stages per rank

struct Effort {
    long listing, shifting;  // ops
    // Above the bound, as a fraction: what is no longer than this is short enough.
    double near = kSame;
};

struct Found {
    Order order;
    double makespan = kNever;
    double bound = 0.0;
};

// `paper_warmup` are the counts of the paper's rules; `start`, if not empty, a schedule to do no
// worse than.
Found search(const Costs& costs, const std::vector<int>& paper_warmup, const Order& start,
             Effort effort);

}  // namespace pipemorph::planner
