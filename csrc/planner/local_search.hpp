// Local search on the order itself: shifts ops along the critical path.
//
// A move shifts an op within a block, a run of consecutive ops of a rank on a critical path (to an
// end of the block, as Nowicki and Smutnicki do for job shops, or anywhere in it), since no other
// move can shorten the schedule. A longer schedule is accepted with a probability that decreases to
// zero: simulated annealing, with a threshold drawn uniformly, to avoid functions whose rounding
// differs between machines.
#pragma once

#include "planner/costs.hpp"
#include "planner/in_order.hpp"
#include "planner/rng.hpp"

namespace pipemorph::planner {

// Starts from `order`, whose makespan is `makespan`, and leaves the shortest it finds there.
// Stops at `enough`, or once `effort` ops were run. The makespan. Only where the directions of
// every link are independent.
double shift(const Costs& costs, const Times& tail, InOrder& executor, Rng& rng, double unit,
             double enough, long effort, Order& order, double makespan);

}  // namespace pipemorph::planner
