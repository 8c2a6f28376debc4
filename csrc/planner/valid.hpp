// Whether a schedule of one stage per rank keeps the rules of pipemorph/planning/validator.py,
// which says what is wrong with one that does not.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// `numbers`: the microbatch of each op. `caps` and `device_limits`: per stage, 0 for no limit.
bool is_valid(int microbatches, const Order& order, const std::vector<std::vector<int>>& numbers,
              const std::vector<int>& caps, const std::vector<int>& device_limits);

}  // namespace pipemorph::planner
