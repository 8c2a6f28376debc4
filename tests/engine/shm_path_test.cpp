// A path over shared memory against a hand-written peer.
#include "path/shm_path.hpp"

#include <sys/socket.h>

#include <cstring>
#include <functional>

#include "check.hpp"
#include "crypto/library.hpp"
#include "os/clock.hpp"
#include "os/processors.hpp"
#include "path_host.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 256 << 10;
constexpr uint32_t kPath = 2;
constexpr uint32_t kEpoch = 5;
constexpr size_t kHead = kChunkHeaderSize + kMacSize + kChunkTrailerSize;

ConnectionKeys keys() {
    ConnectionKeys keys;
    keys.theirs.fill(1);
    return keys;
}

// A link with one slot, to be sent to and to be received in.
struct FakeHost final : TestHost {
    std::shared_ptr<Memory> memory = Memory::anonymous(4 * kChunk);
    std::vector<uint8_t> source = std::vector<uint8_t>(4 * kChunk);
    std::shared_ptr<OutMessage> message = std::make_shared<OutMessage>();
    uint64_t to_send = 0;  // remaining bytes of the message
    int finished = 0;
    int intact = 0;
    uint64_t copied = 0;  // out of its source

    void send(uint64_t bytes, uint64_t slot_at = 0) {
        const std::lock_guard lock(mu);
        message->slot = SlotGrant{0, 0, 1, 0, slot_at, 4 * kChunk};
        message->info.id = 1;
        message->info.bytes = to_send = bytes;
        message->chunks = static_cast<uint32_t>((bytes + kChunk - 1) / kChunk);
    }
    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override {
        const std::lock_guard lock(mu);
        if (to_send == 0) return std::nullopt;
        ChunkTask task;
        task.message = message;
        task.header.path = path;
        task.header.epoch = epoch;
        task.header.chunk_bytes = kChunk;
        task.header.message = message->info;
        task.header.index = static_cast<uint32_t>((message->info.bytes - to_send) / kChunk);
        task.bytes = task.header.length();
        task.data = source.data() + task.header.offset();
        to_send -= task.bytes;
        return task;
    }
    std::function<void()> taking;  // called when a chunk has been claimed
    ChunkSink begin_chunk(const ChunkHeader& h) override {
        if (taking) taking();
        ChunkSink sink;
        sink.verdict = ChunkSink::Verdict::take;
        sink.data = memory->data() + h.offset();
        return sink;
    }
    void finish_chunk(const ChunkSink&, bool ok) override {
        note([&] {
            ++finished;
            intact += ok;
        });
    }
    void copied_out(uint64_t bytes) override {
        const std::lock_guard lock(mu);
        copied += bytes;
    }
    std::shared_ptr<Memory> peer_segment(uint32_t) override { return memory; }
};

struct Wire {
    Reactor reactor{"test"};
    std::shared_ptr<FakeHost> host = std::make_shared<FakeHost>();
    Fd peer;
    std::shared_ptr<ShmPath> path;

    FrameMac says{keys().theirs}, hears{keys().ours};
    PayloadGuard guard_out, guard_in;
    Integrity integrity;

    explicit Wire(Integrity how = Integrity::crc)
        : guard_out(how, keys().theirs, PayloadGuard::End::sends),
          guard_in(how, keys().ours, PayloadGuard::End::receives),
          integrity(how) {
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
        peer = Fd(fds[0]);
        const timeval limit{20, 0};
        CHECK(setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
        path =
            std::make_shared<ShmPath>(reactor, host, kPath, kEpoch, Fd(fds[1]), keys(), integrity);
        path->start();
    }
    ~Wire() { reactor.stop(); }

    ChunkHeader hear() {
        std::array<uint8_t, kHead> said;
        CHECK(::recv(peer.get(), said.data(), said.size(), MSG_WAITALL) == kHead);
        const Bytes head = Bytes(said).first(kChunkHeaderSize);
        const auto header = decode_chunk(head);
        CHECK(header);
        Tag mac;
        std::copy_n(said.end() - kChunkTrailerSize, mac.size(), mac.begin());
        if (integrity == Integrity::crc) {
            CHECK(mac == Tag{});
        } else {
            CHECK(hears.fits(head, Bytes(said).subspan(kChunkHeaderSize, kMacSize)));
            guard_in.begin(head);
            guard_in.pass({host->memory->data() + header->offset(), header->length()});
            CHECK(guard_in.fits(mac));
        }
        return *header;
    }
    // `change`: of a byte of what is said, whose seal and MAC stay.
    void say(const ChunkHeader& header, int change = -1) {
        say_late(header, [] {}, change);
    }
    // `before`: done between the sum of the payload and the word of it.
    void say_late(const ChunkHeader& header, std::function<void()> before, int change = -1) {
        std::array<uint8_t, kHead> out{};
        encode_chunk(header, std::span(out).first<kChunkHeaderSize>());
        const Bytes head = Bytes(out).first(kChunkHeaderSize);
        if (integrity != Integrity::crc) {
            const Mac mac = says.mac(head);
            std::copy(mac.begin(), mac.end(), out.begin() + kChunkHeaderSize);
            guard_out.begin(head);
            guard_out.pass({host->memory->data() + header.offset(), header.length()});
            const Tag payload_mac = guard_out.finish();
            std::copy(payload_mac.begin(), payload_mac.end(), out.end() - kChunkTrailerSize);
        }
        before();
        if (change >= 0) out[static_cast<size_t>(change)] ^= 1;
        CHECK(::send(peer.get(), out.data(), out.size(), MSG_NOSIGNAL) == kHead);
    }
};

ChunkHeader chunk(uint64_t bytes) {
    ChunkHeader h;
    h.path = kPath;
    h.epoch = kEpoch;
    h.chunk_bytes = kChunk;
    h.message.id = 1;
    h.message.bytes = bytes;
    return h;
}

}  // namespace

TEST(shm_path_puts_chunks_into_the_slot_before_it_tells_of_them) {
    // One chunk, and several with a last one that ends in the middle of a cache line.
    for (const auto& [bytes, integrity] :
         {std::pair{uint64_t{kChunk}, Integrity::crc},
          std::pair{uint64_t{3} * kChunk - 4095 - 7, Integrity::crc},
          std::pair{uint64_t{3} * kChunk - 4095 - 7, Integrity::mac},
          // In memory, the same as a MAC.
          std::pair{uint64_t{3} * kChunk - 4095 - 7, Integrity::aead}}) {
        Wire wire(integrity);
        for (size_t i = 0; i < wire.host->source.size(); ++i)
            wire.host->source[i] = static_cast<uint8_t>(i * i >> 7);
        wire.host->send(bytes);
        wire.path->notify();
        for (uint64_t at = 0; at < bytes;) {
            const ChunkHeader h = wire.hear();
            CHECK(h.offset() == at && h.message.bytes == bytes);
            CHECK(std::memcmp(wire.host->memory->data() + at, wire.host->source.data() + at,
                              h.length()) == 0);
            at += h.length();
        }
        CHECK(wire.host->memory->data()[bytes] == 0);
        const std::lock_guard lock(wire.host->mu);
        CHECK(wire.host->copied == bytes);
    }
}

TEST(shm_path_writes_nothing_outside_of_what_is_mapped_for_a_slot) {
    // The last two end before they begin, if sums are allowed to wrap around.
    for (const uint64_t at :
         {uint64_t{kChunk} * 2, uint64_t{kChunk} * 4, ~uint64_t{0} - kChunk + 1, ~uint64_t{0}}) {
        Wire wire;
        wire.host->send(uint64_t{3} * kChunk, at);
        wire.path->notify();
        wire.host->until("refused", [&] { return !wire.host->protocol.empty(); });
        CHECK(wire.host->protocol.find("outside of the memory that is mapped") !=
              std::string::npos);
    }
}

TEST(shm_path_refuses_headers_and_payloads_without_the_mac_of_the_peer) {
    for (const int change : {-1, 8, int{kChunkHeaderSize}, int{kHead} - 1}) {
        Wire wire(Integrity::mac);
        wire.say(chunk(kChunk));
        wire.host->until("taken", [&] { return wire.host->intact == 1; });
        if (change < 0) {
            // Somebody else writes to the slot after the sender has summed it.
            ChunkHeader h = chunk(kChunk);
            wire.say_late(h, [&] { wire.host->memory->data()[100] ^= 1; });
        } else {
            wire.say(chunk(kChunk), change);
        }
        wire.host->until("lost", [&] { return !wire.host->lost.empty(); });
        CHECK(wire.host->intact == 1 && wire.host->refusals == 1);
        const bool header = change == 8 || change == int{kChunkHeaderSize};
        CHECK(wire.host->finished == (header ? 1 : 2));
        CHECK(wire.host->lost.find(header ? "header was altered" : "payload was altered") !=
              std::string::npos);
    }
}

TEST(shm_path_lets_go_of_a_chunk_that_it_cannot_prove_for_want_of_memory) {
    Wire wire(Integrity::mac);
    auto& cipher = const_cast<Crypto&>(crypto());
    const auto works = cipher.encrypt_update;
    wire.host->taking = [&cipher] {
        cipher.encrypt_update = [](CipherContext*, unsigned char*, int*, const unsigned char*,
                                   int) { return 0; };
    };
    wire.say(chunk(kChunk));
    wire.host->until("lost", [&] { return !wire.host->lost.empty(); });
    cipher.encrypt_update = works;
    CHECK(wire.host->lost == "libcrypto cannot compute AES-256-GCM");
    CHECK(wire.host->finished == 1 && wire.host->intact == 0);
}
