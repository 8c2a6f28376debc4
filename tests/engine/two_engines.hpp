// Two engines in one process, with a link between them.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "check.hpp"
#include "engine/engine.hpp"
#include "os/clock.hpp"

namespace pipemorph {

inline constexpr int64_t kSlice = 100 * kMillisecond;

inline Config config(uint32_t rank, Transport transport) {
    Config c;
    c.job = "test";
    c.rank = rank;
    c.secret = {'k', 'e', 'y'};
    c.host = "127.0.0.1";
    c.transport = transport;
    c.chunk_bytes = 64 << 10;
    c.peer_deadline = 20.0;
    return c;
}

struct Two {
    Engine low;
    Engine high;
    std::shared_ptr<Link> dialled;
    std::shared_ptr<Link> accepted;

    explicit Two(Config a, Config b) : low(std::move(a)), high(std::move(b)) {
        std::thread acceptor([&] { accepted = high.accept(0, 7, 20.0, [] {}); });
        dialled = low.connect(1, 7, "127.0.0.1", high.port(), 20.0, [] {});
        acceptor.join();
    }
    explicit Two(Transport t) : Two(config(0, t), config(1, t)) {}
};

inline std::vector<uint8_t> payload(int64_t seed, size_t bytes) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    std::vector<uint8_t> out((bytes + 7) / 8 * 8);
    for (size_t i = 0; i < out.size(); i += 8) {
        const uint64_t v = random();
        std::memcpy(&out[i], &v, 8);
    }
    out.resize(bytes);
    return out;
}

inline size_t size_of(int64_t i) {
    constexpr size_t kSizes[] = {0, 1, 100, 64 << 10, (64 << 10) + 1, 300'000, 1 << 20};
    return kSizes[static_cast<size_t>(i) % std::size(kSizes)];
}

inline uint64_t send(Link& link, const Key& key, size_t bytes) {
    auto data =
        std::make_shared<std::vector<uint8_t>>(payload(key.microbatch * 2 + key.direction, bytes));
    MessageInfo info;
    info.key = key;
    info.bytes = bytes;
    info.note = "note " + std::to_string(key.microbatch);
    const uint8_t* at = data->data();
    return link.send(std::move(info), at, std::move(data));
}

// From memory of the engine that the test fills.
inline uint64_t send_leased(Link& link, Link::Lease lease, const Key& key) {
    const auto content = payload(key.microbatch * 2 + key.direction, lease.bytes);
    std::copy(content.begin(), content.end(), lease.data);
    MessageInfo info;
    info.key = key;
    info.bytes = lease.bytes;
    info.note = "note " + std::to_string(key.microbatch);
    return link.send(std::move(info), lease.data, std::move(lease.hold), lease.slot);
}

inline Arrived receive(Link& link, const Key& key, double timeout = 30.0) {
    const int64_t deadline = steady_ns() + to_ns(timeout);
    for (;;)
        if (auto a = link.receive(key, deadline, kSlice, timeout)) return std::move(*a);
}

inline void wait_sent(Link& link, uint64_t ticket, double timeout = 30.0) {
    const int64_t deadline = steady_ns() + to_ns(timeout);
    while (!link.wait_sent(ticket, deadline, kSlice, timeout)) {
    }
}

inline void check_and_release(Link& link, const Arrived& a, size_t bytes) {
    CHECK(a.info.bytes == bytes);
    CHECK(a.info.note == "note " + std::to_string(a.info.key.microbatch));
    const auto expected = payload(a.info.key.microbatch * 2 + a.info.key.direction, bytes);
    CHECK(bytes == 0 || std::memcmp(a.data, expected.data(), bytes) == 0);
    if (a.slot) link.release(*a.slot, a.serial);
}

template <typename F>
void until(const char* what, F&& condition, double timeout = 30.0) {
    const int64_t deadline = steady_ns() + to_ns(timeout);
    while (!condition()) {
        if (steady_ns() > deadline) check::fail(__FILE__, __LINE__, std::string("never: ") + what);
        std::this_thread::yield();
    }
}

inline void paths_up(Link& link) {
    until("paths up", [&] {
        const auto paths = link.stats().paths;
        return std::all_of(paths.begin(), paths.end(),
                           [](const PathStats& p) { return p.state == "UP"; });
    });
}

}  // namespace pipemorph
