#include "planner/evaluate.hpp"

#include <algorithm>
#include <queue>

namespace pipemorph::planner {

Executor::Executor(const Costs& costs)
    : costs_(costs),
      arrivals_(costs.stages, costs.microbatches),
      start_(at(costs.stages, 0)),
      free_(start_.size()),
      now_(costs.stages),
      microbatch_(start_.size()),
      queued_(costs.stages) {
    for (auto& positions : position_)
        positions.resize(static_cast<size_t>(costs.stages) * costs.microbatches);
    for (auto& done : done_) done.resize(costs.stages);
}

double Executor::run(const Order& order, const std::vector<double>& delay) {
    return costs_.shares_queues() ? run_in_time(order, delay) : run(order, delay, nullptr, kNever);
}

// A stage runs on as long as its next message's arrival is known and then makes room for its
// neighbours; arrivals follow from the sender alone, so the visiting order is free.
double Executor::run(const Order& order, const std::vector<double>& delay, const Times* tail,
                     double limit) {
    const int n = costs_.microbatches, stages = costs_.stages, last = stages - 1;
    ops_run_ = 0;
    for (const int kind : {kForward, kBackward})
        std::fill(arrivals_.of[kind].begin(), arrivals_.of[kind].end(), kNever);
    std::fill(arrivals_.row(kForward, 0), arrivals_.row(kForward, 0) + n, 0.0);
    for (auto& done : done_) std::fill(done.begin(), done.end(), 0);
    std::fill(now_.begin(), now_.end(), 0.0);
    std::fill(queued_.begin(), queued_.end(), true);
    todo_.clear();
    for (int i = last; i >= 0; --i) todo_.push_back(i);
    while (!todo_.empty()) {
        const int i = todo_.back();
        todo_.pop_back();
        queued_[i] = false;
        const auto& kinds = order[i];
        double now = now_[i];
        bool sent_down = false, sent_up = false;
        const int begin = done_[kForward][i] + done_[kBackward][i] + done_[kWeight][i];
        for (int position = begin; position < kKinds * n; ++position) {
            const int kind = kinds[position];
            const int m = done_[kind][i];
            if (kind != kWeight) {
                const double arrival = arrivals_.row(kind, i)[m];
                if (arrival == kNever) break;
                if (arrival > now) now = arrival;
            }
            if (tail && now + tail->row(kind, i)[m] >= limit) return kNever;
            ++ops_run_;
            ++done_[kind][i];
            const size_t op = at(i, position);
            start_[op] = now;
            microbatch_[op] = m;
            position_[kind][static_cast<size_t>(i) * n + m] = position;
            now += costs_.took[kind][i];
            if (kind == kForward && i == last) {
                arrivals_.row(kBackward, i)[m] = now;
            } else if (kind == kForward) {
                now = send(costs_, delay, i, arrivals_.row(kForward, i + 1), m, now);
                sent_down = true;
            } else if (kind == kBackward && i > 0) {
                now = send(costs_, delay, i - 1, arrivals_.row(kBackward, i - 1), m, now);
                sent_up = true;
            }
            free_[op] = now;
        }
        now_[i] = now;
        if (sent_up && !queued_[i - 1]) {
            queued_[i - 1] = true;
            todo_.push_back(i - 1);
        }
        if (sent_down && !queued_[i + 1]) {
            queued_[i + 1] = true;
            todo_.push_back(i + 1);
        }
    }
    double makespan = 0.0;
    for (int i = 0; i < stages; ++i) {
        if (done_[kWeight][i] < n) return kNever;
        makespan = std::max(makespan, now_[i]);
    }
    return makespan;
}

// Where both directions of a link share its queues, who goes first depends on when each side
// sends, so this advances in order of time. See half_duplex.py.
double Executor::run_in_time(const Order& order, const std::vector<double>& delay) {
    enum Phase { kFinish, kStart };
    struct Event {
        double at;
        int phase, stage;
        bool operator>(const Event& other) const {
            if (at != other.at) return at > other.at;
            return phase != other.phase ? phase > other.phase : stage > other.stage;
        }
    };
    const int n = costs_.microbatches, stages = costs_.stages, last = stages - 1;
    for (const int kind : {kForward, kBackward})
        std::fill(arrivals_.of[kind].begin(), arrivals_.of[kind].end(), kNever);
    std::fill(arrivals_.row(kForward, 0), arrivals_.row(kForward, 0) + n, 0.0);
    std::vector<std::vector<double>> shared(costs_.delay.size());
    std::vector<int> position(stages, 0);
    std::vector<bool> running(stages, false);
    for (auto& done : done_) std::fill(done.begin(), done.end(), 0);
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
    for (int i = 0; i < stages; ++i) events.push({0.0, kStart, i});
    double makespan = 0.0;
    const auto clear = [&](int link, const double* arrivals, int m) {
        const int bound = costs_.outstanding[link];
        return bound && m >= bound ? arrivals[m - bound] : 0.0;
    };
    const auto enter = [&](int link, double* arrivals, int m, double now) {
        const int queues = costs_.queues[link];
        double busy = now;
        if (costs_.half_duplex[link]) {
            auto& history = shared[link];
            if (queues && static_cast<int>(history.size()) >= queues)
                busy = history[history.size() - queues];
            history.push_back(std::max(now, busy) + delay[link]);
        } else if (queues && m >= queues) {
            busy = arrivals[m - queues];
        }
        return arrivals[m] = std::max(now, busy) + delay[link];
    };
    while (!events.empty()) {
        const auto [now, phase, i] = events.top();
        events.pop();
        if (phase == kFinish) {
            const int kind = order[i][position[i] - 1], m = done_[kind][i] - 1;
            if (kind == kForward && i == last) {
                arrivals_.row(kBackward, i)[m] = now;
            } else if (kind != kWeight && (kind == kForward || i > 0)) {
                const int to = kind == kForward ? i + 1 : i - 1, link = std::min(i, to);
                double* arrivals = arrivals_.row(kind, to);
                if (const double free = clear(link, arrivals, m); free > now) {
                    events.push({free, kFinish, i});
                    continue;
                }
                events.push({enter(link, arrivals, m, now), kStart, to});
            }
            running[i] = false;
        }
        if (running[i] || position[i] == kKinds * n) continue;
        const int kind = order[i][position[i]], m = done_[kind][i];
        const double ready = kind == kWeight ? 0.0 : arrivals_.row(kind, i)[m];
        if (ready > now) continue;  // its arrival is an event of its own
        ++position[i];
        ++done_[kind][i];
        running[i] = true;
        const double end = now + costs_.took[kind][i];
        if (position[i] == kKinds * n) makespan = std::max(makespan, end);
        events.push({end, kFinish, i});
    }
    for (int i = 0; i < stages; ++i)
        if (position[i] < kKinds * n) return kNever;
    return makespan;
}

}  // namespace pipemorph::planner
