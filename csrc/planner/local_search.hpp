// Local search on the order itself: shift ops along the critical path. See local_search.py.
#pragma once

#include "planner/costs.hpp"
#include "planner/evaluate.hpp"
#include "planner/rng.hpp"

namespace pipemorph::planner {

// Starts from `order`, whose makespan is `makespan`, and leaves the shortest it finds there.
// Stops at `bound`, or once `effort` ops were run. The makespan. Only where the directions of
// every link are independent.
double shift(const Costs& costs, const Times& tail, Executor& executor, Rng& rng, double unit,
             double bound, long effort, Order& order, double makespan);

}  // namespace pipemorph::planner
