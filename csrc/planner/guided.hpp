// Dispatch by a guide: every rank runs its ready op that is first in the plan's order. See
// pipemorph/planning/simulation/execution.py.
#pragma once

#include <array>

#include "planner/in_order.hpp"
#include "planner/online.hpp"

namespace pipemorph::planner {

// Order of a plan, and the limits of ops out of turn; one entry per rank, `caps` per stage.
struct DispatchGuide {
    Order order;
    std::vector<std::vector<int>> waits;  // positions of ops for which the rank waits in turn
    std::vector<int> caps;                // F out of turn only while fewer are in flight
};

class GuidedExecutor {
  public:
    GuidedExecutor(const Costs& costs, const DispatchGuide& guide);

    void run(DelayAt delay_at = nullptr, DelayAt transfer_at = nullptr);

    const EventCore& core() const { return core_; }
    const std::vector<OnlineScheduler::Ran>& ran() const { return ran_; }
    // End of the iteration that has run; infinity on a deadlock.
    double makespan() const;

    // Interface of the core's chooser.
    Choice choose(const EventCore& core, int rank, double now);
    void began(EventCore& core, int rank, const Op& op, double now, double end) {
        ran_[rank].codes.push_back(core.code(op));
        ran_[rank].start.push_back(now);
        ran_[rank].end.push_back(end);
    }
    void ended(int rank, double free) { ran_[rank].free.push_back(free); }

  private:
    struct Stage {
        // Position of each op in the order of its rank; a fused backward counts as a B and a W.
        std::array<std::vector<int>, kKinds> position;
        std::vector<int> backward;  // kind of each backward
    };
    struct Rank {
        std::vector<Op> ops;
        std::vector<unsigned char> waits;  // by position: the rank waits for the op in turn
        int next = 0;                      // position of the first op that has not run
    };

    const DispatchGuide& guide_;
    EventCore core_;
    std::vector<Stage> stages_;
    std::vector<Rank> ranks_;
    std::vector<OnlineScheduler::Ran> ran_;
};

// Positions, per rank, of the ops for which ranks wait though another could run, or for a link to
// accept a message, if messages take as long as in `costs`. `peaks`: most microbatches in flight,
// by stage. See pipemorph/planning/simulation/execution.py.
std::vector<std::vector<int>> find_planned_waits(const Costs& costs, const Order& order,
                                                 const std::vector<int>& peaks);

// Mean makespans of the order itself and of guided dispatch, over `draws` iterations in which each
// message between ranks is up to `most` late, drawn by the moment of its send.
std::array<double, 2> compute_jittered_makespans(const Costs& costs, const DispatchGuide& guide,
                                                 double most, int draws);

}  // namespace pipemorph::planner
