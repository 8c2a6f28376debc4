// How early an op can start, how much must follow it, and a makespan nothing can beat.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// Earliest start of every op.
Times heads(const Costs& costs, const std::vector<int>& caps);

// Least time from the start of every op to the end of the iteration. Rows are one longer than
// there are microbatches.
Times tails(const Costs& costs, const std::vector<int>& caps);

// The largest preemptive one-machine bound over the stages.
double machine_bound(const Costs& costs, const Times& head, const Times& tail);

}  // namespace pipemorph::planner
