#include "planner/lower_bound.hpp"

#include <algorithm>
#include <queue>

namespace pipemorph::planner {
namespace {

double arrival(const Costs& costs, int link, const double* arrivals, int m, double sent) {
    const int queues = costs.queues[link];
    const double leaves = queues && m >= queues ? std::max(sent, arrivals[m - queues]) : sent;
    const double transfer = costs.transfer[link];
    const double arrives = leaves + transfer + costs.delay[link];
    return m && transfer > 0 ? std::max(arrives, arrivals[m - 1] + transfer) : arrives;
}

// Least time from the end of an op to the end of the iteration by way of its message, which is
// followed by those of all later microbatches. `after`: that time of the next microbatch.
double compute_tail_by_message(const Costs& costs, int link, double received, double after) {
    const double transfer = costs.transfer[link];
    const double alone = costs.delay[link] + transfer + received;
    return transfer > 0 ? std::max(alone, transfer + after) : alone;
}

// Times of ops by place in the order of the microbatches: of that order, or the least of any order.
class WorkTimes {
  public:
    WorkTimes(const Costs& costs, bool any_order)
        : costs_(costs), any_order_(any_order && costs.varies()), n_(costs.microbatches) {
        if (!costs.varies()) return;
        for (int kind = 0; kind < kKinds; ++kind)
            for (int i = 0; i < costs.stages; ++i) {
                std::vector<double> row(n_);
                for (int m = 0; m < n_; ++m) row[m] = costs.time(kind, i, m);
                if (any_order) std::sort(row.begin(), row.end());
                double sum = 0.0;
                sums_[kind].push_back(sum);
                for (const double each : row) sums_[kind].push_back(sum += each);
            }
    }

    double of(int kind, int i, int m) const {
        return any_order_ ? row(kind, i)[1] : costs_.time(kind, i, m);
    }
    // Of the ops from place `first` to before place `last`.
    double sum(int kind, int i, int first, int last) const {
        if (!costs_.varies()) return (last - first) * costs_.took[kind][i];
        return any_order_ ? row(kind, i)[last - first] : row(kind, i)[last] - row(kind, i)[first];
    }

  private:
    const double* row(int kind, int i) const {
        return sums_[kind].data() + static_cast<size_t>(i) * (n_ + 1);
    }

    const Costs& costs_;
    const bool any_order_;
    const int n_;
    std::vector<double> sums_[kKinds];  // of the first ops, or the shortest: n + 1 per stage
};

// Time of the longest way of one microbatch through all stages and back.
double find_longest_chain(const Costs& costs) {
    double longest = 0.0;
    for (int m = 0; m < costs.microbatches; ++m) {
        double chain = costs.time(kWeight, 0, m) + costs.after[costs.rank_of[0]];
        for (int i = 0; i < costs.stages; ++i) {
            chain += costs.time(kForward, i, m) + costs.time(kBackward, i, m);
            if (i) chain += 2 * (costs.delay[i - 1] + costs.transfer[i - 1]);
        }
        longest = std::max(longest, chain);
    }
    return longest;
}

// Sorts values, and drops equal ones and, of many, all but some.
constexpr size_t kMostValues = 96;
void thin_out(std::vector<double>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    const size_t every = values.size() / kMostValues + 1;
    size_t count = 0;
    for (size_t k = 0; k < values.size(); k += every) values[count++] = values[k];
    values.resize(count);
}

struct Job {
    double head, after, took;
};

// Makespan on one machine with preemption: at any moment the released op with the longest tail
// runs (Jackson's rule).
double schedule_one_machine(std::vector<Job>& jobs) {
    std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.head < b.head; });
    const auto later = [](const Job& a, const Job& b) {
        return a.after != b.after ? a.after < b.after : a.took > b.took;
    };
    std::priority_queue<Job, std::vector<Job>, decltype(later)> released(later);
    double now = 0.0, best = 0.0;
    size_t position = 0;
    while (position < jobs.size() || !released.empty()) {
        if (released.empty()) now = std::max(now, jobs[position].head);
        while (position < jobs.size() && jobs[position].head <= now)
            released.push(jobs[position++]);
        Job job = released.top();
        released.pop();
        const double until = position < jobs.size() ? jobs[position].head : kNever;
        if (now + job.took <= until) {
            now += job.took;
            best = std::max(best, now + job.after);
        } else {
            job.took -= until - now;
            released.push(job);
            now = until;
        }
    }
    return best;
}

}  // namespace

Times compute_heads(const Costs& costs, const std::vector<int>& caps, bool any_order) {
    const int n = costs.microbatches, stages = costs.stages;
    const WorkTimes work(costs, any_order);
    Times times(stages, n), arrivals(stages, n);
    for (int m = 0; m < n; ++m) {
        for (int i = 0; i < stages; ++i) {
            double* forward = times.row(kForward, i);
            double start = m ? forward[m - 1] + work.of(kForward, i, m - 1) : 0.0;
            if (i) {
                double* above = arrivals.row(kForward, i);
                const double sent = times.row(kForward, i - 1)[m] + work.of(kForward, i - 1, m);
                above[m] = arrival(costs, i - 1, above, m, sent);
                start = std::max(start, above[m]);
            }
            if (const int freed = m - caps[i]; freed >= 0)
                start = std::max(start, times.row(kWeight, i)[freed] + work.of(kWeight, i, freed));
            // Earlier ops of this stage: m F, and B and W of all microbatches above the cap.
            const int over = std::max(0, m - caps[i] + 1);
            forward[m] = std::max(start, forward[0] + work.sum(kForward, i, 0, m) +
                                             work.sum(kBackward, i, 0, over) +
                                             work.sum(kWeight, i, 0, over));
        }
        for (int i = stages - 1; i >= 0; --i) {
            const double* forward = times.row(kForward, i);
            double* backward = times.row(kBackward, i);
            double* weight = times.row(kWeight, i);
            double start = forward[m] + work.of(kForward, i, m);
            if (i < stages - 1) {
                double* below = arrivals.row(kBackward, i);
                const double sent = times.row(kBackward, i + 1)[m] + work.of(kBackward, i + 1, m);
                below[m] = arrival(costs, i, below, m, sent);
                start = std::max(start, below[m]);
            }
            if (m) start = std::max(start, backward[m - 1] + work.of(kBackward, i, m - 1));
            const int over = std::max(0, m - caps[i] + 1);
            start =
                std::max(start, forward[0] + work.sum(kForward, i, 0, m + 1) +
                                    work.sum(kBackward, i, 0, m) + work.sum(kWeight, i, 0, over));
            backward[m] = start;
            weight[m] = std::max(start + work.of(kBackward, i, m),
                                 m ? weight[m - 1] + work.of(kWeight, i, m - 1) : 0.0);
        }
    }
    return times;
}

Times compute_tails(const Costs& costs, const std::vector<int>& caps, bool any_order) {
    const int n = costs.microbatches, stages = costs.stages;
    const WorkTimes work(costs, any_order);
    Times times(stages, n + 1);
    for (int i = 0; i < stages; ++i) times.row(kWeight, i)[n] = costs.after[costs.rank_of[i]];
    std::vector<double> down(stages), up(stages);  // by way of the messages of microbatch m + 1
    for (int m = n - 1; m >= 0; --m) {
        for (int i = 0; i < stages; ++i) {
            const double b = work.of(kBackward, i, m), w = work.of(kWeight, i, m);
            const double* forward = times.row(kForward, i);
            double* backward = times.row(kBackward, i);
            double* weight = times.row(kWeight, i);
            // F from `waiting` on wait for W of this microbatch or a later one, before `freeing`.
            const int waiting = std::min(n, m + caps[i]), freeing = m + n - waiting;
            const double freed = waiting < n ? forward[waiting] : 0.0;
            const double rest = costs.after[costs.rank_of[i]];
            const double forwards = work.sum(kForward, i, waiting, n);
            weight[m] = std::max(
                w + std::max(weight[m + 1], freed),
                work.sum(kWeight, i, m, n) + forwards + work.sum(kBackward, i, waiting, n) + rest);
            const double above = i ? up[i] = compute_tail_by_message(
                                         costs, i - 1, times.row(kBackward, i - 1)[m], up[i])
                                   : 0.0;
            const double after = b + std::max({weight[m], backward[m + 1], above});
            const double last = m < n - 1 ? backward[n - 1] - work.of(kBackward, i, n - 1) : 0.0;
            const double backwards = work.sum(kBackward, i, m, n);
            backward[m] =
                std::max({after, backwards + work.sum(kWeight, i, m, n) + forwards + rest,
                          backwards + forwards + work.sum(kWeight, i, m, freeing) + last});
        }
        for (int i = stages - 1; i >= 0; --i) {
            const double f = work.of(kForward, i, m);
            double* forward = times.row(kForward, i);
            const double* backward = times.row(kBackward, i);
            const int freeing = m + n - std::min(n, m + caps[i]);
            const double below = i < stages - 1
                                     ? down[i] = compute_tail_by_message(
                                           costs, i, times.row(kForward, i + 1)[m], down[i])
                                     : 0.0;
            const double after = f + std::max({forward[m + 1], backward[m], below});
            // Ops of this stage from here on: all; up to the last B; up to the last F.
            const double last_backward = backward[n - 1] - work.of(kBackward, i, n - 1);
            const double last_forward =
                m < n - 1 ? forward[n - 1] - work.of(kForward, i, n - 1) : 0.0;
            const double forwards = work.sum(kForward, i, m, n);
            const double backwards = work.sum(kBackward, i, m, n);
            const double weights = work.sum(kWeight, i, m, freeing);
            forward[m] = std::max(
                {after,
                 forwards + backwards + work.sum(kWeight, i, m, n) + costs.after[costs.rank_of[i]],
                 forwards + backwards + weights + last_backward,
                 forwards + work.sum(kBackward, i, m, freeing) + weights + last_forward});
        }
    }
    return times;
}

double compute_machine_bound(const Costs& costs, const Times& head, const Times& tail) {
    double best = 0.0;
    std::vector<Job> jobs;
    for (const auto& mine : costs.stages_of) {
        jobs.clear();
        for (const int i : mine)
            for (int kind = 0; kind < kKinds; ++kind) {
                const double *start = head.row(kind, i), *from = tail.row(kind, i);
                for (int m = 0; m < costs.microbatches; ++m) {
                    const double took = costs.time(kind, i, m);
                    jobs.push_back({start[m], from[m] - took, took});
                }
            }
        best = std::max(best, schedule_one_machine(jobs));
    }
    return best;
}

double compute_any_order_bound(const Costs& costs, const std::vector<int>& caps) {
    const int n = costs.microbatches;
    const WorkTimes work(costs, true);
    const Times head = compute_heads(costs, caps, true), tail = compute_tails(costs, caps, true);
    double best = find_longest_chain(costs);
    std::vector<double> heads, afters;
    for (const auto& mine : costs.stages_of) {
        // The ops of a rank that start no earlier than some time and end no later before the end
        // than another one run between both. Which microbatches they are of is open.
        heads.clear();
        afters.clear();
        for (const int i : mine)
            for (int kind = 0; kind < kKinds; ++kind)
                for (int m = 0; m < n; ++m) {
                    heads.push_back(head.row(kind, i)[m]);
                    afters.push_back(tail.row(kind, i)[m] - work.of(kind, i, m));
                }
        thin_out(heads);
        thin_out(afters);
        for (const double from : heads)
            for (const double after : afters) {
                double sum = 0.0;
                bool any = false;
                for (const int i : mine)
                    for (int kind = 0; kind < kKinds; ++kind) {
                        // Heads grow with the place of the microbatch, tails shrink.
                        const double* starts = head.row(kind, i);
                        const double* tails = tail.row(kind, i);
                        const double least = after + work.of(kind, i, 0);
                        const auto first = std::lower_bound(starts, starts + n, from) - starts;
                        const auto last =
                            std::partition_point(tails, tails + n,
                                                 [&](double each) { return each >= least; }) -
                            tails;
                        if (first >= last) continue;
                        any = true;
                        sum += work.sum(kind, i, static_cast<int>(first), static_cast<int>(last));
                    }
                if (any) best = std::max(best, from + sum + after);
            }
    }
    return best;
}

}  // namespace pipemorph::planner
