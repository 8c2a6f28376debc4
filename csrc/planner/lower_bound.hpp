// Earliest start of an op (head), least time after it (tail), and a lower bound of the makespan.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// Earliest start of every op.
Times compute_heads(const Costs& costs, const std::vector<int>& caps);

// Least time from the start of every op to the end of the iteration. Rows have one entry more than
// there are microbatches.
Times compute_tails(const Costs& costs, const std::vector<int>& caps);

// Largest preemptive one-machine bound over the ranks.
double compute_machine_bound(const Costs& costs, const Times& head, const Times& tail);

}  // namespace pipemorph::planner
