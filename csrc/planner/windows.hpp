// Proves that no schedule is as short as a given makespan: a destructive lower bound.
//
// In such a schedule every op would start in a window: no earlier than its head, and no later than
// its tail before the end. Windows are narrowed until nothing changes, or a stage has no order
// left:
//
// - A message cannot arrive before it was sent, and must arrive before its receiver has to start.
// - A stage runs its ops one at a time, each kind in microbatch order, within its in-flight cap. So
//   what it has done is three counts, and dynamic programming finds when it can be there, and when
//   it must. An op keeps the starts that some order of all of the stage's ops allows. Unlike
//   Jackson's rule (lower_bound.hpp), which preempts ops, this knows that they run as a whole, and
//   that F(m + K) waits for W(m), and so for all that has to precede it.
#pragma once

#include "planner/costs.hpp"

namespace pipemorph::planner {

class Windows {
  public:
    // `head` and `tail`, which is kept by the caller, as in lower_bound.hpp. `effort`: how many
    // states of stages may be visited in all.
    Windows(const Costs& costs, const Times& head, const Times& tail, long effort);

    // The states visited while every stage is narrowed once, at most.
    static double size(const Costs& costs);

    // Whether it is proven that every schedule is longer than `makespan`. Makespans that are not
    // refuted decrease from call to call.
    bool refute(double makespan);

    long effort_left() const { return effort_; }

    // The least time from the start of each op to the end of a schedule as long as the last
    // makespan that was not refuted.
    Times tails() const;

  private:
    // False if some stage has no order left.
    bool narrow();
    // Keeps the starts that an order of the stage's ops allows. False if there is none.
    bool narrow(int stage);
    bool reach(int stage);
    bool return_from_end(int stage);
    // Passes windows of ops on to those that receive their messages, and back.
    void pass(int link, int kind, int from, int to);

    // States of the stage in hand are kept in rows of the same W and B, in order of F.
    size_t row(int w, int b) const { return static_cast<size_t>(w) * width_ + (b - w); }
    size_t state(size_t row, int w, int f) const { return row * width_ + (f - w); }
    // Whether the stage can have run `f` F with as many W and B as in the row.
    bool reached(size_t row, int f) const { return first_[row] <= f && f <= last_[row]; }

    const Costs& costs_;
    const Times& tail_;
    long effort_;
    double small_ = 0.0;  // a change that is kept from other stages
    double end_ = 0.0, open_end_ = 0.0;
    Times head_, latest_;                 // the window of each op's start
    Times open_head_, open_latest_;       // at the last makespan that was not refuted
    std::vector<unsigned char> changed_;  // per stage, since it was narrowed
    std::vector<double> arrivals_;
    int width_ = 0;
    std::vector<double> from_, until_;  // per state, when the stage can be there
    std::vector<int> first_, last_;     // per row, the least and the most F
};

// The best bound between `bound`, which is one, and `makespan`, which a schedule has, that `effort`
// is enough for.
double windows_bound(const Costs& costs, const Times& head, const Times& tail, double bound,
                     double makespan, long effort);

}  // namespace pipemorph::planner
