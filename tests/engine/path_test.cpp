// A TCP path against a hand-written peer: what is on the wire, byte by byte.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <stdexcept>

#include "check.hpp"
#include "crypto/crc32c.hpp"
#include "no_memory.hpp"
#include "os/clock.hpp"
#include "path/tcp_path.hpp"
#include "path_host.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kBytes = 1000;
constexpr size_t kHead = kChunkHeaderSize + kMacSize;

ConnectionKeys keys() {
    ConnectionKeys keys;
    keys.theirs.fill(1);
    return keys;
}

// A link of one slot.
struct FakeHost final : TestHost {
    std::vector<uint8_t> slot = std::vector<uint8_t>(kBytes);
    int taken = 0;
    int intact = 0;
    int broken = 0;
    int stale = 0;
    int losses = 0;
    std::thread::id told_by;
    std::thread::id finished_by;
    std::deque<std::vector<uint8_t>> to_send;

    std::atomic<bool> throws{false};
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override {
        if (throws) throw std::runtime_error("no memory");
        const std::lock_guard lock(mu);
        if (to_send.empty()) return std::nullopt;
        const auto payload = std::make_shared<std::vector<uint8_t>>(std::move(to_send.front()));
        to_send.pop_front();
        ChunkTask task;
        task.message = std::make_shared<OutMessage>();
        task.message->hold = payload;
        task.header.path = path;
        task.header.epoch = epoch;
        task.header.chunk_bytes = 1 << 20;
        task.header.message.bytes = payload->size();
        task.data = payload->data();
        task.bytes = payload->size();
        return task;
    }
    ChunkSink begin_chunk(const ChunkHeader& h) override {
        note([&] { ++taken; });
        ChunkSink sink;
        sink.verdict = h.slot == 0 ? ChunkSink::Verdict::take : ChunkSink::Verdict::invalid;
        if (h.slot == 0) sink.data = slot.data();
        return sink;
    }
    void finish_chunk(const ChunkSink&, bool ok) override {
        note([&] {
            finished_by = std::this_thread::get_id();
            ++(ok ? intact : broken);
        });
    }
    void stale_chunk() override {
        note([&] { ++stale; });
    }
    void path_lost(uint32_t, uint32_t, const std::string& why) override {
        note([&] {
            lost = why;
            told_by = std::this_thread::get_id();
            ++losses;
        });
    }
    template <typename F>
    void until(F&& condition) {
        TestHost::until("what the test waits for", condition);
    }
};

struct Wire {
    Reactor reactor{"test"};
    std::shared_ptr<FakeHost> host = std::make_shared<FakeHost>();
    Fd peer;
    std::shared_ptr<TcpPath> path;
    FrameMac says{keys().theirs};
    PayloadGuard guard;

    explicit Wire(Integrity integrity = Integrity::crc)
        : guard(integrity, keys().theirs, PayloadGuard::End::sends) {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
        peer = Fd(fds[0]);
        path = std::make_shared<TcpPath>(reactor, host, 2, 5, Fd(fds[1]), keys(), integrity);
        path->start();
    }
    ~Wire() { reactor.stop(); }

    // The next chunk that the peer says: they are sealed in this order.
    std::vector<uint8_t> head(const ChunkHeader& h) {
        std::array<uint8_t, kChunkHeaderSize> header;
        encode_chunk(h, header);
        guard.begin(header);
        std::vector<uint8_t> out(header.begin(), header.end());
        Writer(out).raw(says.mac(header));
        return out;
    }
    std::vector<uint8_t> chunk(const ChunkHeader& h, uint8_t fill) {
        std::vector<uint8_t> out = head(h);
        add_payload(out, std::vector<uint8_t>(kBytes, fill));
        return out;
    }
    // Of the header that was said last, as it is sent.
    void add_payload(std::vector<uint8_t>& out, std::vector<uint8_t> payload) {
        guard.store(payload.data(), payload);
        Writer w(out);
        w.raw(payload);
        w.raw(guard.finish());
    }

    void say(Bytes bytes) {
        CHECK(::send(peer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(bytes.size()));
    }
    void on_reactor(const std::function<void()>& what) { on_thread(reactor, what); }
};

ChunkHeader header() {
    ChunkHeader h;
    h.path = 2;
    h.epoch = 5;
    h.chunk_bytes = 4096;
    h.message.id = 1;
    h.message.bytes = kBytes;
    return h;
}

void takes_chunks_however_they_are_cut(Integrity integrity) {
    Wire wire(integrity);
    auto both = wire.chunk(header(), 7);
    const auto second = wire.chunk(header(), 8);
    both.insert(both.end(), second.begin(), second.end());
    for (size_t at = 0; at < both.size(); at += 97)
        wire.say(Bytes(both).subspan(at, std::min<size_t>(97, both.size() - at)));
    wire.host->until([&] { return wire.host->intact == 2; });
    CHECK(wire.host->slot == std::vector<uint8_t>(kBytes, 8) && wire.host->lost.empty());
}

}  // namespace

TEST(path_takes_chunks_however_they_are_cut) {
    for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead})
        takes_chunks_however_they_are_cut(integrity);
}

TEST(path_with_a_wrong_checksum_is_given_up_and_the_chunk_not_counted) {
    Wire wire;
    auto bad = wire.chunk(header(), 7);
    bad[kHead + kBytes] ^= 1;
    wire.say(bad);
    wire.host->until([&] { return !wire.host->lost.empty(); });
    CHECK(wire.host->broken == 1 && wire.host->intact == 0);
    CHECK(wire.host->lost.find("checksum") != std::string::npos);
}

// A CRC is no proof: it is made again without a key.
TEST(path_refuses_payloads_without_the_mac_of_the_peer) {
    for (const Integrity integrity : {Integrity::mac, Integrity::aead})
        for (const char* attack : {"altered", "altered MAC", "of another chunk"}) {
            const std::string how = attack;
            Wire wire(integrity);
            const auto first = wire.chunk(header(), 7);
            auto next = wire.chunk(header(), 7);
            if (how == "altered") next[kHead + kBytes / 2] ^= 1;
            if (how == "altered MAC") next[kHead + kBytes + 15] ^= 0x80;
            if (how == "of another chunk")
                std::copy(first.begin() + kHead, first.end(), next.begin() + kHead);
            wire.say(first);
            wire.say(next);
            wire.host->until([&] { return !wire.host->lost.empty(); });
            CHECK(wire.host->refusals == 1 && wire.host->intact == 1 && wire.host->broken == 1);
            CHECK(wire.host->lost.find("payload was altered") != std::string::npos);
        }
}

TEST(path_encrypts_payloads_where_it_is_to) {
    Wire wire(Integrity::aead);
    const auto said = wire.chunk(header(), 7);
    CHECK(std::count(said.begin() + kHead, said.begin() + kHead + kBytes, 7) < kBytes / 10);
}

TEST(path_drops_what_comes_after_its_fence) {
    Wire wire;
    const auto first = wire.chunk(header(), 7);
    wire.say(Bytes(first).first(kHead + 100));
    wire.host->until([&] { return wire.host->taken == 1; });
    wire.on_reactor([&] { wire.path->retire(); });
    const auto before = wire.host->slot;
    CHECK(wire.host->broken == 1 && wire.host->stale == 1);
    wire.say(Bytes(first).subspan(kHead + 100));
    wire.say(wire.chunk(header(), 9));
    wire.host->until([&] { return wire.host->stale == 2; });
    wire.on_reactor([] {});
    // Not a byte of either reached the slot, and no loss was reported: it had been fenced.
    CHECK(wire.host->slot == before && wire.host->taken == 1 && wire.host->intact == 0);
    CHECK(wire.host->lost.empty());
}

TEST(path_refuses_headers_of_another_path_or_epoch) {
    for (const int which : {0, 1}) {
        Wire wire;
        ChunkHeader h = header();
        ++(which == 0 ? h.path : h.epoch);
        wire.say(wire.chunk(h, 7));
        wire.host->until([&] { return !wire.host->lost.empty(); });
        CHECK(wire.host->taken == 0);
    }
}

TEST(path_refuses_headers_without_the_seal_of_the_peer) {
    for (const char* attack : {"altered", "altered seal", "repeated", "omitted", "another's"}) {
        const std::string how = attack;
        Wire wire;
        const auto first = wire.chunk(header(), 7);
        const bool begins = how != "omitted";
        if (begins) wire.say(first);
        wire.host->until([&] { return wire.host->intact == begins; });
        if (how == "another's") wire.says = FrameMac(keys().ours);
        auto next = how == "repeated" ? first : wire.chunk(header(), 8);
        // The checksum of the header is right: no key is needed for that.
        if (how == "altered") {
            next[8] ^= 1;
            const uint32_t crc = crc32c(0, Bytes(next).first(kChunkHeaderSize - 4));
            for (size_t i = 0; i < 4; ++i)
                next[kChunkHeaderSize - 4 + i] = static_cast<uint8_t>(crc >> (8 * i));
        }
        if (how == "altered seal") next[kHead - 1] ^= 0x80;
        wire.say(next);
        wire.host->until([&] { return !wire.host->lost.empty(); });
        CHECK(wire.host->refusals == 1 && wire.host->taken == begins);
        CHECK(wire.host->lost.find("header was altered") != std::string::npos);
        CHECK(wire.host->protocol.empty());
    }
}

TEST(path_reports_a_chunk_for_a_slot_that_is_not_granted) {
    Wire wire;
    ChunkHeader h = header();
    h.slot = 1;
    wire.say(wire.chunk(h, 7));
    wire.host->until([&] { return !wire.host->protocol.empty(); });
    CHECK(wire.host->protocol.find("slot") != std::string::npos);
}

TEST(path_end_of_stream_lets_go_of_a_half_received_chunk) {
    Wire wire;
    wire.say(Bytes(wire.chunk(header(), 7)).first(kHead + 1));
    wire.host->until([&] { return wire.host->taken == 1; });
    wire.peer.reset();
    wire.host->until([&] { return !wire.host->lost.empty(); });
    CHECK(wire.host->broken == 1 && wire.host->intact == 0);
}

TEST(path_that_meets_an_error_of_this_process_is_lost_and_says_which) {
    Wire wire;
    wire.host->throws = true;
    wire.path->notify();
    wire.host->until([&] { return wire.host->lost == "no memory"; });
    char byte;
    CHECK(::recv(wire.peer.get(), &byte, 1, 0) == 0);  // and closed
}

// --- Threads of the application's ---

namespace {

std::vector<uint8_t> hear(const Fd& peer, size_t bytes) {
    std::vector<uint8_t> out(bytes);
    for (size_t have = 0; have < bytes;) {
        pollfd ready{peer.get(), POLLIN, 0};
        CHECK(::poll(&ready, 1, 20'000) == 1);
        const ssize_t n = ::recv(peer.get(), out.data() + have, bytes - have, 0);
        CHECK(n > 0);
        have += static_cast<size_t>(n);
    }
    return out;
}

constexpr size_t kAround = kHead + kChunkTrailerSize;
constexpr int64_t kLong = 20 * kSecond;

}  // namespace

TEST(path_sends_on_the_thread_of_the_application) {
    Wire wire;
    wire.on_reactor([] {});
    HeldUp reactor(wire.reactor);
    CHECK(!wire.path->send_inline());
    wire.host->to_send = {std::vector<uint8_t>(4096, 3), std::vector<uint8_t>(4096, 4)};
    for (const uint8_t fill : {3, 4}) {
        CHECK(wire.path->send_inline());
        const auto bytes = hear(wire.peer, 4096 + kAround);
        CHECK(std::count(bytes.begin() + kHead, bytes.begin() + kHead + 4096, fill) == 4096);
    }
    CHECK(!wire.path->send_inline());
}

TEST(path_that_is_full_goes_on_with_what_the_application_began) {
    constexpr size_t kLarge = 1 << 20;
    Wire wire;
    wire.on_reactor([] {});
    wire.host->to_send = {std::vector<uint8_t>(kLarge, 3), std::vector<uint8_t>(100, 4)};
    {
        HeldUp reactor(wire.reactor);
        CHECK(wire.path->send_inline());   // as much as there is room for
        CHECK(!wire.path->send_inline());  // and nothing in the middle of it
    }
    const auto bytes = hear(wire.peer, kLarge + kAround + 100 + kAround);
    CHECK(std::count(bytes.begin() + kHead, bytes.begin() + kHead + kLarge, 3) == kLarge);
    CHECK(bytes.end()[-1 - static_cast<int>(kChunkTrailerSize)] == 4);
}

TEST(path_reads_on_the_thread_of_the_application) {
    for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead}) {
        Wire wire(integrity);
        wire.on_reactor([] {});
        const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        HeldUp reactor(wire.reactor);
        auto both = wire.chunk(header(), 7);
        const auto second = wire.chunk(header(), 8);
        both.insert(both.end(), second.begin(), second.end());
        wire.say(Bytes(both).first(kHead + 10));
        CHECK(wire.path->read_inline(wake.get(), kLong) && wire.host->intact == 0);
        wire.say(Bytes(both).subspan(kHead + 10));
        CHECK(wire.path->read_inline(wake.get(), kLong) && wire.host->intact == 2);
        CHECK(wire.host->slot == std::vector<uint8_t>(kBytes, 8));
        reactor.go();
        wire.say(wire.chunk(header(), 9));
        wire.on_reactor([] {});
        CHECK(wire.host->intact == 2);
        wire.path->return_to_reactor();
        wire.host->until([&] { return wire.host->intact == 3; });
    }
}

TEST(path_leaves_its_socket_to_who_reads_it) {
    Wire wire;
    wire.on_reactor([] {});
    const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    bool read = false;
    std::thread first([&] {
        while (!wire.path->read_inline(wake.get(), kLong)) std::this_thread::yield();
        read = true;
    });
    const std::thread::id reader = first.get_id();
    // One at a time: it is refused from when the other one sleeps there.
    const int64_t end = steady_ns() + kLong;
    while (wire.path->read_inline(wake.get(), 0) && steady_ns() < end) std::this_thread::yield();
    wire.path->return_to_reactor();  // not while it sleeps
    wire.say(wire.chunk(header(), 7));
    first.join();
    CHECK(read && wire.host->intact == 1 && wire.host->finished_by == reader);
}

TEST(path_wakes_who_reads_it_by_the_other_descriptor) {
    Wire wire;
    wire.on_reactor([] {});
    const Fd wake(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
    const int64_t began = steady_ns();
    CHECK(wire.path->read_inline(wake.get(), kLong) && steady_ns() - began < kLong);
    CHECK(wire.host->taken == 0);
}

TEST(path_reads_large_messages_beside_the_application) {
    Wire wire;
    wire.host->slot.resize(1 << 20);
    const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    ChunkHeader h = header();
    h.message.bytes = h.chunk_bytes = 1 << 20;
    std::vector<uint8_t> all = wire.head(h);
    wire.add_payload(all, std::vector<uint8_t>(1 << 20, 5));
    wire.say(Bytes(all).first(kHead + 100));
    wire.host->until([&] { return wire.host->taken == 1; });
    CHECK(!wire.path->read_inline(wake.get(), kLong));
    for (size_t at = kHead + 100; at < all.size();) {
        const ssize_t n = ::send(wire.peer.get(), all.data() + at, all.size() - at, MSG_NOSIGNAL);
        if (n > 0) at += static_cast<size_t>(n);
    }
    wire.host->until([&] { return wire.host->intact == 1; });
    // Nor what follows: after a large one, or between the small chunks of one.
    CHECK(!wire.path->read_inline(wake.get(), kLong));
    h.chunk_bytes = DataPath::kSmall;
    h.message.bytes = 3 * DataPath::kSmall;
    std::vector<uint8_t> chunk = wire.head(h);
    wire.add_payload(chunk, std::vector<uint8_t>(DataPath::kSmall, 6));
    wire.say(chunk);
    wire.host->until([&] { return wire.host->intact == 2; });
    CHECK(!wire.path->read_inline(wake.get(), kLong));
    // Until a small one has come.
    wire.say(wire.chunk(header(), 7));
    wire.host->until([&] { return wire.host->intact == 3; });
    HeldUp reactor(wire.reactor);
    wire.say(wire.chunk(header(), 8));
    CHECK(wire.path->read_inline(wake.get(), kLong) && wire.host->intact == 4);
}

TEST(path_that_breaks_elsewhere_is_taken_apart_on_its_own_thread) {
    Wire wire;
    std::thread::id own;
    wire.on_reactor([&] { own = std::this_thread::get_id(); });
    const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    {
        HeldUp reactor(wire.reactor);
        auto bad = wire.chunk(header(), 7);
        bad[kHead + kBytes] ^= 1;
        const auto next = wire.chunk(header(), 8);
        bad.insert(bad.end(), next.begin(), next.end());
        wire.say(bad);
        CHECK(wire.path->read_inline(wake.get(), kLong));
        CHECK(wire.host->broken == 1 && wire.host->lost.empty());
        // Nothing more is read or sent meanwhile.
        wire.host->to_send = {std::vector<uint8_t>(100, 3)};
        CHECK(!wire.path->read_inline(wake.get(), kLong) && !wire.path->send_inline());
    }
    wire.host->until([&] { return !wire.host->lost.empty(); });
    CHECK(wire.host->lost.find("checksum") != std::string::npos);
    CHECK(wire.host->told_by == own && wire.host->losses == 1);
    CHECK(wire.host->taken == 1 && wire.host->to_send.size() == 1);
}

TEST(path_that_breaks_elsewhere_is_taken_apart_although_there_is_no_memory) {
    for (const bool sends : {false, true}) {
        Wire wire;
        std::thread::id own;
        wire.on_reactor([&] { own = std::this_thread::get_id(); });
        const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
        wire.host->throws = sends;
        {
            const HeldUp reactor(wire.reactor);
            auto bad = wire.chunk(header(), 7);
            bad[kHead + kBytes] ^= 1;
            if (!sends) wire.say(bad);
            const NoMemory none;
            if (sends)
                CHECK(!wire.path->send_inline());
            else
                CHECK(wire.path->read_inline(wake.get(), kLong));
            CHECK(none.failures() > 0);
        }
        wire.host->until([&] { return !wire.host->lost.empty(); });
        CHECK(wire.host->lost == (sends ? "std::bad_alloc" : "out of memory"));
        CHECK(wire.host->told_by == own && wire.host->losses == 1);
    }
}

TEST(path_that_is_fenced_is_neither_read_nor_sent_to_elsewhere) {
    Wire wire;
    const Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    wire.on_reactor([&] { wire.path->retire(); });
    wire.host->to_send = {std::vector<uint8_t>(100, 3)};
    CHECK(!wire.path->send_inline() && !wire.path->read_inline(wake.get(), kLong));
    CHECK(wire.host->to_send.size() == 1);
}
