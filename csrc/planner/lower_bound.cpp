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

Times compute_heads(const Costs& costs, const std::vector<int>& caps) {
    const int n = costs.microbatches, stages = costs.stages;
    Times times(stages, n), arrivals(stages, n);
    for (int m = 0; m < n; ++m) {
        for (int i = 0; i < stages; ++i) {
            const double f = costs.took[kForward][i], b = costs.took[kBackward][i],
                         w = costs.took[kWeight][i];
            double* forward = times.row(kForward, i);
            double start = m ? forward[m - 1] + f : 0.0;
            if (i) {
                double* above = arrivals.row(kForward, i);
                const double sent = times.row(kForward, i - 1)[m] + costs.took[kForward][i - 1];
                above[m] = arrival(costs, i - 1, above, m, sent);
                start = std::max(start, above[m]);
            }
            if (m >= caps[i]) start = std::max(start, times.row(kWeight, i)[m - caps[i]] + w);
            // Earlier ops of this stage: m F, and B and W of all microbatches above the cap.
            const int over = std::max(0, m - caps[i] + 1);
            forward[m] = std::max(start, forward[0] + m * f + over * (b + w));
        }
        for (int i = stages - 1; i >= 0; --i) {
            const double f = costs.took[kForward][i], b = costs.took[kBackward][i],
                         w = costs.took[kWeight][i];
            const double* forward = times.row(kForward, i);
            double* backward = times.row(kBackward, i);
            double* weight = times.row(kWeight, i);
            double start = forward[m] + f;
            if (i < stages - 1) {
                double* below = arrivals.row(kBackward, i);
                const double sent = times.row(kBackward, i + 1)[m] + costs.took[kBackward][i + 1];
                below[m] = arrival(costs, i, below, m, sent);
                start = std::max(start, below[m]);
            }
            if (m) start = std::max(start, backward[m - 1] + b);
            const int over = std::max(0, m - caps[i] + 1);
            start = std::max(start, forward[0] + (m + 1) * f + m * b + over * w);
            backward[m] = start;
            weight[m] = std::max(start + b, m ? weight[m - 1] + w : 0.0);
        }
    }
    return times;
}

Times compute_tails(const Costs& costs, const std::vector<int>& caps) {
    const int n = costs.microbatches, stages = costs.stages;
    Times times(stages, n + 1);
    for (int i = 0; i < stages; ++i) times.row(kWeight, i)[n] = costs.after[costs.rank_of[i]];
    std::vector<double> down(stages), up(stages);  // by way of the messages of microbatch m + 1
    for (int m = n - 1; m >= 0; --m) {
        const int more = n - m;
        for (int i = 0; i < stages; ++i) {
            const double f = costs.took[kForward][i], b = costs.took[kBackward][i],
                         w = costs.took[kWeight][i];
            const double* forward = times.row(kForward, i);
            double* backward = times.row(kBackward, i);
            double* weight = times.row(kWeight, i);
            // Number of F that wait for W of this microbatch or a later one.
            const int held = std::max(0, more - caps[i]);
            const double freed = held ? forward[m + caps[i]] : 0.0;
            const double rest = costs.after[costs.rank_of[i]];
            weight[m] =
                std::max(w + std::max(weight[m + 1], freed), more * w + held * (f + b) + rest);
            const double above = i ? up[i] = compute_tail_by_message(
                                         costs, i - 1, times.row(kBackward, i - 1)[m], up[i])
                                   : 0.0;
            const double after = b + std::max({weight[m], backward[m + 1], above});
            const double last = m < n - 1 ? backward[n - 1] - b : 0.0;
            backward[m] = std::max(
                {after, more * (b + w) + held * f + rest, more * b + held * (f + w) + last});
        }
        for (int i = stages - 1; i >= 0; --i) {
            const double f = costs.took[kForward][i], b = costs.took[kBackward][i],
                         w = costs.took[kWeight][i];
            double* forward = times.row(kForward, i);
            const double* backward = times.row(kBackward, i);
            const int held = std::max(0, more - caps[i]);
            const double below = i < stages - 1
                                     ? down[i] = compute_tail_by_message(
                                           costs, i, times.row(kForward, i + 1)[m], down[i])
                                     : 0.0;
            const double after = f + std::max({forward[m + 1], backward[m], below});
            // Ops of this stage from here on: all; up to the last B; up to the last F.
            const double last_backward = backward[n - 1] - b;
            const double last_forward = m < n - 1 ? forward[n - 1] - f : 0.0;
            forward[m] = std::max({after, more * (f + b + w) + costs.after[costs.rank_of[i]],
                                   more * (f + b) + held * w + last_backward,
                                   more * f + held * (b + w) + last_forward});
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
                const double took = costs.took[kind][i];
                const double *start = head.row(kind, i), *from = tail.row(kind, i);
                for (int m = 0; m < costs.microbatches; ++m)
                    jobs.push_back({start[m], from[m] - took, took});
            }
        best = std::max(best, schedule_one_machine(jobs));
    }
    return best;
}

}  // namespace pipemorph::planner
