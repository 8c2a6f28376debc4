// Two engines in one process, with faults.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <iostream>
#include <random>
#include <thread>

#include "check.hpp"
#include "crypto/crc32c.hpp"
#include "two_engines.hpp"

using namespace pipemorph;

namespace {

// Whether libfabric is installed. Without it links that ask for it use TCP.
bool has_libfabric() {
    const FabricSearch found = find_fabric_devices("tcp");
    if (found.version.empty()) std::cout << "skipped: " << found.trouble << "\n";
    return !found.version.empty();
}

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

void all_sizes(Transport transport) {
    Two two(transport);
    CHECK(two.dialled->transport() == transport && two.accepted->transport() == transport);
    two.accepted->reserve(0, 2, 1 << 20);
    two.dialled->reserve(1, 2, 1 << 20);
    std::vector<uint64_t> tickets;
    for (int64_t i = 0; i < 21; ++i) {
        tickets.push_back(send(*two.dialled, {0, 0, i, 0, 0}, size_of(i)));
        send(*two.accepted, {0, 0, i, 1, 0}, size_of(i));
    }
    for (int64_t i = 0; i < 21; ++i) {
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), size_of(i));
        check_and_release(*two.dialled, receive(*two.dialled, {0, 0, i, 1, 0}), size_of(i));
    }
    for (const uint64_t t : tickets) wait_sent(*two.dialled, t);
    CHECK(two.dialled->drain_telemetry().size() == 21);
}

// Both directions under load while data and control connections are cut at random.
void storm(Transport transport, uint32_t seed) {
    constexpr int64_t kMessages = 300;
    Two two(transport);
    two.accepted->reserve(0, 4, 1 << 20);
    two.dialled->reserve(1, 3, 1 << 20);
    std::atomic<int> running{4};
    std::atomic<bool> failed{false};
    std::string error;
    std::mutex error_mu;
    const auto guarded = [&](auto body) {
        return [&, body] {
            try {
                body();
            } catch (const std::exception& e) {
                const std::lock_guard lock(error_mu);
                error = e.what();
                failed = true;
            }
            --running;
        };
    };
    const auto sender = [&](Link& link, int64_t direction) {
        return [&link, direction] {
            std::vector<uint64_t> tickets;
            for (int64_t i = 0; i < kMessages; ++i)
                tickets.push_back(send(link, {0, 0, i, direction, 0}, size_of(i)));
            for (const uint64_t t : tickets) wait_sent(link, t, 60.0);
        };
    };
    const auto receiver = [&](Link& link, int64_t direction) {
        return [&link, direction] {
            // Every other message goes to a destination that was posted a little ahead.
            constexpr int64_t kAhead = 6;
            const auto post = [&](int64_t i) {
                if (i % 2 == 0 || i >= kMessages) return;
                auto into = std::make_shared<std::vector<uint8_t>>(size_of(i));
                uint8_t* at = into->data();
                link.post_receive({0, 0, i, direction, 0}, {at, size_of(i), std::move(into)});
            };
            for (int64_t i = 0; i < kAhead; ++i) post(i);
            for (int64_t i = 0; i < kMessages; post(i++ + kAhead))
                check_and_release(link, receive(link, {0, 0, i, direction, 0}, 60.0), size_of(i));
        };
    };
    std::vector<std::thread> threads;
    threads.emplace_back(guarded(sender(*two.dialled, 0)));
    threads.emplace_back(guarded(sender(*two.accepted, 1)));
    threads.emplace_back(guarded(receiver(*two.accepted, 0)));
    threads.emplace_back(guarded(receiver(*two.dialled, 1)));

    std::mt19937 random(seed);
    const uint32_t paths = transport == Transport::shm ? 1 : 4;
    // A path that breaks young pauses longer every time, up to a second: a dozen such pauses where
    // it is the only one.
    const uint64_t between_cuts = transport == Transport::shm ? 25 : 4;
    int cuts = 0;
    while (running > 0 && !failed) {
        Link& link = random() % 2 == 0 ? *two.dialled : *two.accepted;
        try {
            if (random() % 4 == 0)
                link.sever_control();
            else
                link.sever_data_path(random() % paths);
        } catch (const EngineError& e) {
            failed = true;
        }
        ++cuts;
        // Cuts while nothing is up would only add to the pause before the next connection.
        const uint64_t enough = two.dialled->stats().messages_sent + between_cuts;
        const int64_t deadline = steady_ns() + 30 * kSecond;
        while (running > 0 && !failed && two.dialled->stats().messages_sent < enough) {
            if (steady_ns() > deadline) {
                const std::lock_guard lock(error_mu);
                error = "fewer than " + std::to_string(between_cuts) +
                        " messages in 30 s after cut " + std::to_string(cuts);
                failed = true;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    if (failed) two.low.close(0.0);
    for (auto& t : threads) t.join();
    if (failed) check::fail(__FILE__, __LINE__, error);

    const auto a = two.dialled->stats();
    const auto b = two.accepted->stats();
    CHECK(a.messages_sent == kMessages && b.messages_received == kMessages);
    CHECK(b.messages_sent == kMessages && a.messages_received == kMessages);
    CHECK(b.bytes_received == a.bytes_sent && a.bytes_received == b.bytes_sent);
    CHECK(a.reconnects + b.reconnects > 0 && cuts > 0);
    CHECK(a.sends_in_flight == 0 && a.slots_in_use == 0 && b.slots_in_use == 0);
    for (int64_t i = 0; i < kMessages; ++i) CHECK(!two.accepted->arrived({0, 0, i, 0, 0}));
    std::printf("        %d cuts, %lu reconnects, %lu chunks resent, %lu duplicate, %lu stale\n",
                cuts, static_cast<unsigned long>(a.reconnects + b.reconnects),
                static_cast<unsigned long>(a.chunks_resent + b.chunks_resent),
                static_cast<unsigned long>(a.duplicate_chunks + b.duplicate_chunks),
                static_cast<unsigned long>(a.stale_chunks + b.stale_chunks));
}

}  // namespace

TEST(link_all_sizes_tcp) {
    all_sizes(Transport::tcp);
}

TEST(link_all_sizes_shm) {
    all_sizes(Transport::shm);
}

TEST(link_all_sizes_libfabric) {
    if (has_libfabric()) all_sizes(Transport::libfabric);
}

TEST(link_storm_libfabric) {
    if (has_libfabric()) storm(Transport::libfabric, 3);
}

// The messages of the whole go on over TCP while the endpoint is made again, and then over that.
TEST(link_over_libfabric_falls_back_to_tcp_and_comes_back) {
    if (!has_libfabric()) return;
    Two two(Transport::libfabric);
    two.accepted->reserve(0, 4, 1 << 20);
    const auto transport = [&] { return two.dialled->stats().transport; };
    int64_t i = 0;
    const auto pass = [&] {
        send(*two.dialled, {0, 0, i, 0, 0}, 300'000);
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 300'000);
        ++i;
    };
    for (uint64_t round = 1; round <= 3; ++round) {
        until("the endpoint carries", [&] {
            const auto paths = two.dialled->stats().paths;
            return paths.at(0).kind == "libfabric" && paths.at(0).state == "UP" &&
                   two.accepted->stats().paths.at(0).state == "UP";
        });
        pass();
        CHECK(transport() == "libfabric");
        const uint64_t before = two.dialled->stats().paths.at(1).chunks;
        two.dialled->sever_data_path(0);
        // Until it is back, as TCP's sockets carry.
        for (;;) {
            pass();
            const LinkStats s = two.dialled->stats();
            uint64_t over_tcp = 0;
            for (size_t p = 1; p < s.paths.size(); ++p) over_tcp += s.paths[p].chunks;
            if (s.failbacks == round) break;
            CHECK(s.failbacks < round && over_tcp >= before);
        }
        CHECK(two.dialled->stats().fallbacks == round);
    }
    CHECK(two.dialled->stats().paths.at(0).times_lost == 3);
}

// It is for devices that nothing else can use, or where somebody asks for it.
TEST(link_does_not_use_libfabric_unasked) {
    Two any(config(0, Transport::any), config(1, Transport::any));
    CHECK(any.dialled->transport() == Transport::shm);
    Two other(config(0, Transport::any), config(1, Transport::libfabric));
    CHECK(other.dialled->transport() == Transport::tcp);
    Config without = config(1, Transport::libfabric);
    without.fabric_provider = "nobody";
    Two half(config(0, Transport::libfabric), std::move(without));
    CHECK(half.dialled->transport() == Transport::tcp);
    CHECK(half.high.rails_trouble().find("libfabric") != std::string::npos);
}

TEST(link_storm_tcp) {
    storm(Transport::tcp, 1);
}

TEST(link_storm_shm) {
    storm(Transport::shm, 2);
}

TEST(link_small_messages_pass_no_thread_of_the_engine_tcp) {
    pass_no_thread(Transport::tcp);
}

TEST(link_small_messages_pass_no_thread_of_the_engine_shm) {
    pass_no_thread(Transport::shm);
}

// The receiver is a while away with what it has received.
TEST(link_acknowledges_although_the_receiver_does_not_come_back) {
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
        // Without being asked for, it would go with the next echo: every 100 ms.
        CHECK(median(took) < 50 * kMillisecond);
    }
}

// Nor does the sender wait for an acknowledgement until it gets what it waits for itself.
TEST(link_acknowledges_what_the_receiver_does_not_wait_for) {
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
        two.accepted->reserve(0, 8, 4096);
        two.dialled->reserve(1, 8, 4096);
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
        two.accepted->reserve(0, 8, 300'000);
        two.dialled->reserve(1, 8, 300'000);
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
        const std::weak_ptr<Link> left = two->accepted;
        two->accepted->die("it is over");
        two.reset();
        CHECK(left.expired());
    }
}

// It sleeps where small messages come from; these come by another way.
TEST(link_wakes_who_reads_for_messages_that_come_otherwise) {
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
    until("paths up", [&] {
        const auto paths = two.accepted->stats().paths;
        return std::all_of(paths.begin(), paths.end(),
                           [](const PathStats& p) { return p.state == "UP"; });
    });
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

namespace {

uint64_t fill_and_send(Link& link, Link::Lease lease, const Key& key) {
    const auto content = payload(key.microbatch * 2 + key.direction, lease.bytes);
    std::copy(content.begin(), content.end(), lease.memory());
    MessageInfo info;
    info.key = key;
    info.bytes = lease.bytes;
    info.note = "note " + std::to_string(key.microbatch);
    return link.send(std::move(info), lease.data, lease.hold, lease.slot);
}

}  // namespace

TEST(link_leases_the_slot_that_the_receiver_reads) {
    constexpr size_t kBytes = 300'000;
    Two two(Transport::shm);
    two.accepted->reserve(0, 2, kBytes);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    const Link::Lease lease = two.dialled->lease(0, kBytes);
    CHECK(lease.slot && two.dialled->send_slots(0) == 1);
    const uint64_t ticket = fill_and_send(*two.dialled, lease, {0, 0, 1, 0, 0});
    const Arrived arrived = receive(*two.accepted, {0, 0, 1, 0, 0});
    wait_sent(*two.dialled, ticket);
    lease.data[0] ^= 1;  // one memory
    CHECK((arrived.data[0] ^ lease.data[0]) == 0);
    lease.data[0] ^= 1;
    const auto mapped = two.dialled->lease_memory();
    CHECK(mapped.size() == 1 && lease.data >= mapped[0]->data());
    CHECK(lease.data + kBytes <= mapped[0]->data() + mapped[0]->size());
    CHECK(two.dialled->stats().bytes_copied_out == 0);
    CHECK(two.accepted->stats().bytes_copied_in == 0);
    check_and_release(*two.accepted, arrived, kBytes);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
}

TEST(link_whose_payloads_are_proved_leases_memory_of_its_own) {
    Config a = config(0, Transport::shm);
    Config b = config(1, Transport::shm);
    a.integrity = b.integrity = Integrity::mac;
    Two two(std::move(a), std::move(b));
    two.accepted->reserve(0, 2, 300'000);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    const Link::Lease lease = two.dialled->lease(0, 300'000);
    CHECK(!lease.slot && two.dialled->send_slots(0) == 2);
    const uint64_t ticket = fill_and_send(*two.dialled, lease, {0, 0, 1, 0, 0});
    check_and_release(*two.accepted, receive(*two.accepted, {0, 0, 1, 0, 0}), 300'000);
    wait_sent(*two.dialled, ticket);
}

TEST(link_never_leases_the_last_slot_and_takes_back_what_is_not_sent) {
    Two two(Transport::shm);
    two.accepted->reserve(0, 2, 4096);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    const Link::Lease first = two.dialled->lease(0, 100);
    const Link::Lease second = two.dialled->lease(0, 100);
    CHECK(first.slot && !second.slot && !two.dialled->lease(0, 5000).slot);
    CHECK(second.data == nullptr);  // nobody has asked for it yet
    // Whatever is leased, the others are sent.
    for (int64_t i = 0; i < 3; ++i) {
        send(*two.dialled, {0, 0, i, 0, 0}, 4096);
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 4096);
    }
    fill_and_send(*two.dialled, second, {0, 0, 3, 0, 0});
    check_and_release(*two.accepted, receive(*two.accepted, {0, 0, 3, 0, 0}), 100);
    two.dialled->end_lease(second);
    two.dialled->end_lease(first);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
}

TEST(link_sends_leases_over_every_transport_although_paths_are_lost) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        constexpr size_t kBytes = 300'000;
        constexpr int64_t kMessages = 60;
        Two two(transport);
        two.accepted->reserve(0, 4, kBytes);
        until("granted", [&] { return two.dialled->send_slots(0) == 4; });
        std::thread sends([&] {
            for (int64_t i = 0; i < kMessages; ++i) {
                const Link::Lease lease = two.dialled->lease(0, kBytes);
                if (i % 4 == 1) two.dialled->sever_data_path(0);
                if (i % 4 == 3) two.accepted->sever_data_path(0);
                CHECK(!lease.slot || transport == Transport::shm);
                fill_and_send(*two.dialled, lease, {0, 0, i, 0, 0});
            }
        });
        for (int64_t i = 0; i < kMessages; ++i)
            check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), kBytes);
        sends.join();
        until("granted", [&] { return two.dialled->send_slots(0) == 4; });
        CHECK(two.accepted->stats().messages_received == kMessages);
    }
}

TEST(link_leases_after_it_has_ended_are_harmless) {
    std::unique_ptr<Two> two = std::make_unique<Two>(Transport::shm);
    two->accepted->reserve(0, 2, 4096);
    until("granted", [&] { return two->dialled->send_slots(0) == 2; });
    const Link::Lease lease = two->dialled->lease(0, 4096);
    CHECK(lease.slot.has_value());
    two->dialled->die("it is over");
    until("over", [&] { return !two->dialled->alive(); });
    CHECK(THROWS(EngineError, two->dialled->lease(0, 1)) == "it is over");
    CHECK(THROWS(EngineError, fill_and_send(*two->dialled, lease, {0, 0, 0, 0, 0})) ==
          "it is over");
    two->dialled->end_lease(lease);
    two.reset();
    std::memset(lease.data, 1, lease.bytes);  // it stays mapped
}

// Whoever must not be held up by a copy, as the interpreter, lets go of what others wait for.
TEST(link_says_before_it_copies_what_was_posted_too_late) {
    constexpr Key kKey{0, 0, 0, 0, 0};
    Two two(Transport::tcp);
    Link& link = *two.accepted;
    link.reserve(0, 1, 4096);
    send(*two.dialled, kKey, 4096);
    until("arrived", [&] { return link.arrived(kKey); });
    std::vector<uint8_t> into(4096);
    link.post_receive(kKey, {into.data(), into.size(), nullptr});
    uint64_t copied = 0;
    const auto message = link.try_receive(kKey, [&](uint64_t bytes) {
        CHECK(link.alive());  // for which it has to have let go of its lock
        CHECK(into == std::vector<uint8_t>(4096));
        copied += bytes;
    });
    CHECK(message && message->data == into.data() && copied == 4096);
    CHECK(into == payload(0, 4096));
}

TEST(link_auto_takes_shared_memory_on_one_host) {
    Two two(Transport::any);
    CHECK(two.dialled->transport() == Transport::shm);
    CHECK(two.accepted->transport() == Transport::shm);
}

TEST(link_one_side_may_insist_on_tcp) {
    Two two(config(0, Transport::any), config(1, Transport::tcp));
    CHECK(two.dialled->transport() == Transport::tcp);
    CHECK(two.accepted->transport() == Transport::tcp);
}

TEST(link_receive_while_closing_is_an_error_not_a_hang) {
    Two two(Transport::tcp);
    two.accepted->reserve(0, 1, 100);
    std::string why;
    std::thread waiter(
        [&] { why = THROWS(EngineError, receive(*two.accepted, {0, 0, 0, 0, 0}, 30.0)); });
    two.low.close(5.0);
    waiter.join();
    CHECK(why.find("rank 0 closed it") != std::string::npos);
    CHECK(why.find("link 7 (rank 0 <-> 1)") != std::string::npos);
}

TEST(link_close_waits_for_acknowledgements) {
    Two two(Transport::tcp);
    two.accepted->reserve(0, 1, 1 << 20);
    for (int64_t i = 0; i < 10; ++i) send(*two.dialled, {0, 0, i, 0, 0}, 1 << 20);
    std::thread closer([&] { two.low.close(30.0); });
    for (int64_t i = 0; i < 10; ++i)
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 1 << 20);
    closer.join();
}

TEST(link_a_silent_stranger_is_shown_the_door) {
    Engine engine(config(0, Transport::tcp));
    const auto address = resolve("127.0.0.1", engine.port(), false).front();
    const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(fd.get(), address.get(), address.size) == 0);
    timeval limit{30, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char byte;
    CHECK(::recv(fd.get(), &byte, 1, 0) == 0);  // closed, and not a byte said
    until("refused", [&] { return engine.refused().size() == 1; });
    CHECK(engine.refused()[0].find("said nothing") != std::string::npos);
}

// Its dialler's last word may still come and say that the paths are of another kind.
TEST(link_takes_no_data_connection_before_it_is_confirmed) {
    Engine engine(config(1, Transport::tcp));
    std::shared_ptr<Link> accepted;
    std::thread acceptor([&] {
        try {
            accepted = engine.accept(0, 7, 30.0, [] {});
        } catch (const EngineError&) {  // seen below
        }
    });
    Runtime runtime(config(0, Transport::tcp));
    const auto dialled = [&](Purpose purpose) {
        Hello h;
        h.purpose = purpose;
        h.job = "test";
        h.to_rank = 1;
        h.link = 7;
        h.epoch = 1;
        h.sockets = 1;
        h.transport = Transport::tcp;
        std::promise<DialResult> said;
        runtime.control.post([&] {
            dial(runtime, resolve("127.0.0.1", engine.port(), false).front(), std::move(h),
                 60 * kSecond, [&](DialResult result) { said.set_value(std::move(result)); });
        });
        return said.get_future().get();
    };
    const DialResult control = dialled(Purpose::control);
    const DialResult early = dialled(Purpose::data);
    std::vector<uint8_t> confirm;
    Sealer says(control.keys.ours);
    append_frame(confirm, encode_frame(ConfirmFrame{Transport::tcp}), 0, 0, &says);
    const bool confirmed = ::send(control.fd.get(), confirm.data(), confirm.size(), MSG_NOSIGNAL) ==
                           static_cast<ssize_t>(confirm.size());
    acceptor.join();
    const DialResult late = dialled(Purpose::data);
    runtime.stop();
    CHECK(control.fd && confirmed && accepted);
    CHECK(early.not_yet && early.error.find("not confirmed yet") != std::string::npos);
    CHECK(late.fd);
}

// Accepts whatever is dialled with one answer.
struct Answering {
    Runtime runtime;
    RefusalLog refusals;
    std::vector<Fd> accepted;  // the control thread's
    Listener listener;

    explicit Answering(HelloReply reply)
        : runtime(config(1, Transport::tcp)),
          listener(runtime, refusals, resolve("127.0.0.1", 0, true).front(),
                   [this, reply](const std::shared_ptr<Greeting>& greeting) {
                       accepted.push_back(greeting->accept(reply));
                   }) {
        runtime.control.post([this] { listener.start(); });
    }
    ~Answering() {
        std::promise<void> stopped;
        runtime.control.post([&] {
            listener.stop();
            stopped.set_value();
        });
        stopped.get_future().wait();
        runtime.stop();
    }
    std::shared_ptr<Link> connect(Engine& engine) {
        return engine.connect(1, 7, "127.0.0.1", listener.port(), 20.0, [] {});
    }
};

TEST(link_without_a_path_is_refused_by_its_dialler) {
    HelloReply no_socket;
    no_socket.transport = Transport::tcp;
    Answering peer(no_socket);
    Engine engine(config(0, Transport::tcp));
    const std::string why = THROWS(EngineError, peer.connect(engine));
    CHECK(why.find("rank 1 agreed to tcp without a single data path") != std::string::npos);
}

// As in another network namespace of one host.
TEST(link_uses_libfabric_where_shared_memory_cannot_be_reached) {
    if (!has_libfabric()) return;
    HelloReply reply;
    reply.transport = Transport::shm;
    reply.unix_name = "nobody listens here";
    reply.sockets = 1;
    reply.fabrics = 1;
    Answering peer(reply);
    Engine engine(config(0, Transport::libfabric));
    const auto link = peer.connect(engine);
    CHECK(link->transport() == Transport::libfabric);
    CHECK(link->stats().paths.size() == 2 && link->stats().paths[0].kind == "libfabric");
}

// What a rank finds wrong right after it has connected, its neighbour has to find by itself.
TEST(link_that_its_dialler_closes_at_once_is_accepted_all_the_same) {
    for (int i = 0; i < 20; ++i) {
        Engine high(config(1, Transport::tcp));
        Engine low(config(0, Transport::tcp));
        auto accepted =
            std::async(std::launch::async, [&] { return high.accept(0, 7, 30.0, [] {}); });
        low.connect(1, 7, "127.0.0.1", high.port(), 30.0, [] {});
        low.close(0.0);
        const std::shared_ptr<Link> link = accepted.get();
        until("dead", [&] { return !link->alive(); });
        CHECK(link->error() == "link 7 (rank 0 <-> 1) is dead: rank 0 closed it");
    }
}

TEST(link_that_its_dialler_leaves_before_it_is_confirmed_ends_accept_in_words) {
    Engine high(config(1, Transport::tcp));
    Engine low(config(0, Transport::tcp));
    // The connection waits there for accept(), and comes up for nobody.
    THROWS(EngineError, low.connect(1, 7, "127.0.0.1", high.port(), 30.0,
                                    [] { throw EngineError("interrupted"); }));
    const std::string why = THROWS(EngineError, high.accept(0, 7, 30.0, [] {}));
    CHECK(why ==
          "link 7 (rank 0 <-> 1) is dead: rank 0 gave it up: connect() was left before it came up");
}

// Killed between its hello and its last word: nobody can say so, and nobody listens there any more.
TEST(link_of_a_dialler_that_is_gone_before_it_is_confirmed_ends_accept) {
    Config c = config(1, Transport::tcp);
    c.peer_deadline = 1.0;
    Engine engine(c);
    auto accepted = std::async(
        std::launch::async, [&] { return THROWS(EngineError, engine.accept(0, 7, 30.0, [] {})); });
    const Fd nobody(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = resolve("127.0.0.1", 0, false).front();
    CHECK(::bind(nobody.get(), address.get(), address.size) == 0);
    Runtime runtime(config(0, Transport::tcp));
    std::promise<DialResult> said;
    runtime.control.post([&] {
        Hello h;
        h.job = "test";
        h.to_rank = 1;
        h.link = 7;
        h.epoch = 1;
        h.sockets = 1;
        h.transport = Transport::tcp;
        h.listen_port = local_port(nobody);
        dial(runtime, resolve("127.0.0.1", engine.port(), false).front(), std::move(h),
             60 * kSecond, [&](DialResult result) { said.set_value(std::move(result)); });
    });
    DialResult control = said.get_future().get();
    runtime.stop();
    CHECK(control.fd);
    const int64_t start = steady_ns();
    control.fd.reset();
    const std::string why = accepted.get();
    CHECK(why.find("is dead: rank 0 is gone: nobody listens at 127.0.0.1:") != std::string::npos);
    CHECK(steady_ns() - start < 10 * kSecond);
}

// Its engine knows what it ended of, and has others.
TEST(link_that_has_ended_gives_its_memory_back_when_nobody_has_it) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        two.accepted->reserve(0, 2, 4096);
        send(*two.dialled, {0, 0, 0, 0, 0}, 4096);
        Arrived message = receive(*two.accepted, {0, 0, 0, 0, 0});
        std::vector<std::weak_ptr<Memory>> memory;
        for (const auto& slots : two.accepted->slot_memory()) memory.push_back(slots);
        for (const auto& peers : two.dialled->lease_memory()) memory.push_back(peers);
        CHECK(memory.size() == (transport == Transport::shm ? 2 : 1));
        two.accepted->die("it is over");
        until("dead", [&] { return !two.accepted->alive() && !two.dialled->alive(); });
        const auto left = [&memory] {
            return std::count_if(memory.begin(), memory.end(),
                                 [](const auto& each) { return !each.expired(); });
        };
        std::this_thread::sleep_for(std::chrono::milliseconds(150));  // a few ticks
        CHECK(left() == static_cast<ptrdiff_t>(memory.size()));
        two.accepted.reset();
        two.dialled.reset();
        until("only what is shown is left", [&] { return left() == 1; });
        const auto expected = payload(0, 4096);
        CHECK(std::equal(expected.begin(), expected.end(), message.data));
        message = {};
        until("nothing is left", [&] { return left() == 0; });
        const std::string why = THROWS(EngineTimeout, two.high.accept(0, 7, 0.01, [] {}));
        CHECK(why.ends_with("last that came: it is over"));
    }
}

TEST(link_tells_its_peer_what_it_died_of) {
    for (const bool dialler : {true, false}) {
        Two two(Transport::tcp);
        two.accepted->reserve(0, 1, 1 << 20);
        const std::shared_ptr<Link> dead = dialler ? two.dialled : two.accepted;
        const std::shared_ptr<Link> survivor = dialler ? two.accepted : two.dialled;
        const int64_t start = steady_ns();
        dead->die(dead->describe() + " is dead: " + std::string(5000, 'y'));
        until("dead", [&] { return !survivor->alive(); });
        // Sooner than by silence, which counts from half of the deadline on.
        CHECK(steady_ns() - start < to_ns(config(0, Transport::tcp).peer_deadline) / 2);
        const std::string said = "link 7 (rank 0 <-> 1) is dead: rank " +
                                 std::to_string(dialler ? 0 : 1) + " gave it up: yyy";
        CHECK(survivor->error().starts_with(said));
    }
}

// While a path's thread is in the middle of a copy, it may write into what was posted.
TEST(link_tells_its_end_when_no_path_can_write_any_more) {
    struct Gate {
        std::promise<void> opens;
        ~Gate() { opens.set_value(); }
    };
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        until("paths up", [&] {
            const auto paths = two.accepted->stats().paths;
            return std::all_of(paths.begin(), paths.end(),
                               [](const PathStats& p) { return p.state == "UP"; });
        });
        auto posted = std::make_shared<std::vector<uint8_t>>(100);
        const std::weak_ptr<void> held = posted;
        uint8_t* at = posted->data();
        two.accepted->post_receive({0, 0, 0, 0, 0}, {at, 100, std::move(posted)});
        {
            Gate gate;
            std::promise<void> busy;
            two.high.runtime().data(0).post([&busy, open = gate.opens.get_future().share()] {
                busy.set_value();
                open.wait();
            });
            busy.get_future().wait();
            two.accepted->die("it is over");
            CHECK(two.accepted->alive() && two.accepted->error().empty() && !held.expired());
            CHECK(!two.accepted->try_receive({0, 0, 0, 0, 0}));
        }
        until("told", [&] { return !two.accepted->alive(); });
        CHECK(two.accepted->error() == "it is over");
        until("let go of", [&] { return held.expired(); });
    }
}

TEST(link_ends_with_the_words_of_what_its_engine_has_thrown) {
    for (const bool control : {true, false}) {
        Two two(Transport::tcp);
        Runtime& runtime = two.high.runtime();
        (control ? runtime.control : runtime.data(0)).post([] {
            throw std::runtime_error("no memory");
        });
        until("dead", [&] { return !two.accepted->alive() && !two.dialled->alive(); });
        const std::string why = std::string("the engine of rank 1 failed: thread ") +
                                (control ? "pm-control" : "pm-data-0") + ": no memory";
        CHECK(two.accepted->error() == "link 7 (rank 0 <-> 1) is dead: " + why);
        CHECK(two.dialled->error().ends_with("rank 1 gave it up: " + why));
        CHECK(THROWS(EngineError, two.high.accept(0, 8, 1.0, [] {})) == why);
        two.high.close(5.0);
    }
}

TEST(link_one_address_cannot_take_all_the_places_of_strangers) {
    Engine engine(config(0, Transport::tcp));
    const auto address = resolve("127.0.0.1", engine.port(), false).front();
    const auto source = resolve("127.0.0.2", 0, false).front();
    std::vector<Fd> silent;
    for (int i = 0; i < 200; ++i) {
        const Fd& fd = silent.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        CHECK(::bind(fd.get(), source.get(), source.size) == 0);
        CHECK(::connect(fd.get(), address.get(), address.size) == 0);
    }
    until("refused", [&] {
        const auto refused = engine.refused();
        return std::any_of(refused.begin(), refused.end(), [](const std::string& why) {
            return why.starts_with("127.0.0.2: too many strangers at once") ||
                   why.starts_with("127.0.0.2: made room for others");
        });
    });
}
