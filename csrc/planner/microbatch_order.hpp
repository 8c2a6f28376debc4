// Order in which a pipeline runs microbatches that differ in cost, for ops that are planned.
//
// An order of ops has places, 0 to N - 1: every kind of op of a stage runs place after place. Which
// microbatch runs in which place is free, and decides how well the stages' ops interlock.
#pragma once

#include "planner/guided.hpp"

namespace pipemorph::planner {

struct MicrobatchOrder {
    std::vector<int> microbatches;  // by place
    double makespan = kNever;
};

// Order with the shortest makespan found for the ops of `guide`, which run in its order, or by it
// if `guided`. `costs` has factors by microbatch. A local search from a few orders; it stops at the
// makespan `enough`, or once `effort` ops were run, and depends on nothing else. The order 0, 1, …
// is tried first, so no result is longer.
MicrobatchOrder order_microbatches(Costs costs, const DispatchGuide& guide, bool guided,
                                   double enough, long effort);

}  // namespace pipemorph::planner
