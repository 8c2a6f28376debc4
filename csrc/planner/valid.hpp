// Check of a schedule by the rules of pipemorph/planning/validator.py, which locates violations.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// `stages_of`: per rank. `numbers`: the microbatch of each op. `caps` and `device_limits`: per
// stage, 0 for no limit.
bool is_valid(int microbatches, const std::vector<std::vector<int>>& stages_of, const Order& order,
              const std::vector<std::vector<int>>& numbers, const std::vector<int>& caps,
              const std::vector<int>& device_limits);

}  // namespace pipemorph::planner
