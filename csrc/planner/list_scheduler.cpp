#include "planner/list_scheduler.hpp"

#include <algorithm>

namespace pipemorph::planner {

Lister::Lister(const Costs& costs)
    : costs_(costs),
      order_(costs.stages),
      arrivals_(costs.stages, costs.microbatches),
      left_(costs.stages),
      idle_(costs.stages) {
    for (auto& row : order_) row.reserve(static_cast<size_t>(kKinds) * costs.microbatches);
    for (auto& done : done_) done.resize(costs.stages);
    while (leaves_ < costs.stages) leaves_ *= 2;
    wake_.resize(leaves_);
    winner_.resize(2 * static_cast<size_t>(leaves_));
    for (size_t link = 0; link < costs.delay.size(); ++link)
        queued_.push_back(costs.queues[link] || costs.outstanding[link]);
}

void Lister::set_wake(int stage, double at) {
    wake_[stage] = at;
    for (int node = (leaves_ + stage) / 2; node; node /= 2) {
        const int a = winner_[2 * node], b = winner_[2 * node + 1];
        winner_[node] = wake_[b] < wake_[a] ? b : a;
    }
}

double Lister::run(const Times& tail, const Tuning& tuning, double bound) {
    const int n = costs_.microbatches, stages = costs_.stages, last = stages - 1;
    const long all = static_cast<long>(kKinds) * n * stages;
    for (const int kind : {kForward, kBackward})
        std::fill(arrivals_.of[kind].begin(), arrivals_.of[kind].end(), kNever);
    std::fill(arrivals_.row(kForward, 0), arrivals_.row(kForward, 0) + n, 0.0);
    for (auto& done : done_) std::fill(done.begin(), done.end(), 0);
    for (auto& row : order_) row.clear();
    for (int i = 0; i < stages; ++i)
        left_[i] =
            n * (costs_.took[kForward][i] + costs_.took[kBackward][i] + costs_.took[kWeight][i]);
    std::fill(idle_.begin(), idle_.end(), false);
    std::fill(wake_.begin(), wake_.end(), kNever);
    std::fill(wake_.begin(), wake_.begin() + stages, 0.0);
    for (int i = 0; i < leaves_; ++i) winner_[leaves_ + i] = i;
    for (int node = leaves_ - 1; node; --node) winner_[node] = winner_[2 * node];
    ops_run_ = 0;
    double makespan = 0.0;
    const bool held = !tuning.warmup.empty();
    const double weigh = tuning.by_kind ? 0.0 : 1.0;
    while (true) {
        const int i = winner_[1];
        const double now = wake_[i];
        if (now == kNever) break;
        const int f = done_[kForward][i], b = done_[kBackward][i], w = done_[kWeight][i];
        const Bias& bias = tuning.biases[i];
        const double* tail_of[kKinds] = {tail.row(kForward, i), tail.row(kBackward, i),
                                         tail.row(kWeight, i)};
        double forward_at =
            f < n && f - w < tuning.caps[i] ? arrivals_.row(kForward, i)[f] : kNever;
        double backward_at = b < f ? arrivals_.row(kBackward, i)[b] : kNever;
        if (held) {
            if (f < tuning.warmup[i])
                backward_at = kNever;
            else if (b == 0 && !tuning.at_least)
                forward_at = kNever;
        }

        // The most urgent op that is ready; at a tie B, then F, then W.
        int kind = -1;
        double urgency = -kNever, took = 0.0, follows = 0.0;
        if (backward_at <= now) {
            kind = kBackward;
            took = costs_.took[kBackward][i];
            follows = tail_of[kBackward][b];
            urgency = weigh * follows + bias.of[kBackward];
        }
        if (forward_at <= now && weigh * tail_of[kForward][f] + bias.of[kForward] > urgency) {
            kind = kForward;
            took = costs_.took[kForward][i];
            follows = tail_of[kForward][f];
            urgency = weigh * follows + bias.of[kForward];
        }
        if (w < b && weigh * tail_of[kWeight][w] + bias.of[kWeight] > urgency) {
            kind = kWeight;
            took = costs_.took[kWeight][i];
            follows = tail_of[kWeight][w];
            urgency = weigh * follows + bias.of[kWeight];
        }

        double until = kNever;
        if (kind < 0) {
            until = forward_at < backward_at ? forward_at : backward_at;
        } else if (bias.patience != 0) {
            const double horizon = now + bias.patience * took;
            if (now < backward_at && backward_at < horizon &&
                weigh * tail_of[kBackward][b] + bias.of[kBackward] > urgency)
                until = backward_at;
            if (now < forward_at && forward_at < horizon && forward_at < until &&
                weigh * tail_of[kForward][f] + bias.of[kForward] > urgency)
                until = forward_at;
        }
        if (kind < 0 || until < kNever) {
            idle_[i] = true;
            set_wake(i, until);
            continue;
        }

        if (now + follows >= bound || now + left_[i] >= bound) return kNever;
        ++ops_run_;
        idle_[i] = false;
        left_[i] -= took;
        const double end = now + took;
        double free = end;
        makespan = std::max(makespan, end);
        order_[i].push_back(static_cast<unsigned char>(kind));
        const int m = done_[kind][i]++;
        int receiver = -1, link = 0;
        double* arrivals = nullptr;
        if (kind == kForward && i == last) {
            arrivals_.row(kBackward, i)[m] = end;
        } else if (kind == kForward) {
            link = i;
            receiver = i + 1;
            arrivals = arrivals_.row(kForward, receiver);
        } else if (kind == kBackward && i > 0) {
            link = receiver = i - 1;
            arrivals = arrivals_.row(kBackward, receiver);
        }
        if (receiver >= 0) {
            if (queued_[link])
                free = send(costs_, costs_.delay, link, arrivals, m, end);
            else
                arrivals[m] = end + costs_.delay[link];
            if (idle_[receiver] && arrivals[m] < wake_[receiver]) set_wake(receiver, arrivals[m]);
        }
        set_wake(i, free);
    }
    return ops_run_ < all ? kNever : makespan;
}

}  // namespace pipemorph::planner
