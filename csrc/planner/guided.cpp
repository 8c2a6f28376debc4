#include "planner/guided.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace pipemorph::planner {

GuidedExecutor::GuidedExecutor(const Costs& costs, const DispatchGuide& guide)
    : guide_(guide),
      core_(costs),
      stages_(costs.stages),
      ranks_(costs.stages_of.size()),
      ran_(costs.stages_of.size()) {
    std::vector<std::array<int, kKinds>> done(costs.stages);
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
        for (const unsigned char code : guide.order[rank]) {
            const int of = costs.stages_of[rank][code >> 2], kind = code & 3;
            const int counted = kind == kFused ? int{kBackward} : kind;
            Stage& stage = stages_[of];
            auto& ops = ranks_[rank].ops;
            if (counted == kBackward) stage.backward.push_back(kind);
            stage.position[counted].push_back(static_cast<int>(ops.size()));
            // The W of a fused backward has a position, too: positions are by microbatch.
            if (kind == kFused) {
                stage.position[kWeight].push_back(static_cast<int>(ops.size()));
                ++done[of][kWeight];
            }
            ops.push_back({of, kind, done[of][counted]++});
        }
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        ranks_[rank].waits.resize(ranks_[rank].ops.size());
        for (const int position : guide.waits[rank]) ranks_[rank].waits[position] = true;
    }
}

void GuidedExecutor::run(DelayAt delay_at, DelayAt transfer_at) {
    for (Rank& rank : ranks_) rank.next = 0;
    for (size_t rank = 0; rank < ran_.size(); ++rank) {
        const size_t ops = ranks_[rank].ops.size();
        ran_[rank].codes.clear();
        ran_[rank].codes.reserve(ops);
        for (auto* times : {&ran_[rank].start, &ran_[rank].end, &ran_[rank].free}) {
            times->clear();
            times->reserve(ops);
        }
    }
    core_.set_delay_at(std::move(delay_at), std::move(transfer_at));
    if (core_.knows_arrivals())
        core_.run_event_driven<true>(*this);
    else
        core_.run_event_driven<false>(*this);
}

Choice GuidedExecutor::choose(const EventCore& core, int rank, double now) {
    Rank& its = ranks_[rank];
    const int size = static_cast<int>(its.ops.size());
    const auto has_run = [&](const Op& op) { return core.done(op.kind, op.stage) > op.microbatch; };
    while (its.next < size && has_run(its.ops[its.next])) ++its.next;
    if (its.next == size) return {};
    const Op& turn = its.ops[its.next];
    // If the device has no room for it, a W has to run first.
    const bool waits = its.waits[its.next] && core.fits(turn.stage, turn.kind, turn.microbatch);

    int first = std::numeric_limits<int>::max();
    Op found{};
    double until = kNever;
    const auto consider = [&](int stage, int kind, int microbatch, bool may_go_first) {
        const int position = stages_[stage].position[kind == kFused ? kBackward : kind][microbatch];
        const bool in_turn = position == its.next;
        if (!in_turn && (waits || !may_go_first)) return;
        if (kind != kWeight && !core.fits(stage, kind, microbatch)) return;
        double at = kind == kWeight ? 0.0 : core.arrival(kind, stage, microbatch);
        // An F waits for a free send before it starts, so that another op may run first.
        if (kind == kForward && at < kNever && !(in_turn && waits))
            at = std::max(at, core.clear({stage, kForward, microbatch}));
        if (at > now) {
            until = std::min(until, at);
        } else if (position < first) {
            first = position;
            found = {stage, kind, microbatch};
        }
    };
    const int n = core.costs().microbatches;
    for (const int stage : core.costs().stages_of[rank]) {
        const int f = core.done(kForward, stage), b = core.done(kBackward, stage),
                  w = core.done(kWeight, stage);
        if (f < n) consider(stage, kForward, f, f - w < guide_.caps[stage]);
        if (b < f) {
            const int backward = stages_[stage].backward[b];
            if (backward == kBackward || w == b) consider(stage, backward, b, true);
        }
        if (w < b) consider(stage, kWeight, w, true);
    }
    if (first < std::numeric_limits<int>::max()) return {true, found};
    return {false, {}, until};
}

namespace {

// Draw from 0 to 1, equal on every machine.
double draw_jitter(double sent, double most, int link, int draw) {
    const auto moment = static_cast<std::uint64_t>(std::min(sent / most * 1e6, 9e18));
    auto mixed = static_cast<std::uint32_t>(
        moment * 0x9E3779B1u + link * std::uint64_t{0x85EBCA6B} + draw * std::uint64_t{0xC2B2AE35});
    mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6Du;
    mixed = (mixed ^ mixed >> 12) * 0x297A2D39u;
    return (mixed ^ mixed >> 15) / 4294967296.0;
}

}  // namespace

double GuidedExecutor::makespan() const {
    double found = 0.0;
    for (size_t rank = 0; rank < ran_.size(); ++rank) {
        const auto& ends = ran_[rank].end;
        if (ends.size() < guide_.order[rank].size()) return std::numeric_limits<double>::infinity();
        if (!ends.empty()) found = std::max(found, ends.back() + core_.costs().after[rank]);
    }
    return found;
}

std::vector<std::vector<int>> find_planned_waits(const Costs& costs, const Order& order,
                                                 const std::vector<int>& peaks) {
    OrderExecutor ran(costs);
    ran.run(order);
    const EventCore& core = ran.core();
    const int n = costs.microbatches;
    std::vector<std::vector<int>> found(order.size());
    for (size_t rank = 0; rank < order.size(); ++rank) {
        const std::vector<int>& mine = costs.stages_of[rank];
        std::vector<std::vector<int>> backwards(mine.size());  // the kind of each
        for (const unsigned char code : order[rank])
            if (const int kind = code & 3; kind == kBackward || kind == kFused)
                backwards[code >> 2].push_back(kind);
        std::vector<std::array<int, kKinds>> done(mine.size());
        double idle_since = 0.0;
        for (int position = 0; position < ran.ran(rank); ++position) {
            const size_t its = order[rank][position] >> 2;
            const int kind = order[rank][position] & 3, stage = mine[its];
            const int forwards = done[its][kForward];
            const double start = ran.start(rank, position);
            const int sends =
                kind == kForward && stage < costs.stages - 1 ? costs.outstanding[stage] : 0;
            const double taken = sends && forwards >= sends
                                     ? core.arrival(kForward, stage + 1, forwards - sends)
                                     : 0.0;
            if (start > idle_since || taken > start) {
                double other = kNever;
                for (size_t place = 0; place < mine.size(); ++place) {
                    const auto [f, b, w] = done[place];
                    const int here = place == its ? kind : -1;
                    if (here != kForward && f < n && f - w < peaks[mine[place]])
                        other = std::min(other, core.arrival(kForward, mine[place], f));
                    const bool splits = b < f && (backwards[place][b] == kBackward || w == b);
                    if (here != kBackward && here != kFused && splits)
                        other = std::min(other, core.arrival(kBackward, mine[place], b));
                    if (here != kWeight && w < b) other = idle_since;
                }
                if (std::max(other, idle_since) < start || taken > start)
                    found[rank].push_back(position);
            }
            idle_since = ran.free(rank, position);
            done[its][kForward] += kind == kForward;
            done[its][kBackward] += kind == kBackward || kind == kFused;
            done[its][kWeight] += kind == kWeight || kind == kFused;
        }
    }
    return found;
}

std::array<double, 2> compute_jittered_makespans(const Costs& costs, const DispatchGuide& guide,
                                                 double most, int draws) {
    OrderExecutor in_order(costs);
    GuidedExecutor guided(costs, guide);
    std::array<double, 2> sum{};
    for (int draw = 0; draw < draws; ++draw) {
        const DelayAt delay_at = [&](int link, double sent) {
            return costs.delay[link] + most * draw_jitter(sent, most, link, draw);
        };
        sum[0] += in_order.run(guide.order, delay_at);
        guided.run(delay_at);
        sum[1] += guided.makespan();
    }
    for (double& each : sum) each /= draws;
    return sum;
}

}  // namespace pipemorph::planner
