// Links whose application finds no memory left on a thread of its own.
#include "no_memory.hpp"

#include <atomic>
#include <future>
#include <new>

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

// A link that goes on delivers whatever comes; one that does not says that it has ended.
void go_on(Two& two) {
    try {
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
        CHECK(!two.accepted->alive());
        CHECK(two.accepted->error().find("failed: std::bad_alloc") != std::string::npos);
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
