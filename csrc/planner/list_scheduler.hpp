// List scheduler of the planner: every rank runs its most urgent ready op.
//
// The urgency of an op is the least time from its start to the end of the iteration: its tail, or
// the longer one by narrowed windows (windows.hpp). Under in-flight caps a W that frees a slot can
// thus precede a B that delays no other op; with the fixed order B, F, W (online.hpp) it cannot.
// Tunings adjust the urgency per stage; the search tries several.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// Tuning of a stage: a term added to the urgency of each kind; and patience: the stage waits if the
// input of a more urgent op arrives within this fraction of the op that it would start.
struct StageTuning {
    double of[kKinds] = {0, 0, 0};
    double patience = 0;
};

struct ListTuning {
    std::vector<StageTuning> stage_tunings;
    std::vector<int> caps;
    std::vector<int> warmup;  // empty: free
    bool at_least = false;    // more F than `warmup` may run before the first B
    bool by_kind = false;     // urgency is the bias alone, without the tail
    bool by_windows = false;  // urgency is by narrowed windows, not by tails
};

// Reuses its memory between runs. The directions of every link count as independent.
class UrgencyScheduler {
  public:
    explicit UrgencyScheduler(const Costs& costs);

    // Makespan; kNever once `tail` shows that it cannot stay below `bound`, or on a deadlock, which
    // needs a warm-up that is above a cap or the memory, or increases along the stages.
    double run(const Times& tail, const Times& urgency, const ListTuning& tuning, double bound);

    const Order& order() const { return order_; }
    long ops_run() const { return ops_run_; }

  private:
    const Costs& costs_;
    EventCore core_;
    Order order_;
    long ops_run_ = 0;
    std::vector<double> time_remaining_;  // per rank: time of the ops that have not run
};

}  // namespace pipemorph::planner
