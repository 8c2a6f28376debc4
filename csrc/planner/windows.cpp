#include "planner/windows.hpp"

#include "planner/search.hpp"

namespace pipemorph::planner {
namespace {

// Slack at the end of all windows, relative to the makespan: rounding must refute nothing.
constexpr double kRoundingSlack = kSame / 10;
// Changes below this, in mean ops, are not propagated to other stages.
constexpr double kSmallestChange = 1e-3;
// Relative distance to the least makespan that is not refuted at which bisection ends.
constexpr double kBisectionTolerance = 1e-4;

// Times of a stage's ops, at hand in the inner loops.
struct StageOpTimes {
    StageOpTimes(const Costs& costs, int stage) {
        for (int kind = 0; kind < kKinds; ++kind) {
            equal[kind] = costs.took[kind][stage];
            if (costs.varies())
                rows[kind] =
                    costs.times[kind].data() + static_cast<size_t>(stage) * costs.microbatches;
        }
    }
    double of(int kind, int m) const { return rows[kind] ? rows[kind][m] : equal[kind]; }

    double equal[kKinds];
    const double* rows[kKinds] = {nullptr, nullptr, nullptr};
};

}  // namespace

StartWindows::StartWindows(const Costs& costs, const Times& head, const Times& tail, long effort)
    : costs_(costs),
      tail_(tail),
      effort_(effort),
      unrefuted_head_(head),
      unrefuted_latest_(costs.stages, costs.microbatches),
      changed_(costs.stages),
      arrivals_(costs.microbatches) {
    for (auto& values : unrefuted_latest_.of) std::fill(values.begin(), values.end(), kNever);
    double ops = 0.0;
    for (int kind = 0; kind < kKinds; ++kind)
        for (const double took : costs.took[kind]) ops += took;
    small_ = kSmallestChange * ops / (kKinds * costs.stages);
}

double StartWindows::size(const Costs& costs) {
    double states = 0.0;
    for (const int cap : costs.caps)
        states += 0.5 * (costs.microbatches + 1) * (cap + 1.0) * (cap + 2.0);
    return states;
}

bool StartWindows::refute(double makespan) {
    end_ = makespan * (1 + kRoundingSlack);
    head_ = unrefuted_head_;
    latest_ = unrefuted_latest_;
    for (int kind = 0; kind < kKinds; ++kind)
        for (int i = 0; i < costs_.stages; ++i) {
            const double* tail = tail_.row(kind, i);
            double* latest = latest_.row(kind, i);
            for (int m = 0; m < costs_.microbatches; ++m)
                latest[m] = std::min(latest[m], end_ - tail[m]);
        }
    std::fill(changed_.begin(), changed_.end(), true);
    if (!narrow()) return true;
    unrefuted_end_ = end_;
    unrefuted_head_ = head_;
    unrefuted_latest_ = latest_;
    return false;
}

Times StartWindows::compute_tails() const {
    Times tails = unrefuted_latest_;
    for (auto& values : tails.of)
        for (double& value : values) value = unrefuted_end_ - value;
    return tails;
}

bool StartWindows::narrow() {
    const int stages = costs_.stages;
    while (std::find(changed_.begin(), changed_.end(), true) != changed_.end()) {
        // Down the stages as activations go, and up again as gradients do.
        for (int step = 0; step < 2 * stages; ++step) {
            const int i = step < stages ? step : 2 * stages - 1 - step;
            if (!changed_[i]) continue;
            if (effort_ <= 0) return true;
            changed_[i] = false;
            if (!narrow(i)) return false;
            for (int link = std::max(0, i - 1); link < std::min(i + 1, stages - 1); ++link) {
                pass_windows(link, kForward, link, link + 1);
                pass_windows(link, kBackward, link + 1, link);
            }
        }
    }
    return true;
}

bool StartWindows::narrow(int i) {
    width_ = costs_.caps[i] + 1;
    const size_t rows = static_cast<size_t>(costs_.microbatches + 1) * width_;
    if (first_.size() < rows) {
        first_.resize(rows);
        last_.resize(rows);
    }
    if (from_.size() < rows * width_) {
        from_.resize(rows * width_);
        until_.resize(rows * width_);
    }
    return propagate_from_start(i) && propagate_from_end(i);
}

// Finds the earliest time at which the stage can be free with `f` F, `b` B and `w` W done.
bool StartWindows::propagate_from_start(int i) {
    const int n = costs_.microbatches, cap = costs_.caps[i];
    const StageOpTimes took(costs_, i);
    const auto start = [&](int kind, int m, double free) {
        const double at = std::max(free, head_.row(kind, i)[m]);
        return at <= latest_.row(kind, i)[m] ? at + took.of(kind, m) : kNever;
    };
    for (int w = 0; w <= n; ++w) {
        const int most = std::min(n, w + cap);
        for (int b = w; b <= most; ++b) {
            const size_t here = row(w, b);
            first_[here] = n + 1;
            last_[here] = -1;
            // Range of F in the states from which an op leads here.
            int from = n + 1, to = -1;
            if (!w && !b) from = to = 0;
            const bool by_backward = b > w, by_weight = w && b < w + cap;
            const size_t backward = by_backward ? row(w, b - 1) : here;
            const size_t weight = by_weight ? row(w - 1, b) : here;
            if (by_backward && last_[backward] >= b) {
                from = std::max(b, first_[backward]);
                to = last_[backward];
            }
            if (by_weight && last_[weight] >= 0) {
                from = std::min(from, first_[weight]);
                to = std::max(to, last_[weight]);
            }
            double before = kNever;
            for (int f = from; f <= most && (f <= to || before < kNever); ++f) {
                double at = w || b || f ? kNever : 0.0;
                if (before < kNever) at = start(kForward, f - 1, before);
                if (by_backward && reached(backward, f))
                    at = std::min(at, start(kBackward, b - 1, from_[state(backward, w, f)]));
                if (by_weight && reached(weight, f))
                    at = std::min(at, start(kWeight, w - 1, from_[state(weight, w - 1, f)]));
                // Too late for the next op of some kind.
                if ((f < n && at > latest_.row(kForward, i)[f]) ||
                    (b < n && at > latest_.row(kBackward, i)[b]) ||
                    (w < n && at > latest_.row(kWeight, i)[w]))
                    at = kNever;
                --effort_;
                from_[state(here, w, f)] = before = at;
                if (at == kNever) continue;
                first_[here] = std::min(first_[here], f);
                last_[here] = f;
            }
        }
    }
    return last_[row(n, n)] == n;
}

// Finds the latest time at which the stage must be free, and from both times its ops' windows.
bool StartWindows::propagate_from_end(int i) {
    const int n = costs_.microbatches, cap = costs_.caps[i];
    const StageOpTimes took(costs_, i);
    std::vector<double> least[kKinds], most[kKinds];
    for (int kind = 0; kind < kKinds; ++kind) {
        least[kind].assign(n, kNever);
        most[kind].assign(n, -kNever);
    }
    for (int w = n; w >= 0; --w) {
        for (int b = std::min(n, w + cap); b >= w; --b) {
            const size_t here = row(w, b);
            double after = -kNever;
            for (int f = last_[here]; f >= first_[here]; --f) {
                const double at = from_[state(here, w, f)];
                double until = w == n ? end_ - costs_.after[i] : -kNever;
                const auto run = [&](int kind, int m, double free) {
                    const double start = std::max(at, head_.row(kind, i)[m]);
                    const double latest =
                        std::min(latest_.row(kind, i)[m], free - took.of(kind, m));
                    if (start > latest) return;
                    until = std::max(until, latest);
                    least[kind][m] = std::min(least[kind][m], start);
                    most[kind][m] = std::max(most[kind][m], latest);
                };
                if (at < kNever) {
                    if (f < last_[here]) run(kForward, f, after);
                    if (b < f && reached(row(w, b + 1), f))
                        run(kBackward, b, until_[state(row(w, b + 1), w, f)]);
                    if (w < b && reached(row(w + 1, b), f))
                        run(kWeight, w, until_[state(row(w + 1, b), w + 1, f)]);
                }
                until_[state(here, w, f)] = after = until;
            }
        }
    }
    if (until_[0] < from_[0]) return false;
    for (int kind = 0; kind < kKinds; ++kind) {
        std::copy(least[kind].begin(), least[kind].end(), head_.row(kind, i));
        std::copy(most[kind].begin(), most[kind].end(), latest_.row(kind, i));
    }
    return true;
}

void StartWindows::pass_windows(int link, int kind, int from, int to) {
    const int n = costs_.microbatches, queues = costs_.queues[link];
    const double transfer = costs_.transfer[link], delay = costs_.delay[link];
    bool later = false, earlier = false;
    const double* sent = head_.row(kind, from);
    double* received = head_.row(kind, to);
    for (int m = 0; m < n; ++m) {
        double leaves = sent[m] + costs_.time(kind, from, m);
        if (queues && m >= queues) leaves = std::max(leaves, arrivals_[m - queues]);
        double arrives = leaves + transfer + delay;
        if (m && transfer > 0) arrives = std::max(arrives, arrivals_[m - 1] + transfer);
        arrivals_[m] = arrives;
        later |= arrives > received[m] + small_;
        received[m] = std::max(received[m], arrives);
    }
    const double* due = latest_.row(kind, to);
    double* latest = latest_.row(kind, from);
    for (int m = n - 1; m >= 0; --m) {
        double arrives = due[m];
        if (m < n - 1 && transfer > 0) arrives = std::min(arrives, arrivals_[m + 1] - transfer);
        if (queues && m + queues < n)
            arrives = std::min(arrives, arrivals_[m + queues] - transfer - delay);
        arrivals_[m] = arrives;
        const double start = arrives - delay - transfer - costs_.time(kind, from, m);
        earlier |= start < latest[m] - small_;
        latest[m] = std::min(latest[m], start);
    }
    changed_[to] |= later;
    changed_[from] |= earlier;
}

double tighten_bound(const Costs& costs, const Times& head, const Times& tail, double bound,
                     double makespan, long effort) {
    const double just_below = makespan * (1 - kSame / 2);
    if (just_below <= bound || static_cast<double>(effort) < StartWindows::size(costs))
        return bound;
    StartWindows windows(costs, head, tail, effort);
    if (windows.refute(just_below)) return just_below;
    double open = makespan;
    while (windows.effort_left() > 0 && open - bound > kBisectionTolerance * open) {
        const double middle = (bound + open) / 2;
        (windows.refute(middle) ? bound : open) = middle;
    }
    return bound;
}

}  // namespace pipemorph::planner
