// Online list schedule: every rank runs its first ready op of B, F, W, of two stages that of the
// later one. Run before the iteration, its order is the paper's "full schedule". See
// pipemorph/planning/simulation/core.py.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// What the stages may run; one entry per stage.
struct Rules {
    std::vector<int> warmup;    // only F until this many have run
    std::vector<int> caps;      // F only while fewer microbatches are in flight
    bool exact_warmup = false;  // no further F before the first backward
    std::vector<bool> fused;    // one BW in place of B and W
};

class FirstReady {
  public:
    struct Ran {
        std::vector<unsigned char> codes;
        std::vector<double> start, end, free;
    };

    FirstReady(const Costs& costs, const Rules& rules)
        : rules_(rules), core_(costs), ran_(costs.stages_of.size()) {}

    void run();

    const Core& core() const { return core_; }
    const std::vector<Ran>& ran() const { return ran_; }

    // As the core's chooser.
    Choice choose(const Core& core, int rank, double now) const;
    void began(Core& core, int rank, const Op& op, double now, double end) {
        ran_[rank].codes.push_back(core.code(op));
        ran_[rank].start.push_back(now);
        ran_[rank].end.push_back(end);
    }
    void ended(int rank, double free) { ran_[rank].free.push_back(free); }

  private:
    const Rules& rules_;
    Core core_;
    std::vector<Ran> ran_;
};

}  // namespace pipemorph::planner
