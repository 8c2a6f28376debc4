// Online list schedule: every rank runs its first ready op of B, F, W; the later of two stages
// comes first. Run before the iteration, its order is the paper's "full schedule". See
// pipemorph/planning/simulation/execution.py.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// Restrictions on the ops of each stage; one entry per stage.
struct DispatchRules {
    std::vector<int> warmup;    // number of F before any other op
    std::vector<int> caps;      // F only while fewer microbatches are in flight
    bool exact_warmup = false;  // no further F before the first backward
    std::vector<bool> fused;    // one BW in place of B and W
};

class OnlineScheduler {
  public:
    struct Ran {
        std::vector<unsigned char> codes;
        std::vector<double> start, end, free;
    };

    OnlineScheduler(const Costs& costs, const DispatchRules& rules)
        : rules_(rules), core_(costs), ran_(costs.stages_of.size()) {}

    void run();

    const EventCore& core() const { return core_; }
    const std::vector<Ran>& ran() const { return ran_; }

    // Interface of the core's chooser.
    Choice choose(const EventCore& core, int rank, double now) const;
    void began(EventCore& core, int rank, const Op& op, double now, double end) {
        ran_[rank].codes.push_back(core.code(op));
        ran_[rank].start.push_back(now);
        ran_[rank].end.push_back(end);
    }
    void ended(int rank, double free) { ran_[rank].free.push_back(free); }

  private:
    const DispatchRules& rules_;
    EventCore core_;
    std::vector<Ran> ran_;
};

}  // namespace pipemorph::planner
