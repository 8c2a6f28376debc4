// Static execution of an order: when every op starts, and what it waited for.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

// Keeps its memory between runs. Ops are counted by position on their stage.
class Executor {
  public:
    explicit Executor(const Costs& costs);

    // The makespan, or kNever if stages wait for each other. `delay` in place of the problem's.
    double run(const Order& order, const std::vector<double>& delay);
    double run(const Order& order) { return run(order, costs_.delay); }

    // The same where the directions of every link are independent; kNever also as soon as an op
    // starts at which its tail reaches `limit`. The following are about the last such run.
    double run(const Order& order, const std::vector<double>& delay, const Times* tail,
               double limit);

    long ops_run() const { return ops_run_; }
    double start(int stage, int position) const { return start_[at(stage, position)]; }
    // When the stage goes on: the end of the op, or later if its send was held up.
    double free(int stage, int position) const { return free_[at(stage, position)]; }
    int microbatch(int stage, int position) const { return microbatch_[at(stage, position)]; }
    int position(int kind, int stage, int m) const {
        return position_[kind][static_cast<size_t>(stage) * costs_.microbatches + m];
    }
    // Of the forward from above and of the gradient from below; kNever where there is none.
    double arrival(int kind, int stage, int m) const { return arrivals_.row(kind, stage)[m]; }
    double end(int stage) const { return now_[stage]; }

  private:
    size_t at(int stage, int position) const {
        return static_cast<size_t>(stage) * kKinds * costs_.microbatches + position;
    }
    double run_in_time(const Order& order, const std::vector<double>& delay);

    const Costs& costs_;
    long ops_run_ = 0;
    Times arrivals_;
    std::vector<double> start_, free_, now_;
    std::vector<int> microbatch_, position_[kKinds], done_[kKinds], todo_;
    std::vector<bool> queued_;
};

}  // namespace pipemorph::planner
