// The planner's list scheduler: every rank runs its most urgent ready op.
//
// The urgency of an op is the least time from its start to the end of the iteration: its tail, or
// the longer one that narrowed windows leave (windows.hpp).
// Under in-flight caps a W that frees a slot can then precede a B that delays no other op; with the
// fixed order B, F, W (online.hpp) it cannot. Tuning adjusts urgency per stage; the search tries
// several.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// One stage's tuning: what is added to the urgency of each kind; and patience: the stage waits if
// the input of a more urgent op arrives within this fraction of the op that it would start.
struct Bias {
    double of[kKinds] = {0, 0, 0};
    double patience = 0;
};

struct Tuning {
    std::vector<Bias> biases;
    std::vector<int> caps;
    std::vector<int> warmup;  // empty: free
    bool at_least = false;    // more F than `warmup` may run before the first B
    bool by_kind = false;     // urgency is the bias alone, whatever must follow
    bool by_windows = false;  // urgency is that of narrowed windows, not of tails
};

// Keeps its memory between runs. The directions of every link count as independent.
class MostUrgent {
  public:
    explicit MostUrgent(const Costs& costs);

    // The makespan; kNever once `tail` shows that it cannot stay below `bound`, or on a deadlock,
    // which needs a warm-up above a cap or the memory, or increasing along the stages.
    double run(const Times& tail, const Times& urgency, const Tuning& tuning, double bound);

    const Order& order() const { return order_; }
    long ops_run() const { return ops_run_; }

  private:
    const Costs& costs_;
    Core core_;
    Order order_;
    long ops_run_ = 0;
    std::vector<double> left_;  // per rank, the time of the ops that have not run
};

}  // namespace pipemorph::planner
