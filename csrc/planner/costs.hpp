// Planning problem laid out for the inner loops, as Costs in
// pipemorph/planning/simulation/execution.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

namespace pipemorph::planner {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Kinds of ops, and indices of arrays per kind. A fused backward counts as a B and a W.
enum Kind : unsigned char { kForward, kBackward, kWeight, kFused };
constexpr int kKinds = 3;
constexpr int kMostChunks = 64;  // stages of a rank

// Times in the problem's unit; `queues` and `outstanding` are 0 for "no bound"; `caps` are N for
// "no cap". The search uses neither fused backwards nor offload.
struct Costs {
    int microbatches = 0;
    int stages = 0;
    std::vector<double> took[kKinds + 1];  // per kind and stage; the mean if microbatches differ
    // Per stage and microbatch, one row per stage; both empty if all microbatches are equal.
    std::vector<double> factors;            // of the times of all ops
    std::vector<double> times[kKinds + 1];  // per kind: `took` of an equal microbatch × its factor
    std::vector<double> delay;              // per link, as the next four
    std::vector<double> transfer;           // time for which a message occupies its direction
    std::vector<int> queues;
    std::vector<int> outstanding;
    std::vector<bool> half_duplex;
    std::vector<int> caps;           // per stage
    std::vector<int> warmup;         // per stage: the number of F before the first B; empty: free
    std::vector<double> leaving;     // per stage: extra time of an F whose activations leave
    std::vector<double> returning;   // per stage: extra time of a backward whose activations return
    std::vector<int> device_limits;  // per stage: microbatches on the device; 0: all stay
    std::vector<double> after;       // per rank: time after its last op
    std::vector<double> before;      // per rank: earliest start; empty: 0
    std::vector<std::vector<int>> stages_of;  // per rank; an op's chunk is an index in it
    std::vector<int> rank_of, chunk_of;       // per stage
    std::vector<double> sizes;                // per stage: memory of one microbatch in flight
    double memory = kNever;                   // of a rank, for all its stages

    // Puts the stages on ranks.
    void place(std::vector<std::vector<int>> ranks) {
        stages_of = std::move(ranks);
        rank_of.assign(stages, 0);
        chunk_of.assign(stages, 0);
        for (size_t rank = 0; rank < stages_of.size(); ++rank)
            for (size_t chunk = 0; chunk < stages_of[rank].size(); ++chunk) {
                rank_of[stages_of[rank][chunk]] = static_cast<int>(rank);
                chunk_of[stages_of[rank][chunk]] = static_cast<int>(chunk);
            }
    }
    // Sets the factors, a row of one per microbatch for each stage. `took` becomes the mean.
    void set_factors(const std::vector<std::vector<double>>& rows);
    bool varies() const { return !factors.empty(); }
    // Time of the op of microbatch `m`.
    double time(int kind, int stage, int m) const {
        if (!varies()) return took[kind][stage];
        return times[kind][static_cast<size_t>(stage) * microbatches + m];
    }
    // Exchanges the factors of two microbatches on every stage.
    void swap_microbatches(int a, int b);

    int ranks() const { return static_cast<int>(stages_of.size()); }
    // True if a link joins two stages of one rank: its messages take no time.
    bool is_within_rank(int link) const { return rank_of[link] == rank_of[link + 1]; }

    bool shares_queues() const {
        return std::find(half_duplex.begin(), half_duplex.end(), true) != half_duplex.end();
    }
    bool offloads() const {
        return std::any_of(device_limits.begin(), device_limits.end(), [](int d) { return d > 0; });
    }
};

// (link, time of send) -> delay or transfer, where they change within an iteration.
using DelayAt = std::function<double(int, double)>;

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

// Ops of each rank in run order: the kind, plus 4 times the chunk, which is the index of the op's
// stage among those of the rank. Each kind of a stage runs in microbatch order, so this is the
// whole schedule.
using Order = std::vector<std::vector<unsigned char>>;

}  // namespace pipemorph::planner
