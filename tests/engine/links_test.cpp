// Two engines in one process. link_stress_test.cpp cuts their connections.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "check.hpp"
#include "two_engines.hpp"

using namespace pipemorph;

namespace {

template <typename T>
T median(std::vector<T> of) {
    std::sort(of.begin(), of.end());
    return of[of.size() / 2];
}

// How often the data threads of this process have gone to sleep.
uint64_t rests_of_data_threads() {
    uint64_t n = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::ifstream status(task.path() / "status");
        bool counts = false;
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("Name:")) counts = line.find("pm-data-") != std::string::npos;
            if (counts && line.starts_with("voluntary_ctxt_switches:"))
                n += std::stoull(line.substr(line.find(':') + 1));
        }
    }
    return n;
}

void pass_no_thread(Transport transport) {
    constexpr int64_t kMessages = 200;
    Two two(transport);
    two.accepted->reserve(0, 2, 4096);
    two.dialled->reserve(1, 2, 4096);
    uint64_t before = 0;
    std::thread answers([&] {
        for (int64_t i = -1; i < kMessages; ++i) {
            check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 4096);
            send(*two.accepted, {0, 0, i, 1, 0}, 4096);
        }
    });
    for (int64_t i = -1; i < kMessages; ++i) {
        if (i == 0) before = rests_of_data_threads();
        send(*two.dialled, {0, 0, i, 0, 0}, 4096);
        check_and_release(*two.dialled, receive(*two.dialled, {0, 0, i, 1, 0}), 4096);
    }
    answers.join();
    // Four of them for every pass there and back otherwise; some where an answer comes before
    // anybody waits for it.
    const uint64_t rests = rests_of_data_threads() - before;
    if (rests >= kMessages)
        check::fail(__FILE__, __LINE__,
                    std::to_string(rests) + " rests of data threads for " +
                        std::to_string(kMessages) + " messages and their answers");
}

}  // namespace

TEST(link_small_messages_pass_no_thread_of_the_engine_tcp) {
    pass_no_thread(Transport::tcp);
}

TEST(link_small_messages_pass_no_thread_of_the_engine_shm) {
    pass_no_thread(Transport::shm);
}

// The receiver is a while away with what it has received.
TEST(timed_link_acknowledges_although_the_receiver_does_not_come_back) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        two.accepted->reserve(0, 1, 4096);
        std::vector<int64_t> took;
        for (int64_t i = 0; i < 21; ++i) {
            auto received = std::async(std::launch::async,
                                       [&] { return receive(*two.accepted, {0, 0, i, 0, 0}); });
            const int64_t began = steady_ns();
            wait_sent(*two.dialled, send(*two.dialled, {0, 0, i, 0, 0}, 4096));
            const Arrived a = received.get();
            took.push_back(steady_ns() - began);
            check_and_release(*two.accepted, a, 4096);
            until("granted", [&] { return two.dialled->send_slots(0) == 1; });
        }
        // Without a request, it would go with the next echo: every 100 ms.
        CHECK(median(took) < 50 * kMillisecond);
    }
}

// Who reads keeps back what it has to say to the sender for half a millisecond, but not what the
// sender waits for to send what is read next.
TEST(timed_link_whose_sender_has_no_slot_left_is_granted_one_before_the_receiver_sleeps) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        two.accepted->reserve(0, 1, 4096);
        constexpr int64_t kMany = 400;
        for (int64_t i = 0; i < kMany; ++i) send(*two.dialled, {0, 0, i, 0, 0}, 4096);
        int64_t quick = 0;
        for (int64_t i = 0; i < kMany; ++i) {
            const int64_t began = steady_ns();
            const Arrived a = receive(*two.accepted, {0, 0, i, 0, 0});
            quick += steady_ns() - began < 400'000 ? 1 : 0;
            check_and_release(*two.accepted, a, 4096);
        }
        CHECK(quick > kMany / 10);
    }
}

// Nor does the sender wait for an acknowledgement until it gets what it waits for itself.
TEST(timed_link_acknowledges_what_the_receiver_does_not_wait_for) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        two.accepted->reserve(0, 8, 4096);
        auto last = std::async(std::launch::async,
                               [&] { return receive(*two.accepted, {0, 0, 21, 0, 0}); });
        std::vector<int64_t> took;
        for (int64_t i = 0; i < 5; ++i) {
            const int64_t began = steady_ns();
            wait_sent(*two.dialled, send(*two.dialled, {0, 0, i, 0, 0}, 4096));
            took.push_back(steady_ns() - began);
        }
        CHECK(median(took) < 50 * kMillisecond);
        send(*two.dialled, {0, 0, 21, 0, 0}, 4096);
        check_and_release(*two.accepted, last.get(), 4096);
    }
}

TEST(link_gives_every_thread_what_it_waits_for) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        // The larger ones first: a message larger than all slots that are known is refused.
        for (const size_t bytes : {size_t{300'000}, size_t{4096}}) {
            two.accepted->reserve(0, 8, bytes);
            two.dialled->reserve(1, 8, bytes);
        }
        // Each of them for messages of its own, some too large to be read by it.
        const auto size = [](int64_t i) { return size_t{i % 5 == 4 ? 300'000u : 4096u}; };
        const auto passes = [&](int64_t which) {
            for (int64_t i = which; i < 200; i += 3) {
                send(*two.dialled, {0, 0, i, 0, 0}, size(i));
                check_and_release(*two.dialled, receive(*two.dialled, {0, 0, i, 1, 0}), size(i));
            }
        };
        const auto answers = [&](int64_t which) {
            for (int64_t i = which; i < 200; i += 3) {
                check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), size(i));
                send(*two.accepted, {0, 0, i, 1, 0}, size(i));
            }
        };
        std::vector<std::thread> threads;
        for (int64_t which = 0; which < 3; ++which) {
            threads.emplace_back(passes, which);
            threads.emplace_back(answers, which);
        }
        for (std::thread& t : threads) t.join();
    }
}

TEST(link_is_let_go_of_although_its_reader_was_there_a_moment_ago) {
    for (int i = 0; i < 20; ++i) {
        auto two = std::make_unique<Two>(Transport::shm);
        two->accepted->reserve(0, 2, 4096);
        send(*two->dialled, {0, 0, 0, 0, 0}, 4096);
        check_and_release(*two->accepted, receive(*two->accepted, {0, 0, 0, 0, 0}), 4096);
        const std::weak_ptr<Link> link = two->accepted;
        two->accepted->die("it is over");
        two.reset();
        CHECK(link.expired());
    }
}

// It sleeps where small messages come from; these come by another way.
TEST(timed_link_wakes_who_reads_for_messages_that_come_otherwise) {
    Two two(Transport::tcp);
    std::vector<int64_t> took;
    std::thread answers([&] {
        for (int64_t i = 0; i < 21; ++i) {
            receive(*two.accepted, {0, 0, i, 0, 0});
            send(*two.accepted, {0, 0, i, 1, 0}, 0);
        }
    });
    for (int64_t i = 0; i < 21; ++i) {
        const int64_t began = steady_ns();
        send(*two.dialled, {0, 0, i, 0, 0}, 0);
        receive(*two.dialled, {0, 0, i, 1, 0});
        took.push_back(steady_ns() - began);
    }
    answers.join();
    CHECK(median(took) < 50 * kMillisecond);
}

TEST(link_wakes_who_reads_when_it_ends) {
    Two two(Transport::tcp);
    paths_up(*two.accepted);
    for (const bool path : {true, false}) {
        std::atomic<bool> began{false};
        auto waiter = std::async(std::launch::async, [&] {
            began = true;
            // One slice of a minute.
            return two.accepted->receive({0, 0, 0, 0, 0}, steady_ns() + 120 * kSecond, 60 * kSecond,
                                         120.0);
        });
        until("began", [&] { return began.load(); });
        if (path) {
            two.accepted->reserve(0, 1, 4096);
            two.accepted->sever_data_path(0);
            send(*two.dialled, {0, 0, 0, 0, 0}, 4096);
            CHECK(waiter.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
            check_and_release(*two.accepted, *waiter.get(), 4096);
        } else {
            two.accepted->die("it is over");
            CHECK(waiter.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
            CHECK(THROWS(EngineError, waiter.get()) == "it is over");
        }
    }
}
