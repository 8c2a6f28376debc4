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

// Shifting ops needs at least this number of steps to pay.
constexpr int kFewestSteps = 50;

struct TuningMix {
    double forward, backward, weight, patience;  // in mean ops
};
constexpr TuningMix kPortfolio[] = {
    {0, 0, 0, 0.3},   {0, 0, 0, 0},    {0, 0.5, 0, 0.3}, {-0.5, 0, 0, 0.3},
    {0, 0, 0.5, 0.3}, {0, -1, 0, 0.3}, {0, 1, 0, 0.3},   {0, 0, 0, 0.6},
    {0, 3, 0, 0.3},   {0, 0, 1, 0.3},  {0, 0, 0, 1},
};
constexpr double kChanges[] = {-2, -1, -0.5, -0.25, 0.25, 0.5, 1, 2};
constexpr double kPatience[] = {0, 0.3, 0.6, 1};
constexpr int kOtherUrgency = 8;  // one change in 8 switches the urgency
constexpr int kAtOnce[] = {1, 1, 2, 3};

// Rounds of both local searches, each with its part of the effort. With several stages per rank,
// rounds after the first list less: shifting ops finds more there.
constexpr int kRounds = 3, kRoundsOfMultiStage = 4, kLessListing = 10;
// Total number of states visited to narrow windows.
constexpr long kNarrowing = 5'000'000;

// Test delay of every message, in mean ops, and allowed excess over the plan with more in flight.
constexpr double kLateOps = 0.5, kLateCost = 0.02;

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
          multi_stage_(costs.ranks() < costs.stages),
          unit_(mean_op(costs)),
          tails_(compute_tails(costs, costs.caps)),
          lister_(costs),
          executor_(costs) {
        found_.bound = compute_machine_bound(costs, compute_heads(costs, costs.caps), tails_);
        if (!start.empty()) {
            found_.order = start;
            found_.makespan = executor_.run(start);
        }
    }

    SearchResult run() {
        const Effort each = effort_;
        try_paper_orders();
        try_portfolio();
        narrow();
        vary_tuning();
        if (found_.order.empty()) return found_;  // the warm-up is more than the limits allow
        shift_ops();
        narrow();
        // Urgency by windows comes last, so that it can only shorten a plan.
        by_windows_ = narrowed_at_ < kNever;
        const int rounds = multi_stage_ ? kRoundsOfMultiStage : by_windows_ ? kRounds : 1;
        for (int round = 1; round < rounds && !at_bound(); ++round) {
            effort_ = each;
            if (multi_stage_) effort_.listing /= kLessListing;
            if (round == 1 && by_windows_) try_portfolio();
            vary_tuning();
            shift_ops();
            narrow();
        }
        if (!shifted_) reduce_in_flight();
        return found();
    }

  private:
    void try_paper_orders() {
        try_tuning(in_order());
        tuned_ = false;  // no biases to vary: only the kind of an op counts
        if (!done()) {
            ListTuning paper = in_order();
            paper.warmup = paper_warmup_;
            paper.at_least = costs_.warmup.empty();
            try_tuning(paper);
            tuned_ = false;
        }
    }

    void try_portfolio() {
        try_urgency(kPortfolio[0], costs_.warmup);
        if (costs_.warmup.empty()) try_urgency(kPortfolio[0], paper_warmup_);
        for (size_t k = 1; k < std::size(kPortfolio); ++k)
            try_urgency(kPortfolio[k], costs_.warmup);
    }

    // Proves that no schedule is shorter, or gives windows that measure urgency better than tails.
    void narrow() {
        if (multi_stage_ || at_bound() || found_.makespan >= narrowed_at_) return;
        if (narrowing_ < StartWindows::size(costs_)) return;
        StartWindows windows(costs_, compute_heads(costs_, costs_.caps), tails_, narrowing_);
        const double shorter = found_.makespan * (1 - kSame / 2);
        const bool refuted = windows.refute(shorter);
        narrowing_ = windows.effort_left();
        narrowed_at_ = found_.makespan;
        if (refuted) {
            found_.bound = shorter;
            return;
        }
        narrowed_ = windows.compute_tails();
        // If a gap is allowed, perhaps no schedule is much shorter.
        const double much = found_.makespan / (1 + effort_.near) * (1 - kSame);
        if (effort_.near > kSame && much > found_.bound && windows.refute(much))
            found_.bound = much;
        narrowing_ = windows.effort_left();
    }

    // Result whose makespan sums times in the simulator's order.
    SearchResult found() {
        found_.makespan = executor_.run(found_.order);
        return found_;
    }

    bool at_bound() const { return found_.makespan <= found_.bound * (1 + effort_.near); }
    bool done() const { return at_bound() || (effort_.listing <= 0 && tries_ > 0); }

    ListTuning in_order() const {
        ListTuning tuning;
        tuning.by_kind = true;
        tuning.stage_tunings.assign(costs_.stages, StageTuning{{1, 2, 0}, 0});
        tuning.caps = costs_.caps;
        tuning.warmup = costs_.warmup;
        return tuning;
    }

    ListTuning uniform(const TuningMix& mix, const std::vector<int>& warmup) const {
        ListTuning tuning;
        const StageTuning bias{{mix.forward * unit_, mix.backward * unit_, mix.weight * unit_},
                               mix.patience};
        tuning.stage_tunings.assign(costs_.stages, bias);
        tuning.caps = costs_.caps;
        tuning.warmup = warmup;
        tuning.by_windows = by_windows_;
        return tuning;
    }

    void try_urgency(const TuningMix& mix, const std::vector<int>& warmup) {
        if (!done()) try_tuning(uniform(mix, warmup));
    }

    // Accepts the order of `tuning` if it is shorter, or as short with `or_equal`.
    bool try_tuning(const ListTuning& tuning, bool or_equal = false) {
        const double bound = found_.makespan * (or_equal ? 1 + kSame : 1 - kSame);
        double makespan =
            lister_.run(tails_, tuning.by_windows ? narrowed_ : tails_, tuning, bound);
        // A run without ops counts, too, or a search in which no op may begin would not end.
        effort_.listing -= std::max(1L, lister_.ops_run());
        ++tries_;
        if (makespan == kNever) return false;
        if (costs_.shares_queues()) {
            // The list scheduler models the directions of a link as independent.
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

    void vary_tuning() {
        ListTuning tuning = tuned_ ? tuning_ : uniform(kPortfolio[0], costs_.warmup);
        while (!done()) {
            ListTuning candidate = tuning;
            for (int change = rng_.draw_choice(kAtOnce); change > 0; --change)
                vary_tuning(candidate);
            if (by_windows_ && !rng_.draw_below(kOtherUrgency))
                candidate.by_windows = !candidate.by_windows;
            if (try_tuning(candidate, true)) tuning = std::move(candidate);
        }
    }

    void vary_tuning(ListTuning& tuning) {
        const int stages = costs_.stages, stage = rng_.draw_below(stages),
                  what = rng_.draw_below(20);
        if (what < 9) {
            const int kind = rng_.draw_below(kKinds);
            const double change = unit_ * rng_.draw_choice(kChanges);
            int first = stage, last = stage;
            if (rng_.draw_below(2)) {
                const int other = rng_.draw_below(stages);
                first = std::min(stage, other);
                last = std::max(stage, other);
            }
            for (int i = first; i <= last; ++i) tuning.stage_tunings[i].of[kind] += change;
        } else if (what < 16) {
            tuning.stage_tunings[stage].patience = rng_.draw_choice(kPatience);
        } else {
            const int least = tuning.warmup.empty() ? 1 : tuning.warmup[stage];
            const int cap = tuning.caps[stage] + (rng_.draw_below(2) ? 1 : -1);
            tuning.caps[stage] = std::min(costs_.caps[stage], std::max(least, cap));
        }
    }

    // Local search on the order.
    void shift_ops() {
        const double listed = found_.makespan;
        const double ops = static_cast<double>(kKinds) * costs_.microbatches * costs_.stages;
        const double steps = static_cast<double>(effort_.shifting) / ops;
        if (at_bound() || steps < kFewestSteps) return;
        const double enough = found_.bound * (1 + effort_.near);
        found_.makespan = planner::search_by_shifting(
            costs_, tails_, executor_, rng_, unit_, enough, effort_.shifting, found_.order, listed);
        shifted_ |= found_.makespan < listed;
    }

    // Finds an equally short order with fewer in flight: slackness costs memory. A plan without
    // slackness slows down when messages are late, so a candidate must tolerate slightly late
    // messages about as well. Tries the warm-up of the paper's rules, then lower caps: halfway to
    // the fewest, then the fewest, or a quarter of the difference if half is too much.
    void reduce_in_flight() {
        ListTuning tuning = tuned_ ? tuning_ : in_order();
        late_delays_ = costs_.delay;
        for (double& delay : late_delays_) delay += kLateOps * unit_;
        longest_allowed_ = found_.makespan * (1 + kSame);
        longest_allowed_late_ = executor_.run(found_.order, late_delays_) * (1 + kLateCost);
        if (costs_.warmup.empty()) {
            ListTuning held = tuning;
            held.warmup = paper_warmup_;
            for (int i = 0; i < costs_.stages; ++i)
                held.caps[i] = std::max(held.caps[i], paper_warmup_[i]);
            if (accept_if_leaner(held)) tuning = held;
        }
        const std::vector<int> peaks = in_flight_peaks();
        const std::vector<int> fewest = fewest_in_flight(peaks);
        if (fewest == peaks) return;
        const auto with_share = [&](double share) {
            for (int i = 0; i < costs_.stages; ++i)
                tuning.caps[i] =
                    static_cast<int>(std::ceil(fewest[i] + share * (peaks[i] - fewest[i])));
            return accept_if_leaner(tuning);
        };
        if (with_share(0.5))
            with_share(0.0);
        else
            with_share(0.75);
    }

    bool accept_if_leaner(const ListTuning& tuning) {
        // Lower caps make other ops urgent. Looser tails still hold as limits to give up.
        Times urgency;
        if (!tuning.by_kind) urgency = compute_tails(costs_, tuning.caps);
        if (tuning.by_windows) raise_to(urgency, narrowed_);
        const Times& tail = tuning.by_kind || tuning.by_windows ? tails_ : urgency;
        const double listed =
            lister_.run(tail, tuning.by_kind ? tails_ : urgency, tuning, longest_allowed_);
        if (listed == kNever) return false;
        if (executor_.run(lister_.order(), late_delays_) > longest_allowed_late_) return false;
        if (costs_.shares_queues() && executor_.run(lister_.order()) > longest_allowed_)
            return false;
        found_.order = lister_.order();
        return true;
    }

    void raise_to(Times& times, const Times& least) const {
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

    // Least useful caps: the warm-up, and enough W to fill the time after the last B.
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
    bool multi_stage_;  // a rank has several stages: no windows are narrowed
    double unit_;
    Times tails_, narrowed_;
    long narrowing_ = kNarrowing;
    double narrowed_at_ = kNever;  // makespan of these windows
    bool by_windows_ = false;      // windows are in use
    UrgencyScheduler lister_;
    OrderExecutor executor_;
    Rng rng_;
    SearchResult found_;
    ListTuning tuning_;
    bool tuned_ = false;    // `found_` is by `tuning_`
    bool shifted_ = false;  // `found_` was improved by shifting
    int tries_ = 0;
    std::vector<double> late_delays_;
    double longest_allowed_ = 0.0, longest_allowed_late_ = 0.0;
};

}  // namespace

SearchResult search(const Costs& costs, const std::vector<int>& paper_warmup, const Order& start,
                    Effort effort) {
    return Search(costs, paper_warmup, start, effort).run();
}

}  // namespace pipemorph::planner
