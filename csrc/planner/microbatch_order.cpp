#include "planner/microbatch_order.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "planner/lower_bound.hpp"
#include "planner/rng.hpp"
#include "planner/search.hpp"

namespace pipemorph::planner {
namespace {

// Orders of this number of microbatches are all tried.
constexpr int kFewMicrobatches = 5;
// Mean ops by which a step may lengthen the iteration at the start of the search; 0 at its end.
constexpr double kHeatOfOrder = 0.5;
// Effort of an op out of turn, in ops of a given order.
constexpr long kGuidedCost = 3;
// Most places by which a microbatch moves if others move up.
constexpr int kFarthest = 4;

// Costs with the shorter form of each backward, split or fused: tails hold for both.
Costs with_least_backward(Costs costs) {
    for (int i = 0; i < costs.stages; ++i)
        for (int m = 0; m < costs.microbatches; ++m) {
            const size_t at = static_cast<size_t>(i) * costs.microbatches + m;
            double &backward = costs.times[kBackward][at], &weight = costs.times[kWeight][at];
            const double whole = std::min(costs.times[kFused][at], backward + weight);
            backward = std::min(backward, whole);
            weight = whole - backward;
        }
    return costs;
}

class OrderSearch {
  public:
    OrderSearch(Costs costs, const DispatchGuide& guide, bool guided, double enough, long effort)
        : costs_(std::move(costs)),
          guide_(guide),
          enough_(enough),
          effort_(effort),
          all_(static_cast<double>(effort)),
          tails_(compute_tails(with_least_backward(costs_), costs_.caps, true)),
          present_(costs_.microbatches) {
        std::iota(present_.begin(), present_.end(), 0);
        if (guided)
            guided_.emplace(costs_, guide_);
        else
            in_order_.emplace(costs_);
        for (const auto& codes : guide_.order)
            cost_of_guided_ += kGuidedCost * static_cast<long>(codes.size());
    }

    MicrobatchOrder run() {
        best_ = {present_, execute(kNever)};
        if (costs_.microbatches <= kFewMicrobatches) {
            try_all();
        } else {
            try_sorted();
            arrange(best_.microbatches);
            improve();
        }
        return best_;
    }

  private:
    bool done() const { return effort_ <= 0 || best_.makespan <= enough_ * (1 + kSame); }

    // Makespan of the present order; kNever once it reaches `limit`.
    double execute(double limit) {
        if (guided_) {
            effort_ -= cost_of_guided_;
            guided_->run();
            return guided_->makespan();
        }
        const double found = in_order_->run(guide_.order, costs_.delay, &tails_, limit);
        effort_ -= std::max(1L, in_order_->ops_run());
        return found;
    }

    void swap(int a, int b) {
        std::swap(present_[a], present_[b]);
        costs_.swap_microbatches(a, b);
    }

    void arrange(const std::vector<int>& order) {
        for (int place = 0; place < costs_.microbatches; ++place) {
            const auto its = std::find(present_.begin() + place, present_.end(), order[place]);
            swap(place, static_cast<int>(its - present_.begin()));
        }
    }

    void try_order(const std::vector<int>& order) {
        if (done()) return;
        arrange(order);
        accept(execute(best_.makespan * (1 - kSame)));
    }

    bool accept(double makespan) {
        if (makespan >= best_.makespan * (1 - kSame)) return false;
        best_ = {present_, makespan};
        return true;
    }

    void try_all() {
        std::vector<int> order(costs_.microbatches);
        std::iota(order.begin(), order.end(), 0);
        while (std::next_permutation(order.begin(), order.end())) try_order(order);
    }

    // By cost: cheap ones first, last, or first and last.
    void try_sorted() {
        const int n = costs_.microbatches;
        std::vector<double> cost(n);
        for (int kind = 0; kind < kKinds; ++kind)
            for (int i = 0; i < costs_.stages; ++i)
                for (int place = 0; place < n; ++place)
                    cost[present_[place]] += costs_.time(kind, i, place);
        std::vector<int> rising(n);
        std::iota(rising.begin(), rising.end(), 0);
        std::stable_sort(rising.begin(), rising.end(),
                         [&](int a, int b) { return cost[a] < cost[b]; });
        const std::vector<int> falling(rising.rbegin(), rising.rend());
        std::vector<int> hill(n);
        for (int k = 0; k < n; ++k) hill[k % 2 ? n - 1 - k / 2 : k / 2] = rising[k];
        for (const auto& order : {hill, rising, falling}) try_order(order);
    }

    // Exchanges two microbatches at a time, or moves one by a few places.
    void improve() {
        const int n = costs_.microbatches;
        double unit = 0.0;
        for (int kind = 0; kind < kKinds; ++kind)
            for (const double took : costs_.took[kind]) unit += took / (kKinds * costs_.stages);
        double length = best_.makespan;
        while (!done()) {
            --effort_;
            int a = rng_.draw_below(n), b = rng_.draw_below(n - 1);
            b += b >= a;
            const bool moves = rng_.draw_below(4) == 0;
            if (moves) b = std::clamp(b, a - kFarthest, a + kFarthest);
            const double patience = kHeatOfOrder * unit * (static_cast<double>(effort_) / all_);
            const double within = length + std::max(0.0, patience) * rng_.draw_unit();
            change(a, b, moves);
            const double found = execute(within * (1 + kSame));
            if (found > within * (1 + kSame)) {
                change(b, a, moves);
                continue;
            }
            length = found;
            accept(found);
        }
    }

    void change(int a, int b, bool moves) {
        if (!moves) return swap(a, b);
        for (; a < b; ++a) swap(a, a + 1);
        for (; a > b; --a) swap(a, a - 1);
    }

    Costs costs_;  // its factors by place: an executor sees the present order
    const DispatchGuide& guide_;
    const double enough_;
    long effort_;
    const double all_;
    const Times tails_;  // of any order
    std::optional<OrderExecutor> in_order_;
    std::optional<GuidedExecutor> guided_;
    long cost_of_guided_ = 0;
    std::vector<int> present_;  // microbatches by place
    MicrobatchOrder best_;
    Rng rng_;
};

}  // namespace

MicrobatchOrder order_microbatches(Costs costs, const DispatchGuide& guide, bool guided,
                                   double enough, long effort) {
    return OrderSearch(std::move(costs), guide, guided, enough, effort).run();
}

}  // namespace pipemorph::planner
