// The planner's event core and search, here for the sanitizers: what times they give is compared
// with the reference in Python (tests/core/planning).
#include "check.hpp"
#include "planner/guided.hpp"
#include "planner/in_order.hpp"
#include "planner/lower_bound.hpp"
#include "planner/microbatch_order.hpp"
#include "planner/online.hpp"
#include "planner/rng.hpp"
#include "planner/search.hpp"
#include "planner/windows.hpp"

using namespace pipemorph::planner;

namespace {

void draw_factors(Rng& rng, Costs& costs) {
    std::vector<std::vector<double>> rows(costs.stages);
    for (auto& row : rows)
        for (int m = 0; m < costs.microbatches; ++m) row.push_back(rng.draw_below(8) / 2.0);
    costs.set_factors(rows);
}

Costs random_costs(Rng& rng, bool split, bool several) {
    Costs costs;
    const int n = costs.microbatches = 1 + rng.draw_below(8);
    costs.stages = 1 + rng.draw_below(5);
    for (int i = 0; i < costs.stages; ++i) {
        for (auto& took : costs.took) took.push_back(rng.draw_below(8) / 2.0);
        costs.caps.push_back(rng.draw_below(2) ? n : 1 + rng.draw_below(n));
        costs.leaving.push_back(split ? 0.0 : rng.draw_below(3));
        costs.returning.push_back(split ? 0.0 : rng.draw_below(3));
        costs.device_limits.push_back(split ? 0 : rng.draw_below(n + 1));
        costs.sizes.push_back(1 + rng.draw_below(3));
        if (!i) continue;
        costs.delay.push_back(rng.draw_below(10));
        costs.transfer.push_back(rng.draw_below(3));
        costs.queues.push_back(rng.draw_below(4));
        costs.outstanding.push_back(rng.draw_below(3));
        costs.half_duplex.push_back(costs.queues.back() && rng.draw_below(3) == 0);
    }
    // All stages on two ranks, or each on its own.
    std::vector<std::vector<int>> stages_of(costs.stages);
    for (int i = 0; i < costs.stages; ++i) stages_of[i] = {i};
    if (several && rng.draw_below(2) && costs.stages > 1) {
        stages_of.assign(2, {});
        for (int i = 0; i < costs.stages; ++i) stages_of[i % 2].push_back(i);
    }
    costs.place(std::move(stages_of));
    if (split && several && rng.draw_below(2)) {
        costs.memory = rng.draw_below(6);
        for (const double size : costs.sizes) costs.memory += size;
    }
    for (int rank = 0; rank < costs.ranks(); ++rank) {
        costs.after.push_back(rng.draw_below(3));
        // The search knows no such thing.
        if (!split) costs.before.push_back(rng.draw_below(3) ? 0.0 : rng.draw_below(30));
    }
    if (rng.draw_below(2)) draw_factors(rng, costs);
    return costs;
}

// Ops of one stage in any order that the stage allows; it may wait for others for ever.
std::vector<unsigned char> random_ops(Rng& rng, int n, bool fused) {
    std::vector<unsigned char> ops;
    for (int f = 0, b = 0, w = 0; w < n;) {
        const int kind = rng.draw_below(kKinds);
        if (kind == kForward && f < n) {
            ++f;
        } else if (kind == kBackward && b < f) {
            ++b;
            w += fused;
        } else if (kind == kWeight && w < b) {
            ++w;
        } else {
            continue;
        }
        const int code = fused && kind == kBackward ? int{kFused} : kind;
        ops.push_back(static_cast<unsigned char>(code));
    }
    return ops;
}

// The stages of a rank one after the other.
Order random_order(Rng& rng, const Costs& costs) {
    Order order;
    for (const auto& stages : costs.stages_of) {
        auto& row = order.emplace_back();
        for (size_t place = 0; place < stages.size(); ++place)
            for (const int code : random_ops(rng, costs.microbatches, rng.draw_below(3) == 0))
                row.push_back(static_cast<unsigned char>(4 * place + code));
    }
    return order;
}

}  // namespace

TEST(planner_both_ways_to_execute_an_order_agree) {
    Rng rng;
    int finished = 0;
    for (int round = 0; round < 400; ++round) {
        Costs costs = random_costs(rng, false, true);
        for (size_t link = 0; link < costs.delay.size(); ++link) costs.half_duplex[link] = false;
        const Order order = random_order(rng, costs);
        OrderExecutor known(costs), in_time(costs);
        const double makespan = known.run(order);
        CHECK(in_time.run(order, [&](int link, double) { return costs.delay[link]; }) == makespan);
        for (int rank = 0; rank < known.core().ranks(); ++rank) {
            CHECK(known.ran(rank) == in_time.ran(rank));
            for (int position = 0; position < known.ran(rank); ++position) {
                CHECK(known.start(rank, position) == in_time.start(rank, position));
                CHECK(known.free(rank, position) == in_time.free(rank, position));
            }
        }
        finished += makespan < kNever;
    }
    CHECK(finished > 50 && finished < 400);
}

TEST(planner_online_dispatch_runs_every_op) {
    Rng rng;
    for (int round = 0; round < 400; ++round) {
        const Costs costs = random_costs(rng, false, true);
        DispatchRules rules;
        int most = costs.microbatches;
        for (int i = 0; i < costs.stages; ++i) {
            most = 1 + rng.draw_below(std::min(most, costs.caps[i]));
            rules.warmup.push_back(most);
            rules.fused.push_back(rng.draw_below(3) == 0);
        }
        rules.caps = costs.caps;
        rules.exact_warmup = rng.draw_below(2);
        OnlineScheduler execution(costs, rules);
        execution.run();
        for (size_t rank = 0; rank < costs.stages_of.size(); ++rank) {
            size_t ops = 0;
            for (const int i : costs.stages_of[rank])
                ops += (rules.fused[i] ? 2 : kKinds) * costs.microbatches;
            CHECK(execution.ran()[rank].codes.size() == ops);
            CHECK(execution.ran()[rank].free.size() == ops);
        }
    }
}

TEST(planner_guided_dispatch_ends_if_its_order_does) {
    Rng rng;
    int ended = 0;
    for (int round = 0; round < 400; ++round) {
        Costs costs = random_costs(rng, false, true);
        // A random order may hold more on the device than it may.
        costs.device_limits.assign(costs.stages, 0);
        DispatchGuide guide;
        guide.order = random_order(rng, costs);
        for (const auto& ops : guide.order) {
            guide.waits.emplace_back();
            for (size_t at = 0; at < ops.size(); ++at)
                if (rng.draw_below(4) == 0) guide.waits.back().push_back(static_cast<int>(at));
        }
        guide.caps = costs.caps;
        OrderExecutor in_order(costs);
        if (in_order.run(guide.order) == kNever) continue;
        ++ended;
        GuidedExecutor execution(costs, guide);
        execution.run([&](int, double) { return rng.draw_below(40) / 2.0; });
        for (size_t rank = 0; rank < costs.stages_of.size(); ++rank) {
            CHECK(execution.ran()[rank].codes.size() == guide.order[rank].size());
            CHECK(execution.ran()[rank].free.size() == guide.order[rank].size());
        }
        CHECK(execution.makespan() < kNever);
        for (const double mean : compute_jittered_makespans(costs, guide, 5.0, 2))
            CHECK(mean < kNever);
    }
    CHECK(ended > 50 && ended < 400);
}

TEST(planner_search_finds_the_order_it_claims) {
    Rng rng;
    for (int round = 0; round < 150; ++round) {
        const Costs costs = random_costs(rng, true, true);
        std::vector<int> paper;
        for (int i = 0, most = costs.microbatches; i < costs.stages; ++i)
            paper.push_back(most = std::max(1, std::min({most, costs.caps[i], costs.stages - i})));
        const SearchResult found = search(costs, paper, {}, {2000, 2000});
        CHECK(found.order.size() == static_cast<size_t>(costs.ranks()));
        CHECK(OrderExecutor(costs).run(found.order) == found.makespan);
        for (int rank = 0; rank < costs.ranks(); ++rank) {
            double held = 0.0;
            for (const unsigned char code : found.order[rank]) {
                const double size = costs.sizes[costs.stages_of[rank][code >> 2]];
                held += (code & 3) == kForward ? size : (code & 3) == kWeight ? -size : 0.0;
                CHECK(held <= costs.memory);
            }
        }
        CHECK(found.bound <= found.makespan * (1 + kSame));
    }
}

TEST(planner_no_schedule_is_below_the_windows_bound) {
    Rng rng;
    int tighter = 0;
    for (int round = 0; round < 400; ++round) {
        const Costs costs = random_costs(rng, true, false);
        const std::vector<int> paper(costs.stages, 1);
        const double makespan = search(costs, paper, {}, {2000, 2000}).makespan;
        const Times head = compute_heads(costs, costs.caps),
                    tail = compute_tails(costs, costs.caps);
        const double quick = compute_machine_bound(costs, head, tail);
        const double bound = tighten_bound(costs, head, tail, quick, makespan * 1.2, 1'000'000);
        CHECK(bound >= quick && bound <= makespan * (1 + kSame));
        tighter += bound > quick * (1 + kSame);
    }
    CHECK(tighter > 10);
}

TEST(planner_order_of_microbatches_has_the_makespan_it_claims) {
    Rng rng;
    int shorter = 0;
    for (int round = 0; round < 300; ++round) {
        Costs costs = random_costs(rng, true, true);
        draw_factors(rng, costs);
        const std::vector<int> paper(costs.stages, 1);
        const SearchResult given = search(costs, paper, {}, {500, 0});
        DispatchGuide guide{given.order, {}, costs.caps};
        guide.waits.resize(given.order.size());
        const bool guided = rng.draw_below(2);
        const auto found = order_microbatches(costs, guide, guided, 0.0, 4000);
        Costs ordered = costs;
        for (int kind = 0; kind <= kKinds; ++kind)
            for (int i = 0; i < costs.stages; ++i) {
                const double* from = costs.times[kind].data();
                for (int m = 0; m < costs.microbatches; ++m)
                    ordered.times[kind][static_cast<size_t>(i) * costs.microbatches + m] =
                        from[static_cast<size_t>(i) * costs.microbatches + found.microbatches[m]];
            }
        GuidedExecutor by_guide(ordered, guide);
        by_guide.run();
        const double claimed =
            guided ? by_guide.makespan() : OrderExecutor(ordered).run(given.order);
        CHECK(claimed == found.makespan);
        CHECK(compute_any_order_bound(costs, costs.caps) <= found.makespan * (1 + kSame));
        CHECK(compute_any_order_bound(costs, costs.caps) <= given.makespan * (1 + kSame));
        shorter += found.makespan < given.makespan * (1 - kSame);
    }
    CHECK(shorter > 50);
}
