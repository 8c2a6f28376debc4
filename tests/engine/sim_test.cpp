// 100,000 schedules of sim_world, with faults at random and at every step. PIPEMORPH_SIM_SCHEDULES
// asks for another number, as the builds with sanitizers do; PIPEMORPH_SIM_SEED replays one and
// says what happened in it.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "check.hpp"
#include "sim_world.hpp"

using namespace sim;

namespace {

constexpr unsigned kThreads = 2;

uint64_t wanted(uint64_t normally) {
    const char* given = std::getenv("PIPEMORPH_SIM_SCHEDULES");
    return given == nullptr ? normally : std::strtoull(given, nullptr, 10);
}

Options random_schedule(uint64_t seed) {
    Options o;
    o.seed = seed;
    o.random_faults = static_cast<int>(seed % 9);
    return o;
}

struct Outcome {
    Tally tally;
    std::string violation;  // of the first schedule that has one
};

// Several threads, each with schedules of its own: the protocol's classes share nothing.
Outcome play_random(uint64_t schedules) {
    std::mutex mu;
    Outcome outcome;
    std::atomic<uint64_t> end{schedules};
    const auto work = [&](uint64_t first) {
        Tally tally;
        for (uint64_t seed = first; seed < end; seed += kThreads) {
            const std::string why = play(random_schedule(seed), tally);
            if (why.empty()) continue;
            const std::lock_guard lock(mu);
            // The other thread may have found one meanwhile, and goes on to here.
            if (seed >= end) break;
            end = seed;
            outcome.violation = "schedule " + std::to_string(seed) + ": " + why;
        }
        const std::lock_guard lock(mu);
        outcome.tally += tally;
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    for (std::thread& t : threads) t.join();
    return outcome;
}

void print(const Tally& t) {
    std::printf(
        "        %llu schedules, %llu steps, %llu messages (%llu leases), "
        "%llu "
        "times larger slots; lost: %llu "
        "paths (%llu replaced), %llu control connections (%llu resumed), %llu half dials; %llu "
        "fallbacks, %llu failbacks, %llu segments mapped; chunks: %llu resent, "
        "%llu duplicate, %llu stale, %llu dropped, %llu damaged; %llu messages late, %llu slots "
        "added, %llu times a full window; writes after their sender gave "
        "up: %llu landed in time, %llu stopped by the fence\n",
        (unsigned long long)t.schedules, (unsigned long long)t.steps,
        (unsigned long long)t.messages, (unsigned long long)t.leases, (unsigned long long)t.grown,
        (unsigned long long)t.paths_lost, (unsigned long long)t.replaced,
        (unsigned long long)t.controls_lost, (unsigned long long)t.resumes,
        (unsigned long long)t.half_dials, (unsigned long long)t.fallbacks,
        (unsigned long long)t.failbacks, (unsigned long long)t.segments,
        (unsigned long long)t.chunks_resent, (unsigned long long)t.duplicates,
        (unsigned long long)t.stale, (unsigned long long)t.dropped, (unsigned long long)t.damaged,
        (unsigned long long)t.late, (unsigned long long)t.slots_added,
        (unsigned long long)t.full_windows, (unsigned long long)t.late_writes,
        (unsigned long long)t.fenced_writes);
}

[[noreturn]] void report(const std::string& violation) {
    check::fail(__FILE__, __LINE__, violation + " (PIPEMORPH_SIM_SEED=N replays a schedule)");
}

}  // namespace

TEST(sim_random_faults_deliver_every_message_once) {
    if (const char* seed = std::getenv("PIPEMORPH_SIM_SEED")) {
        Tally tally;
        Options o = random_schedule(std::strtoull(seed, nullptr, 10));
        o.trace = true;
        if (const std::string why = play(o, tally); !why.empty()) report(why);
        return;
    }
    const uint64_t schedules = wanted(100'000);
    const Outcome outcome = play_random(schedules);
    print(outcome.tally);
    if (!outcome.violation.empty()) report(outcome.violation);
    // All of it happened, and often.
    const Tally& t = outcome.tally;
    CHECK(t.schedules == schedules);
    for (const uint64_t count :
         {t.paths_lost, t.half_dials, t.controls_lost, t.resumes, t.chunks_resent, t.duplicates,
          t.dropped, t.damaged, t.late_writes, t.fenced_writes, t.grown, t.leases, t.late,
          t.full_windows, t.fallbacks, t.failbacks, t.segments, t.replaced})
        CHECK(count > schedules / 100);
    // A slot is seldom granted again while an earlier message's chunk is still on its way: a few
    // hundred schedules may have none.
    if (schedules >= 4000)
        for (const uint64_t count : {t.slots_added, t.stale}) CHECK(count > schedules / 1000);
    for (const uint64_t count : t.faults) CHECK(count > schedules / 100);
}

// Each schedule has a fault that does not pass: the link ends with a reason, or gets all through.
TEST(sim_faults_that_persist_end_the_link_in_time) {
    const char* replayed = std::getenv("PIPEMORPH_SIM_SEED");
    const uint64_t first = replayed == nullptr ? 0 : std::strtoull(replayed, nullptr, 10);
    const uint64_t schedules = replayed == nullptr ? wanted(100'000) / 10 : 1;

    for (int fault = 0; fault < kPersistent; ++fault) {
        Tally tally;
        for (uint64_t seed = first; seed < first + schedules; ++seed) {
            Options o = random_schedule(seed);
            o.trace = replayed != nullptr;
            o.random_faults /= 2;
            o.persistent = static_cast<Persistent>(fault);
            if (const std::string why = play(o, tally); !why.empty())
                report("schedule " + std::to_string(seed) + " with persistent fault " +
                       std::to_string(fault) + ": " + why);
        }
        std::printf(
            "        fault %d: %llu links ended, %llu delivered all; %.1f patiences at most\n",
            fault, (unsigned long long)tally.dead, (unsigned long long)tally.over_in_time,
            static_cast<double>(tally.longest_to_die) / 100);
        CHECK(replayed != nullptr || tally.dead > schedules / 10);
    }
}

// The same schedule again and again, each time with one fault one step later.
TEST(sim_each_fault_at_every_step) {
    Tally tally;
    const bool whole = wanted(100'000) >= 100'000;
    const uint64_t seeds = whole ? 4 : 1;
    // Where the rules are not what is tested, as under a sanitizer: at some of the steps.
    const uint64_t stride = whole ? 1 : 8;
    for (uint64_t seed = 0; seed < seeds; ++seed) {
        Options o;
        o.seed = seed * 7919 + 3;
        uint64_t steps = 0;
        CHECK(play(o, tally, &steps).empty());
        for (uint64_t step = 0; step < steps; step += stride) {
            for (int fault = 0; fault < kFaults; ++fault) {
                o.planned = {step, static_cast<Fault>(fault)};
                if (const std::string why = play(o, tally); !why.empty())
                    report("seed " + std::to_string(o.seed) + ", fault " + std::to_string(fault) +
                           " at step " + std::to_string(step) + ": " + why);
            }
        }
    }
    print(tally);
    CHECK(tally.schedules > seeds * 1000);
}
