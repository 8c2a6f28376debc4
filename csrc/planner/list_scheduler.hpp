// The planner's list scheduler: run what is most urgent, as if ahead of time. See
// list_scheduler.py.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// One stage's tuning: what is added to the urgency of each kind, and patience.
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
};

// Makespan, or kNever if it gave up. Keeps its memory between runs.
class Lister {
  public:
    explicit Lister(const Costs& costs);

    double run(const Times& tail, const Tuning& tuning, double bound);

    const Order& order() const { return order_; }
    long ops_run() const { return ops_run_; }

  private:
    void set_wake(int stage, double at);

    const Costs& costs_;
    Order order_;
    long ops_run_ = 0;
    Times arrivals_;
    std::vector<int> done_[kKinds];
    std::vector<double> left_;
    std::vector<bool> idle_, queued_;
    // A tournament for the stage that decides next: wake_ are its leaves.
    int leaves_ = 1;
    std::vector<double> wake_;
    std::vector<int> winner_;
};

}  // namespace pipemorph::planner
