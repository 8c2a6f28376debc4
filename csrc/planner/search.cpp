#include "planner/search.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "planner/in_order.hpp"
#include "planner/list_scheduler.hpp"
#include "planner/local_search.hpp"
#include "planner/lower_bound.hpp"
#include "planner/rng.hpp"
#include "planner/windows.hpp"

namespace pipemorph::planner {
namespace {

// Shifting ops is not worth it where fewer steps than this could be tried.
constexpr int kFewestSteps = 50;

struct Mix {
    double forward, backward, weight, patience;  // in mean ops
};
constexpr Mix kPortfolio[] = {
    {0, 0, 0, 0.3},   {0, 0, 0, 0},    {0, 0.5, 0, 0.3}, {-0.5, 0, 0, 0.3},
    {0, 0, 0.5, 0.3}, {0, -1, 0, 0.3}, {0, 1, 0, 0.3},   {0, 0, 0, 0.6},
    {0, 3, 0, 0.3},   {0, 0, 1, 0.3},  {0, 0, 0, 1},
};
constexpr double kChanges[] = {-2, -1, -0.5, -0.25, 0.25, 0.5, 1, 2};
constexpr double kPatience[] = {0, 0.3, 0.6, 1};
constexpr int kOtherUrgency = 8;  // one in so many
constexpr int kAtOnce[] = {1, 1, 2, 3};

// Rounds of both local searches, each with its part of the effort. Of several stages per rank those
// after the first list less: moving ops finds more there.
constexpr int kRounds = 3, kRoundsOfSeveral = 4, kLessListing = 10;
// States that are visited to narrow windows, in all.
constexpr long kNarrowing = 5'000'000;

// With every message late by kLate mean ops, at most kLateCost more than the fatter plan.
constexpr double kLate = 0.5, kLateCost = 0.02;

double mean_op(const Costs& costs) {
    double total[kKinds] = {0, 0, 0};
    for (int kind = 0; kind < kKinds; ++kind)
        for (const double took : costs.took[kind]) total[kind] += took;
    return (total[0] + total[1] + total[2]) / (kKinds * costs.stages);
}

class Search {
  public:
    Search(const Costs& costs, const std::vector<int>& paper_warmup, const Order& start,
           Effort effort)
        : costs_(costs),
          paper_warmup_(paper_warmup),
          effort_(effort),
          several_(costs.ranks() < costs.stages),
          unit_(mean_op(costs)),
          tails_(tails(costs, costs.caps)),
          lister_(costs),
          executor_(costs) {
        found_.bound = machine_bound(costs, heads(costs, costs.caps), tails_);
        if (!start.empty()) {
            found_.order = start;
            found_.makespan = executor_.run(start);
        }
    }

    Found run() {
        const Effort each = effort_;
        first_orders();
        portfolio();
        narrow();
        bend();
        if (found_.order.empty()) return found_;  // the warm-up is more than the limits allow
        shift();
        narrow();
        // Windows come last, so that they can only shorten a plan.
        by_windows_ = narrowed_at_ < kNever;
        const int rounds = several_ ? kRoundsOfSeveral : by_windows_ ? kRounds : 1;
        for (int round = 1; round < rounds && !at_bound(); ++round) {
            effort_ = each;
            if (several_) effort_.listing /= kLessListing;
            if (round == 1 && by_windows_) portfolio();
            bend();
            shift();
            narrow();
        }
        if (!shifted_) slim();
        return found();
    }

  private:
    void first_orders() {
        attempt(in_order());
        tuned_ = false;  // nothing to bend: only the kind of an op counts
        if (!done()) {
            Tuning paper = in_order();
            paper.warmup = paper_warmup_;
            paper.at_least = costs_.warmup.empty();
            attempt(paper);
            tuned_ = false;
        }
    }

    void portfolio() {
        by_urgency(kPortfolio[0], costs_.warmup);
        if (costs_.warmup.empty()) by_urgency(kPortfolio[0], paper_warmup_);
        for (size_t k = 1; k < std::size(kPortfolio); ++k) by_urgency(kPortfolio[k], costs_.warmup);
    }

    // Either there is no shorter schedule, or its windows tell more about what is urgent than tails
    // do.
    void narrow() {
        if (several_ || at_bound() || found_.makespan >= narrowed_at_) return;
        if (narrowing_ < Windows::size(costs_)) return;
        Windows windows(costs_, heads(costs_, costs_.caps), tails_, narrowing_);
        const double shorter = found_.makespan * (1 - kSame / 2);
        const bool refuted = windows.refute(shorter);
        narrowing_ = windows.effort_left();
        narrowed_at_ = found_.makespan;
        if (refuted) {
            found_.bound = shorter;
            return;
        }
        narrowed_ = windows.tails();
        // Where near is enough, it may be that nothing is much shorter.
        const double much = found_.makespan / (1 + effort_.near) * (1 - kSame);
        if (effort_.near > kSame && much > found_.bound && windows.refute(much))
            found_.bound = much;
        narrowing_ = windows.effort_left();
    }

    // Sums of times in the order the simulator takes them.
    Found found() {
        found_.makespan = executor_.run(found_.order);
        return found_;
    }

    bool at_bound() const { return found_.makespan <= found_.bound * (1 + effort_.near); }
    bool done() const { return at_bound() || (effort_.listing <= 0 && tries_ > 0); }

    Tuning in_order() const {
        Tuning tuning;
        tuning.by_kind = true;
        tuning.biases.assign(costs_.stages, Bias{{1, 2, 0}, 0});
        tuning.caps = costs_.caps;
        tuning.warmup = costs_.warmup;
        return tuning;
    }

    Tuning uniform(const Mix& mix, const std::vector<int>& warmup) const {
        Tuning tuning;
        const Bias bias{{mix.forward * unit_, mix.backward * unit_, mix.weight * unit_},
                        mix.patience};
        tuning.biases.assign(costs_.stages, bias);
        tuning.caps = costs_.caps;
        tuning.warmup = warmup;
        tuning.by_windows = by_windows_;
        return tuning;
    }

    void by_urgency(const Mix& mix, const std::vector<int>& warmup) {
        if (!done()) attempt(uniform(mix, warmup));
    }

    // Keep what `tuning` gives if it is shorter, or as short with `or_equal`.
    bool attempt(const Tuning& tuning, bool or_equal = false) {
        const double bound = found_.makespan * (or_equal ? 1 + kSame : 1 - kSame);
        double makespan =
            lister_.run(tails_, tuning.by_windows ? narrowed_ : tails_, tuning, bound);
        // One that ran nothing still counts, or a search where no op may begin would not end.
        effort_.listing -= std::max(1L, lister_.ops_run());
        ++tries_;
        if (makespan == kNever) return false;
        if (costs_.shares_queues()) {
            // The list scheduler takes the directions of a link for independent.
            makespan = executor_.run(lister_.order());
            if (makespan >= bound) return false;
        }
        found_.order = lister_.order();
        found_.makespan = std::min(found_.makespan, makespan);
        tuning_ = tuning;
        tuned_ = true;
        shifted_ = false;
        return true;
    }

    void bend() {
        Tuning tuning = tuned_ ? tuning_ : uniform(kPortfolio[0], costs_.warmup);
        while (!done()) {
            Tuning candidate = tuning;
            for (int change = dice_.pick(kAtOnce); change > 0; --change) bend(candidate);
            if (by_windows_ && !dice_.below(kOtherUrgency))
                candidate.by_windows = !candidate.by_windows;
            if (attempt(candidate, true)) tuning = std::move(candidate);
        }
    }

    void bend(Tuning& tuning) {
        const int stages = costs_.stages, stage = dice_.below(stages), what = dice_.below(20);
        if (what < 9) {
            const int kind = dice_.below(kKinds);
            const double change = unit_ * dice_.pick(kChanges);
            int first = stage, last = stage;
            if (dice_.below(2)) {
                const int other = dice_.below(stages);
                first = std::min(stage, other);
                last = std::max(stage, other);
            }
            for (int i = first; i <= last; ++i) tuning.biases[i].of[kind] += change;
        } else if (what < 16) {
            tuning.biases[stage].patience = dice_.pick(kPatience);
        } else {
            const int least = tuning.warmup.empty() ? 1 : tuning.warmup[stage];
            const int cap = tuning.caps[stage] + (dice_.below(2) ? 1 : -1);
            tuning.caps[stage] = std::min(costs_.caps[stage], std::max(least, cap));
        }
    }

    // Local search on the order.
    void shift() {
        const double listed = found_.makespan;
        const double ops = static_cast<double>(kKinds) * costs_.microbatches * costs_.stages;
        const double steps = static_cast<double>(effort_.shifting) / ops;
        if (at_bound() || steps < kFewestSteps) return;
        const double enough = found_.bound * (1 + effort_.near);
        found_.makespan = planner::shift(costs_, tails_, executor_, dice_, unit_, enough,
                                         effort_.shifting, found_.order, listed);
        shifted_ |= found_.makespan < listed;
    }

    // As short, with fewer microbatches in flight: slackness costs memory. But a plan without it
    // slows down when messages are late, so a candidate must stand slightly late messages about as
    // well. First the warm-up of the paper's rules, then lower caps: halfway to the fewest, then
    // all the way, or a quarter of the way if half is too much.
    void slim() {
        Tuning tuning = tuned_ ? tuning_ : in_order();
        late_ = costs_.delay;
        for (double& delay : late_) delay += kLate * unit_;
        within_ = found_.makespan * (1 + kSame);
        within_late_ = executor_.run(found_.order, late_) * (1 + kLateCost);
        if (costs_.warmup.empty()) {
            Tuning held = tuning;
            held.warmup = paper_warmup_;
            for (int i = 0; i < costs_.stages; ++i)
                held.caps[i] = std::max(held.caps[i], paper_warmup_[i]);
            if (leaner(held)) tuning = held;
        }
        const std::vector<int> peaks = in_flight_peaks();
        const std::vector<int> fewest = fewest_in_flight(peaks);
        if (fewest == peaks) return;
        const auto with_share = [&](double share) {
            for (int i = 0; i < costs_.stages; ++i)
                tuning.caps[i] =
                    static_cast<int>(std::ceil(fewest[i] + share * (peaks[i] - fewest[i])));
            return leaner(tuning);
        };
        if (with_share(0.5))
            with_share(0.0);
        else
            with_share(0.75);
    }

    bool leaner(const Tuning& tuning) {
        // Lower caps make other ops urgent. Looser tails are still true, to give up by.
        Times urgency;
        if (!tuning.by_kind) urgency = tails(costs_, tuning.caps);
        if (tuning.by_windows) raise(urgency, narrowed_);
        const Times& tail = tuning.by_kind || tuning.by_windows ? tails_ : urgency;
        const double listed = lister_.run(tail, tuning.by_kind ? tails_ : urgency, tuning, within_);
        if (listed == kNever) return false;
        if (executor_.run(lister_.order(), late_) > within_late_) return false;
        if (costs_.shares_queues() && executor_.run(lister_.order()) > within_) return false;
        found_.order = lister_.order();
        return true;
    }

    void raise(Times& times, const Times& least) const {
        for (int kind = 0; kind < kKinds; ++kind)
            for (int i = 0; i < costs_.stages; ++i) {
                double* row = times.row(kind, i);
                const double* from = least.row(kind, i);
                for (int m = 0; m < costs_.microbatches; ++m) row[m] = std::max(row[m], from[m]);
            }
    }

    std::vector<int> in_flight_peaks() const {
        std::vector<int> peaks(costs_.stages), now(costs_.stages);
        for (int rank = 0; rank < costs_.ranks(); ++rank)
            for (const unsigned char code : found_.order[rank]) {
                const int i = costs_.stages_of[rank][code >> 2], kind = code & 3;
                if (kind == kForward) peaks[i] = std::max(peaks[i], ++now[i]);
                if (kind == kWeight) --now[i];
            }
        return peaks;
    }

    // Caps not worth going below: the warm-up, and enough W to fill the time after the last B.
    std::vector<int> fewest_in_flight(const std::vector<int>& peaks) const {
        std::vector<int> fewest;
        double up = 0.0;  // from the end of a stage's last B to the end of the last op above it
        for (int i = 0; i < costs_.stages; ++i) {
            if (i)
                up += costs_.delay[i - 1] + costs_.transfer[i - 1] + costs_.took[kBackward][i - 1];
            const double weight = costs_.took[kWeight][i], idle = up + costs_.took[kWeight][0];
            const int fill = idle < peaks[i] * weight
                                 ? static_cast<int>(std::ceil(idle / weight - kSame))
                                 : peaks[i];
            fewest.push_back(std::min(peaks[i], std::max(paper_warmup_[i], fill)));
        }
        return fewest;
    }

    const Costs& costs_;
    const std::vector<int>& paper_warmup_;
    Effort effort_;
    bool several_;  // whether a rank has several stages: no windows are narrowed
    double unit_;
    Times tails_, narrowed_;
    long narrowing_ = kNarrowing;
    double narrowed_at_ = kNever;  // the makespan whose windows these are
    bool by_windows_ = false;      // in use
    MostUrgent lister_;
    InOrder executor_;
    Rng dice_;
    Found found_;
    Tuning tuning_;
    bool tuned_ = false;    // found by `tuning_`
    bool shifted_ = false;  // improved by shifting since
    int tries_ = 0;
    std::vector<double> late_;
    double within_ = 0.0, within_late_ = 0.0;
};

}  // namespace

Found search(const Costs& costs, const std::vector<int>& paper_warmup, const Order& start,
             Effort effort) {
    return Search(costs, paper_warmup, start, effort).run();
}

}  // namespace pipemorph::planner
