// A planning problem laid out for the inner loops. The same as
// pipemorph/planning/simulation/costs.py.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

namespace pipemorph::planner {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Kinds of ops, and indices of what is kept per kind.
enum Kind : unsigned char { kForward, kBackward, kWeight };
constexpr int kKinds = 3;

// Times in the problem's unit; `queues` and `outstanding` are 0 for "no bound"; `caps` are N
// where there is none.
struct Costs {
    int microbatches = 0;
    int stages = 0;
    std::vector<double> took[kKinds];  // per stage
    std::vector<double> delay;         // per link, as those below
    std::vector<int> queues;
    std::vector<int> outstanding;
    std::vector<bool> half_duplex;
    std::vector<int> caps;    // per stage
    std::vector<int> warmup;  // per stage: exactly so many F before the first B; empty: free

    bool shares_queues() const {
        for (const bool half : half_duplex)
            if (half) return true;
        return false;
    }
};

// One number per op.
struct Times {
    int microbatches = 0;
    std::vector<double> of[kKinds];

    Times() = default;
    Times(int stages, int n) : microbatches(n) {
        for (auto& values : of) values.assign(static_cast<size_t>(stages) * n, 0.0);
    }
    double* row(int kind, int stage) {
        return of[kind].data() + static_cast<size_t>(stage) * microbatches;
    }
    const double* row(int kind, int stage) const {
        return of[kind].data() + static_cast<size_t>(stage) * microbatches;
    }
};

// Per stage, the kinds of its ops in run order: each kind runs in microbatch order, so this is
// the whole schedule.
using Order = std::vector<std::vector<unsigned char>>;

// Message `m` over a link whose directions are independent, sent at `end`: when compute may go
// on, and when it arrives, which is put into `arrivals`. See links.py.
inline double send(const Costs& costs, const std::vector<double>& delay, int link, double* arrivals,
                   int m, double end) {
    double free = end;
    const int bound = costs.outstanding[link], queues = costs.queues[link];
    if (bound && m >= bound && arrivals[m - bound] > free) free = arrivals[m - bound];
    double leaves = free;
    if (queues && m >= queues && arrivals[m - queues] > leaves) leaves = arrivals[m - queues];
    arrivals[m] = leaves + delay[link];
    return free;
}

}  // namespace pipemorph::planner
