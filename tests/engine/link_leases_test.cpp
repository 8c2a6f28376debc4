// Leases: memory of the engine that the application fills.
#include <algorithm>
#include <cstring>
#include <thread>

#include "check.hpp"
#include "two_engines.hpp"

using namespace pipemorph;

TEST(link_leases_the_slot_that_the_receiver_reads) {
    constexpr size_t kBytes = 300'000;
    Two two(Transport::shm);
    two.accepted->reserve(0, 2, kBytes);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    const Link::Lease lease = *two.dialled->lease(0, kBytes);
    CHECK(lease.slot && two.dialled->send_slots(0) == 1);
    const uint64_t ticket = send_leased(*two.dialled, lease, {0, 0, 1, 0, 0});
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

TEST(link_whose_payloads_are_proved_leases_nothing) {
    Config a = config(0, Transport::shm);
    Config b = config(1, Transport::shm);
    a.integrity = b.integrity = Integrity::mac;
    Two two(std::move(a), std::move(b));
    two.accepted->reserve(0, 2, 300'000);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    CHECK(!two.dialled->lease(0, 300'000) && two.dialled->send_slots(0) == 2);
}

TEST(link_never_leases_the_last_slot_and_takes_back_what_is_not_sent) {
    Two two(Transport::shm);
    two.accepted->reserve(0, 2, 4096);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
    const auto first = two.dialled->lease(0, 100);
    CHECK(first && !two.dialled->lease(0, 100) && !two.dialled->lease(0, 5000));
    CHECK(!two.dialled->lease(0, 0));
    // Whatever is leased, the others are sent.
    for (int64_t i = 0; i < 3; ++i) {
        send(*two.dialled, {0, 0, i, 0, 0}, 4096);
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 4096);
    }
    two.dialled->end_lease(*first);
    until("granted", [&] { return two.dialled->send_slots(0) == 2; });
}

TEST(link_leases_after_it_has_ended_are_harmless) {
    std::unique_ptr<Two> two = std::make_unique<Two>(Transport::shm);
    two->accepted->reserve(0, 2, 4096);
    until("granted", [&] { return two->dialled->send_slots(0) == 2; });
    const Link::Lease lease = *two->dialled->lease(0, 4096);
    two->dialled->die("it is over");
    until("over", [&] { return !two->dialled->alive(); });
    CHECK(THROWS(EngineError, two->dialled->lease(0, 1)) == "it is over");
    CHECK(THROWS(EngineError, send_leased(*two->dialled, lease, {0, 0, 0, 0, 0})) == "it is over");
    two->dialled->end_lease(lease);
    two.reset();
    std::memset(lease.data, 1, lease.bytes);  // it stays mapped
}
