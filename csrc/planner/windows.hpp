// Proves that no schedule is as short as a given makespan: a destructive lower bound.
//
// In such a schedule every op would start within a window: no earlier than its head, and no later
// than its tail before the end. These are narrowed until nothing changes, or no order of some stage
// remains:
//
// - A message cannot arrive before it was sent, and must arrive before its receiver has to start.
// - A stage runs its ops one at a time, each kind in microbatch order, within its in-flight cap.
//   Its state is thus three counts, and dynamic programming finds the earliest and latest time of
//   each state. An op retains the starts that some order of all of the stage's ops allows.
//   Jackson's rule (lower_bound.hpp) preempts ops; here they run as a whole, and F(m + K) waits for
//   W(m), and so for all predecessors of W(m).
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

class StartWindows {
  public:
    // `head` and `tail` as in lower_bound.hpp; the caller owns `tail`. `effort`: total number of
    // stage states that may be visited.
    StartWindows(const Costs& costs, const Times& head, const Times& tail, long effort);

    // Most states visited while every stage is narrowed once.
    static double size(const Costs& costs);

    // True if every schedule is proven to be longer than `makespan`. Makespans that are not refuted
    // decrease from call to call.
    bool refute(double makespan);

    long effort_left() const { return effort_; }

    // Least time from the start of each op to the end of a schedule as long as the last makespan
    // that was not refuted.
    Times compute_tails() const;

  private:
    // False if some stage has no possible order.
    bool narrow();
    // Retains the starts that an order of the stage's ops allows. False if there is no order.
    bool narrow(int stage);
    bool propagate_from_start(int stage);
    bool propagate_from_end(int stage);
    // Propagates windows of ops to the ops that receive their messages, and back.
    void pass_windows(int link, int kind, int from, int to);

    // States of the current stage are in rows of equal W and B, in order of F.
    size_t row(int w, int b) const { return static_cast<size_t>(w) * width_ + (b - w); }
    size_t state(size_t row, int w, int f) const { return row * width_ + (f - w); }
    // True if the stage can have run `f` F with the W and B of the row.
    bool reached(size_t row, int f) const { return first_[row] <= f && f <= last_[row]; }

    const Costs& costs_;
    const Times& tail_;
    long effort_;
    double small_ = 0.0;  // change that is not propagated to other stages
    double end_ = 0.0, unrefuted_end_ = 0.0;
    Times head_, latest_;                      // the window of each op's start
    Times unrefuted_head_, unrefuted_latest_;  // at the last makespan that was not refuted
    std::vector<unsigned char> changed_;       // per stage, since it was narrowed
    std::vector<double> arrivals_;
    int width_ = 0;
    std::vector<double> from_, until_;  // per state: earliest and latest time
    std::vector<int> first_, last_;     // per row: least and most F
};

// Best bound that `effort` suffices for, between the bound `bound` and `makespan`, that of some
// schedule.
double tighten_bound(const Costs& costs, const Times& head, const Times& tail, double bound,
                     double makespan, long effort);

}  // namespace pipemorph::planner
