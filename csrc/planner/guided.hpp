// Guided dispatch: of its ready ops, every rank runs the first in the plan's order. See
// pipemorph/planning/simulation/core.py.
#pragma once

#include <array>

#include "planner/in_order.hpp"
#include "planner/online.hpp"

namespace pipemorph::planner {

// A plan's order, and what limits ops out of their turn; one entry per rank, `caps` per stage.
struct Guide {
    Order order;
    std::vector<std::vector<int>> waits;  // positions before which nothing runs in their turn
    std::vector<int> caps;                // F out of turn only while fewer are in flight
};

class Guided {
  public:
    Guided(const Costs& costs, const Guide& guide);

    void run(DelayAt delay_at = nullptr, DelayAt transfer_at = nullptr);

    const Core& core() const { return core_; }
    const std::vector<FirstReady::Ran>& ran() const { return ran_; }
    // The end of the iteration that has run; infinity if ranks wait for each other.
    double makespan() const;

    // As the core's chooser.
    Choice choose(const Core& core, int rank, double now);
    void began(Core& core, int rank, const Op& op, double now, double end) {
        ran_[rank].codes.push_back(core.code(op));
        ran_[rank].start.push_back(now);
        ran_[rank].end.push_back(end);
    }
    void ended(int rank, double free) { ran_[rank].free.push_back(free); }

  private:
    struct Stage {
        // Of each op in the order of its rank; a fused backward's: of its B.
        std::array<std::vector<int>, kKinds> position;
        std::vector<int> backward;  // kind of each backward
    };
    struct Rank {
        std::vector<Op> ops;
        std::vector<unsigned char> waits;  // whether nothing runs in its turn, by position
        int next = 0;                      // position of the first op that has not run
    };

    const Guide& guide_;
    Core core_;
    std::vector<Stage> stages_;
    std::vector<Rank> ranks_;
    std::vector<FirstReady::Ran> ran_;
};

// Where ranks wait for an op of the order though another could run, or for a link to take a
// message, if messages take as long as `costs` says: per rank, the positions of these ops. `peaks`:
// most microbatches in flight, by stage. The same as in pipemorph/planning/simulation/core.py.
std::vector<std::vector<int>> planned_waits(const Costs& costs, const Order& order,
                                            const std::vector<int>& peaks);

// Mean makespans of the order itself and of guided dispatch, over `draws` iterations in which each
// message between ranks comes up to `most` late, at random by the moment of its send.
std::array<double, 2> jittered(const Costs& costs, const Guide& guide, double most, int draws);

}  // namespace pipemorph::planner
