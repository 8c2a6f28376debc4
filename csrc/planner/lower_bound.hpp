// Earliest start of an op (head), least time after it (tail), and a lower bound of the makespan.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// Earliest start of every op. `any_order`: in any order of the microbatches, so of each op the one
// of the k-th microbatch that runs, whichever it is.
Times compute_heads(const Costs& costs, const std::vector<int>& caps, bool any_order = false);

// Least time from the start of every op to the end of the iteration. Rows have one entry more than
// there are microbatches.
Times compute_tails(const Costs& costs, const std::vector<int>& caps, bool any_order = false);

// Largest preemptive one-machine bound over the ranks.
double compute_machine_bound(const Costs& costs, const Times& head, const Times& tail);

// Lower bound of the makespans of all orders of the microbatches.
double compute_any_order_bound(const Costs& costs, const std::vector<int>& caps);

}  // namespace pipemorph::planner
