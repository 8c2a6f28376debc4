// A TCP path against a hand-written peer: what is on the wire, byte by byte.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>

#include "check.hpp"
#include "crypto/crc32c.hpp"
#include "os/clock.hpp"
#include "path/tcp_path.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kBytes = 1000;
constexpr size_t kHead = kChunkHeaderSize + kSealSize;

ConnectionKeys keys() {
    ConnectionKeys keys;
    keys.theirs.fill(1);
    return keys;
}

// A link of one slot.
struct FakeHost final : PathHost {
    std::mutex mu;
    std::condition_variable changed;
    std::vector<uint8_t> slot = std::vector<uint8_t>(kBytes);
    std::vector<uint8_t> posted;  // if any, payloads are for this and not for the slot
    int taken = 0;
    int intact = 0;
    int broken = 0;
    int stale = 0;
    int refusals = 0;
    std::string lost;
    std::string protocol;

    std::atomic<bool> throws{false};
    std::optional<ChunkTask> next_chunk(uint32_t, uint32_t) override {
        if (throws) throw std::runtime_error("no memory");
        return std::nullopt;
    }
    ChunkSink begin_chunk(const ChunkHeader& h) override {
        const std::lock_guard lock(mu);
        ++taken;
        changed.notify_all();
        ChunkSink sink;
        sink.verdict = h.slot == 0 ? ChunkSink::Verdict::take : ChunkSink::Verdict::invalid;
        sink.slot_data = slot.data();
        if (h.slot == 0) sink.data = posted.empty() ? slot.data() : posted.data();
        return sink;
    }
    void finish_chunk(const ChunkSink&, bool ok) override {
        const std::lock_guard lock(mu);
        ++(ok ? intact : broken);
        changed.notify_all();
    }
    void refused() override {
        const std::lock_guard lock(mu);
        ++refusals;
        changed.notify_all();
    }
    void stale_chunk() override {
        const std::lock_guard lock(mu);
        ++stale;
        changed.notify_all();
    }
    void path_lost(uint32_t, uint32_t, const std::string& why) override {
        const std::lock_guard lock(mu);
        lost = why;
        changed.notify_all();
    }
    void protocol_error(const std::string& why) override {
        const std::lock_guard lock(mu);
        protocol = why;
        changed.notify_all();
    }
    std::optional<Segment> next_segment_to_offer() override { return std::nullopt; }
    void segment_offered(uint32_t, uint64_t, Fd) override {}
    std::shared_ptr<Memory> peer_segment(uint32_t) override { return nullptr; }

    template <typename F>
    void until(F&& condition) {
        std::unique_lock lock(mu);
        const auto end = std::chrono::system_clock::now() + std::chrono::seconds(20);
        CHECK(changed.wait_until(lock, end, condition));
    }
};

struct Wire {
    Reactor reactor{"test"};
    std::shared_ptr<FakeHost> host = std::make_shared<FakeHost>();
    Fd peer;
    std::shared_ptr<TcpPath> path;
    Sealer says{keys().theirs};
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
        Writer(out).raw(says.seal(header));
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
    void on_reactor(std::function<void()> what) {
        std::mutex mu;
        std::condition_variable changed;
        bool done = false;
        reactor.post([&] {
            what();
            const std::lock_guard lock(mu);
            done = true;
            changed.notify_all();
        });
        std::unique_lock lock(mu);
        changed.wait(lock, [&] { return done; });
    }
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

void stores_a_posted_payload(Integrity integrity) {
    constexpr uint32_t kLarge = 300'001;
    Wire wire(integrity);
    wire.host->posted.resize(kLarge);
    ChunkHeader h = header();
    h.message.bytes = kLarge;
    h.chunk_bytes = 1 << 20;
    std::vector<uint8_t> payload(kLarge);
    for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<uint8_t>(i * i >> 7);
    std::vector<uint8_t> all = wire.head(h);
    wire.add_payload(all, payload);
    // In odd pieces, each read before the next one comes: all of them begin off a cache line.
    std::mt19937 random(5);
    for (size_t at = 0; at < all.size();) {
        const size_t n = std::min<size_t>(1 + random() % 40'000, all.size() - at);
        wire.say(Bytes(all).subspan(at, n));
        for (int pass = 0; pass < 2; ++pass) wire.on_reactor([] {});
        at += n;
    }
    wire.host->until([&] { return wire.host->intact == 1; });
    CHECK(wire.host->posted == payload && wire.host->lost.empty());
    CHECK(wire.host->slot == std::vector<uint8_t>(kBytes));
}

}  // namespace

TEST(path_takes_chunks_however_they_are_cut) {
    for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead})
        takes_chunks_however_they_are_cut(integrity);
}

TEST(path_stores_a_posted_payload_where_it_belongs) {
    for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead})
        stores_a_posted_payload(integrity);
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
            CHECK(wire.host->lost.find("its MAC is wrong") != std::string::npos);
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
    // Not a byte of either reached the slot, and nobody was told of a loss: it had been fenced.
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
    for (const char* attack : {"altered", "altered seal", "repeated", "left out", "another's"}) {
        const std::string how = attack;
        Wire wire;
        const auto first = wire.chunk(header(), 7);
        const bool begins = how != "left out";
        if (begins) wire.say(first);
        wire.host->until([&] { return wire.host->intact == begins; });
        if (how == "another's") wire.says = Sealer(keys().ours);
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
        CHECK(wire.host->lost.find("its seal is wrong") != std::string::npos);
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
    wire.path->kick();
    wire.host->until([&] { return wire.host->lost == "no memory"; });
    char byte;
    CHECK(::recv(wire.peer.get(), &byte, 1, 0) == 0);  // and closed
}
