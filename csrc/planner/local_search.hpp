// Local search on the order itself, which shifts ops along the critical path.
//
// A move shifts an op within a block, a run of consecutive ops of a rank on a critical path: to an
// end of the block, as Nowicki and Smutnicki do for job shops, or anywhere in it. No other move can
// shorten the schedule. A longer schedule is accepted with a probability that decreases to zero:
// simulated annealing, with a threshold drawn uniformly, since other functions round differently
// between machines.
#pragma once

#include "planner/costs.hpp"
#include "planner/in_order.hpp"
#include "planner/rng.hpp"

namespace pipemorph::planner {

// Starts from `order`, whose makespan is `makespan`, stores the shortest order found in it, and
// returns its makespan. Stops at `enough`, or once `effort` ops were run.
double search_by_shifting(const Costs& costs, const Times& tail, OrderExecutor& executor, Rng& rng,
                          double unit, double enough, long effort, Order& order, double makespan);

}  // namespace pipemorph::planner
