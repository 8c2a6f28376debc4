// Links whose application finds no memory on a thread of its own.
#include "no_memory.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <new>

#include "engine/dial.hpp"
#include "two_engines.hpp"

using namespace pipemorph;

namespace {

// Receives and releases a message where the allocations after the `first` ones fail. How many did.
size_t receive_without_memory(Link& link, const Key& key, size_t first, std::atomic<bool>& begins) {
    std::optional<Arrived> message;
    size_t failures = 0;
    {
        const NoMemory none(first);
        begins = true;
        try {
            message = link.receive(key, steady_ns() + 30 * kSecond, 20 * kSecond, 30.0);
            if (message && message->slot) link.release(*message->slot, message->serial);
        } catch (const std::bad_alloc&) {
        } catch (const EngineError&) {
        }
        failures = none.failures();
    }
    return failures;
}

// Runs it on the control thread, where the allocations after the `first` ones fail. How many did.
size_t without_memory(Runtime& runtime, size_t first, const std::function<void()>& what) {
    std::promise<size_t> failures;
    runtime.control.post([&] {
        size_t n = 0;
        std::string thrown;
        try {
            const NoMemory none(first);
            what();
            n = none.failures();
        } catch (const std::exception& e) {
            thrown = e.what();
        }
        if (thrown.empty())
            failures.set_value(n);
        else
            failures.set_exception(std::make_exception_ptr(check::Failure("thrown: " + thrown)));
    });
    return failures.get_future().get();
}

// A link that goes on delivers whatever comes; one that does not says that it has ended.
// `comes`: a message is on its way.
void go_on(Two& two, bool comes = false) {
    try {
        if (comes) check_and_release(*two.accepted, receive(*two.accepted, {0, 0, 0, 0, 0}), 4096);
        for (int64_t i = 1; i < 6; ++i) {
            auto received = std::async(std::launch::async,
                                       [&] { return receive(*two.accepted, {0, 0, i, 0, 0}); });
            const uint64_t ticket = send(*two.dialled, {0, 0, i, 0, 0}, 4096);
            check_and_release(*two.accepted, received.get(), 4096);
            wait_sent(*two.dialled, ticket);
        }
    } catch (const EngineTimeout&) {
        throw;
    } catch (const EngineError&) {
        until("ended", [&] { return !two.accepted->alive(); });
        CHECK(two.accepted->error().find("failed half-way: std::bad_alloc") != std::string::npos);
    }
}

}  // namespace

TEST(link_whose_receiver_finds_no_memory_goes_on_or_ends) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        size_t first = 0;
        for (size_t failures = 1; failures > 0; ++first) {
            Two two(transport);
            two.accepted->reserve(0, 2, 4096);
            std::atomic<bool> begins{false};
            auto waits = std::async(std::launch::async, [&] {
                return receive_without_memory(*two.accepted, {0, 0, 0, 0, 0}, first, begins);
            });
            until("began", [&] { return begins.load(); });
            send(*two.dialled, {0, 0, 0, 0, 0}, 4096);
            failures = waits.get();
            go_on(two);
        }
        CHECK(first > 3);
    }
}

// Either it is sent, or its slot is free again: never both.
TEST(link_that_finds_no_memory_to_send_has_not_sent_or_ends) {
    for (const bool leased : {true, false}) {
        size_t first = 0;
        for (size_t failures = 1; failures > 0; ++first) {
            Two two(Transport::shm);
            Link& link = *two.dialled;
            two.accepted->reserve(0, 3, 4096);
            std::optional<Link::Lease> found;
            until("memory to be leased", [&] {
                found = link.lease(0, 4096);
                return found.has_value();
            });
            const Link::Lease& lease = *found;
            const auto content = std::make_shared<std::vector<uint8_t>>(payload(0, 4096));
            std::copy(content->begin(), content->end(), lease.data);
            if (!leased) link.end_lease(lease);
            MessageInfo info;
            info.bytes = 4096;
            info.note = "note 0";
            bool sent = false;
            {
                const NoMemory none(first);
                try {
                    if (leased)
                        link.send(std::move(info), lease.data, lease.hold, lease.slot);
                    else
                        link.send(std::move(info), content->data(), content);
                    sent = true;
                } catch (const std::bad_alloc&) {
                }
                failures = none.failures();
            }
            if (!sent && leased) link.end_lease(lease);
            go_on(two, sent);
            until("all slots free", [&] { return !link.alive() || link.send_slots(0) == 3; });
        }
        CHECK(first > 3);
    }
}

// Whatever becomes of the link, its engine has others.
TEST(link_that_finds_no_memory_for_a_connection_goes_on_or_ends_and_its_engine_goes_on) {
    size_t first = 0;
    for (size_t failures = 1; failures > 0; ++first) {
        Two two(Transport::tcp);
        two.accepted->reserve(0, 2, 4096);
        int ends[2];
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
        Fd theirs(ends[0]);
        Fd ours(ends[1]);
        failures = without_memory(two.high.runtime(), first, [&] {
            two.accepted->paths().attach(0, 2, std::move(theirs), ConnectionKeys{});
        });
        ours.reset();
        go_on(two);
        THROWS(EngineTimeout, two.high.accept(0, 8, 0.01, [] {}));
    }
    CHECK(first > 3);
}

TEST(dial_that_finds_no_memory_says_so) {
    Engine nobody_waits(config(1, Transport::tcp));
    const Address address = resolve("127.0.0.1", nobody_waits.port(), false).front();
    Runtime runtime(config(0, Transport::tcp));
    size_t first = 0;
    for (size_t failures = 1; failures > 0; ++first) {
        std::promise<DialResult> said;
        failures = without_memory(runtime, first, [&] {
            try {
                dial(runtime, address, Hello{}, 100 * kMillisecond,
                     [&](DialResult result) { said.set_value(std::move(result)); });
            } catch (const std::bad_alloc&) {  // it was not even begun
                said.set_value({});
            }
        });
        CHECK(!said.get_future().get().fd);
    }
    CHECK(first > 3);
    runtime.stop();
}

TEST(link_that_finds_no_memory_to_end_ends_all_the_same) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        size_t first = 0;
        for (size_t failures = 1; failures > 0; ++first) {
            Two two(transport);
            auto payload = std::make_shared<std::vector<uint8_t>>(100);
            const std::weak_ptr<void> held = payload;
            MessageInfo info;
            info.bytes = payload->size();
            info.key.direction = 1;
            const uint8_t* const at = payload->data();
            two.accepted->send(std::move(info), at, std::move(payload));  // there is no slot
            const std::string why(100, 'y');
            try {
                const NoMemory none(first);
                two.accepted->die(why);
                failures = none.failures();
            } catch (const std::bad_alloc&) {
                check::fail(__FILE__, __LINE__, "the end of a link has thrown");
            }
            until("ended", [&] { return !two.accepted->alive(); });
            until("let go of", [&] { return held.expired(); });
            until("the peer ended", [&] { return !two.dialled->alive(); });
            THROWS(EngineTimeout, two.high.accept(0, 8, 0.01, [] {}));
        }
        CHECK(first > 3);
    }
}
