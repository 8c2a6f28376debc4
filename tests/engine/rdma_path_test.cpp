// Two queue pairs of the fake cards, and what a path makes of their troubles.
#include "path/rdma_path.hpp"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>

#include "check.hpp"
#include "fake_verbs.hpp"
#include "os/clock.hpp"
#include "path_host.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 4096;
constexpr uint32_t kChunks = 600;  // more than a queue pair has receives
constexpr uint32_t kPath = 1;
constexpr uint32_t kEpoch = 3;

uint8_t content(uint32_t chunk) {
    return static_cast<uint8_t>(chunk * 7 + 1);
}

// One end's link: it sends one message, and has one slot for the other end's.
struct Host final : TestHost {
    std::shared_ptr<OutMessage> message;
    std::vector<uint8_t> payload;
    uint32_t to_send = 0;
    uint32_t sent = 0;
    std::shared_ptr<Registration> slot;       // here
    std::shared_ptr<Registration> peer_slot;  // over there
    std::vector<int> received = std::vector<int>(kChunks);
    uint32_t chunks_received = 0;
    std::function<void()> on_chunk;  // without the lock
    bool up = false;
    uint64_t limit = 0;  // bytes under way that it has said it has memory for
    bool suspect = false;
    std::atomic<bool> throws{false};
    Pace its_pace;
    uint32_t delivered = 0;
    std::shared_ptr<Registration> leased;  // what the payload is in, if the card knows it
    std::atomic<uint64_t> copied{0};

    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override {
        const std::lock_guard lock(mu);
        if (sent == to_send) return std::nullopt;
        if (throws) throw std::bad_alloc();
        ChunkTask task;
        task.message = message;
        task.header.path = path;
        task.header.epoch = epoch;
        task.header.index = sent++;
        changed.notify_all();
        task.header.chunk_bytes = kChunk;
        task.header.message = message->info;
        task.data = (leased ? leased->data() : payload.data()) + task.header.offset();
        task.bytes = kChunk;
        return task;
    }
    ChunkSink begin_chunk(const ChunkHeader& h) override {
        if (on_chunk) on_chunk();
        if (throws) throw std::bad_alloc();
        ChunkSink sink;
        sink.verdict = ChunkSink::Verdict::take;
        sink.index = h.index;
        sink.data = slot->data() + h.offset();
        return sink;
    }
    void finish_chunk(const ChunkSink& sink, bool intact) override {
        const bool right = intact && sink.data[0] == content(sink.index) &&
                           sink.data[kChunk - 1] == content(sink.index);
        const std::lock_guard lock(mu);
        if (right) ++received[sink.index];
        ++chunks_received;
        changed.notify_all();
    }
    std::optional<RemoteSlot> remote_slot(uint32_t, const SlotGrant&) override {
        return RemoteSlot{reinterpret_cast<uint64_t>(peer_slot->data()), peer_slot->size(),
                          peer_slot->rkey()};
    }
    std::optional<uint32_t> payload_key(const VerbsDevice& device, const uint8_t*) override {
        if (!leased) return std::nullopt;
        CHECK(&device == &leased->device());
        return leased->lkey();
    }
    void copied_out(uint64_t bytes) override { copied += bytes; }
    void path_up(uint32_t, uint32_t) override {
        note([&] { up = true; });
    }
    Pace pace(uint32_t, uint32_t) override { return its_pace; }
    void path_limited(uint32_t, uint32_t, uint64_t most) override {
        note([&] { limit = most; });
    }
    Pace chunk_delivered(uint32_t, uint32_t) override {
        const std::lock_guard lock(mu);
        ++delivered;
        changed.notify_all();
        return its_pace;
    }
    void path_suspect(uint32_t, uint32_t, bool suspicious) override {
        note([&] { suspect = suspicious; });
    }
};

struct End {
    std::shared_ptr<Rail> rail;
    std::shared_ptr<Host> host = std::make_shared<Host>();
    std::shared_ptr<RdmaPath> path;

    End(const char* device, RdmaPath::Settings settings, uint64_t window) {
        host->its_pace.window = window;
        RailOptions options;
        options.devices = {device};
        std::string last_error;
        const auto rails = Rail::open_all(fake::Fabric::verbs(), options, last_error, "/nowhere");
        CHECK(rails.size() == 1 && last_error.empty());
        rail = rails.front();
        host->slot = std::make_shared<Registration>(rail->device(),
                                                    Memory::anonymous(size_t{kChunk} * kChunks),
                                                    abi::kLocalWrite | abi::kRemoteWrite);
        host->message = std::make_shared<OutMessage>();
        host->message->info.id = 1;
        host->message->info.bytes = size_t{kChunk} * kChunks;
        host->message->slot = SlotGrant{};
        host->payload.resize(host->message->info.bytes);
        for (uint32_t i = 0; i < kChunks; ++i)
            std::memset(&host->payload[size_t{i} * kChunk], content(i), kChunk);
        path = std::make_shared<RdmaPath>(rail, host, kPath, kEpoch, settings);
    }
    ~End() { rail->stop(); }

    // The payload is where its card can read it, from now on.
    void lease() {
        auto memory = Memory::anonymous(host->payload.size());
        std::copy(host->payload.begin(), host->payload.end(), memory->data());
        host->leased =
            std::make_shared<Registration>(rail->device(), std::move(memory), abi::kLocalWrite);
    }
    void on_thread(const std::function<void()>& what) {
        pipemorph::on_thread(rail->reactor(), what);
    }
    void send(uint32_t chunks) {
        host->note([&] { host->to_send += chunks; });
        path->notify();
    }
};

struct Pair {
    fake::Fabric fabric;
    std::optional<End> a;
    std::optional<End> b;

    explicit Pair(uint64_t staged = 0, uint64_t window = 0) {
        fabric.add("fake0");
        fabric.add("fake1");
        const RdmaPath::Settings settings{kChunk, 60 * kSecond, 60 * kSecond, staged};
        a.emplace("fake0", settings, window);
        b.emplace("fake1", settings, window);
        a->host->peer_slot = b->host->slot;
        b->host->peer_slot = a->host->slot;
        b->path->connect(a->path->local(), false);
        a->path->connect(b->path->local(), true);
        b->path->start();
        a->path->start();
        for (End* end : {&*a, &*b}) end->host->until("up", [end] { return end->host->up; });
    }
};

}  // namespace

TEST(rdma_path_carries_each_chunk_once) {
    Pair p;
    p.a->send(kChunks);
    p.b->send(kChunks / 2);
    Host& b = *p.b->host;
    Host& a = *p.a->host;
    b.until("all chunks at b", [&] { return b.chunks_received == kChunks; });
    a.until("all chunks at a", [&] { return a.chunks_received == kChunks / 2; });
    CHECK(b.received == std::vector<int>(kChunks, 1));
    for (End* end : {&*p.a, &*p.b}) {
        end->on_thread([&] { end->path->retire(); });
        CHECK(end->host->lost.empty() && end->host->protocol.empty());
    }
    CHECK(p.fabric.queue_pairs("fake0") == 0 && p.fabric.queue_pairs("fake1") == 0);
}

TEST(rdma_path_drops_what_lands_after_its_end) {
    Pair p;
    p.fabric.hold();
    p.a->send(2);
    p.a->host->until("under way", [&] { return p.fabric.under_way() >= 2; });
    p.b->on_thread([&] { p.b->path->retire(); });
    p.a->on_thread([&] { p.a->path->retire(); });
    p.fabric.flow();
    CHECK(p.fabric.under_way() == 0 && p.b->host->chunks_received == 0);
    CHECK(p.b->host->slot->data()[0] == 0);
}

// As many chunks as fit the window are under way at once, or the memory for them.
TEST(rdma_path_stages_as_much_as_its_window) {
    constexpr uint32_t kAtFirst = 8;
    for (const auto& [staged, window, most] :
         {std::tuple{uint64_t{0}, uint64_t{100} * kChunk, kAtFirst},
          std::tuple{uint64_t{300} * kChunk, uint64_t{100} * kChunk, 128U},
          std::tuple{uint64_t{50} * kChunk, uint64_t{100} * kChunk, 50U},
          std::tuple{uint64_t{300} * kChunk, uint64_t{0}, kAtFirst}}) {
        Pair p(staged, window);
        Host& a = *p.a->host;
        p.fabric.hold();
        p.a->send(kChunks);
        a.until("as many as may be", [&] { return a.sent >= most; });
        p.a->on_thread([] {});
        CHECK(a.sent == most && a.delivered == 0);
        p.fabric.flow();
        Host& b = *p.b->host;
        b.until("all chunks", [&] { return b.chunks_received == kChunks; });
        a.until("all delivered", [&] { return a.delivered == kChunks; });
        CHECK(b.received == std::vector<int>(kChunks, 1));
    }
}

TEST(rdma_path_writes_what_is_leased_from_where_it_is) {
    constexpr uint32_t kMost = 300;
    Pair p(uint64_t{kMost} * kChunk, uint64_t{kMost} * kChunk);
    Host& a = *p.a->host;
    Host& b = *p.b->host;
    p.a->lease();
    // There is no more staging memory, and it needs none.
    p.fabric.intercept([](const fake::Call& call) { return call.name == "reg_mr" ? ENOMEM : 0; });
    p.fabric.hold();
    p.a->send(kChunks);
    a.until("as many as may be under way", [&] { return a.sent >= kMost; });
    p.a->on_thread([] {});
    CHECK(a.sent == kMost && a.limit == 0);
    p.fabric.flow();
    b.until("all chunks", [&] { return b.chunks_received == kChunks; });
    CHECK(b.received == std::vector<int>(kChunks, 1));
    CHECK(a.copied == 0);
    // What is not leased is copied, over the same path.
    a.until("all delivered", [&] { return a.delivered == kChunks; });
    a.note([&] {
        a.leased = nullptr;
        a.sent = a.to_send = 0;
    });
    p.a->send(1);
    b.until("one more", [&] { return b.chunks_received == kChunks + 1; });
    CHECK(a.copied == kChunk && b.received[0] == 2);
}

// Its card may read it for so long, whatever its link thinks of the message by then.
TEST(rdma_path_holds_what_is_leased_until_its_write_is_complete) {
    Pair p;
    Host& a = *p.a->host;
    p.a->lease();
    p.fabric.hold();
    p.a->send(1);
    a.until("sent", [&] { return a.sent == 1; });
    p.a->on_thread([] {});
    const std::weak_ptr<OutMessage> message = std::exchange(a.message, nullptr);
    CHECK(!message.expired());
    p.fabric.flow();
    a.until("delivered", [&] { return a.delivered == 1; });
    p.a->on_thread([] {});
    CHECK(message.expired());
}

TEST(rdma_path_holds_what_is_leased_until_its_queue_pair_is_gone) {
    Pair p;
    Host& a = *p.a->host;
    p.a->lease();
    p.fabric.hold();
    p.a->send(1);
    a.until("sent", [&] { return a.sent == 1; });
    p.a->on_thread([] {});
    const std::weak_ptr<OutMessage> message = std::exchange(a.message, nullptr);
    std::atomic<bool> lives_on{true};
    p.fabric.intercept(
        [&](const fake::Call& call) { return lives_on && call.name == "destroy_qp" ? EIO : 0; });
    // In error all its work is flushed, and says so.
    p.a->on_thread([&] { CHECK(!p.a->path->retire()); });
    CHECK(!message.expired());
    lives_on = false;
    p.a->on_thread([&] { CHECK(p.a->path->retire()); });
    CHECK(message.expired());
}

TEST(rdma_path_is_closed_when_its_queue_pair_is_gone) {
    Pair p;
    std::atomic<bool> lives_on{true};
    p.fabric.intercept(
        [&](const fake::Call& call) { return lives_on && call.name == "destroy_qp" ? EIO : 0; });
    auto closed = std::make_shared<int>();
    const std::weak_ptr<int> held = closed;
    p.a->path->close(std::move(closed));
    for (int i = 0; i < 2; ++i) p.a->on_thread([] {});  // tasks go by the batch
    CHECK(!held.expired() && p.fabric.queue_pairs("fake0") == 1);
    lives_on = false;
    const int64_t deadline = steady_ns() + 20 * kSecond;
    while (!held.expired() && steady_ns() < deadline) p.a->on_thread([] {});
    CHECK(held.expired() && p.fabric.queue_pairs("fake0") == 0);
    p.fabric.intercept(nullptr);
}

// So that other rails do not leave it what it cannot take.
TEST(rdma_path_says_that_it_cannot_stage_as_much_as_its_window) {
    constexpr uint32_t kAtFirst = 8;
    Pair p(uint64_t{300} * kChunk, uint64_t{100} * kChunk);
    Host& a = *p.a->host;
    CHECK(a.limit == 0);
    p.fabric.intercept([](const fake::Call& call) { return call.name == "reg_mr" ? ENOMEM : 0; });
    p.fabric.hold();
    p.a->send(kChunks);
    a.until("limited", [&] { return a.limit == uint64_t{kAtFirst} * kChunk; });
    p.fabric.flow();
    p.b->host->until("all chunks", [&] { return p.b->host->chunks_received == kChunks; });
}

TEST(rdma_path_gives_up_on_request_and_says_why) {
    Pair p;
    p.a->path->give_up("what it carries does not arrive");
    p.a->host->until("lost", [&] { return !p.a->host->lost.empty(); });
    CHECK(p.a->host->lost == "fake0 port 1: what it carries does not arrive");
}

// The window opens with the card's acknowledgements, whatever the receiver's thread does.
TEST(rdma_path_waits_for_a_receiver_that_is_held_up) {
    Pair p;
    Host& b = *p.b->host;
    {
        const HeldUp held_up(p.b->rail->reactor());
        p.a->send(kChunks);
        p.a->host->until("no receive remains", [&] { return p.fabric.not_ready() > 0; });
        // Far longer than threads are held up, and shorter than a rail may be silent.
        for (int ms = 0; ms < 500; ++ms) p.fabric.elapse(kMillisecond);
        p.a->on_thread([] {});
    }
    b.until("all chunks", [&] { return b.chunks_received == kChunks; });
    CHECK(b.received == std::vector<int>(kChunks, 1));
    CHECK(p.a->host->lost.empty() && b.lost.empty());
}

TEST(rdma_path_goes_down_with_its_completion_queue) {
    Pair p;
    p.fabric.break_completion_queues("fake1");
    p.b->host->until("lost", [&] { return !p.b->host->lost.empty(); });
    CHECK(p.b->host->lost == "fake1 port 1: CQ error");
    CHECK(p.a->host->lost.empty());
}

// However much has completed, what else lives on the rail's thread has its turn in between.
TEST(rdma_path_leaves_its_thread_to_others_now_and_then) {
    Pair p;
    constexpr uint32_t kAtOnce = 200;
    Host& b = *p.b->host;
    std::atomic<uint32_t> begun{0};
    std::atomic<uint32_t> begun_before_the_other{kAtOnce};
    {
        const HeldUp held_up(p.b->rail->reactor());
        b.on_chunk = [&] {
            if (begun++ == 0)
                p.b->rail->reactor().post([&] { begun_before_the_other = begun.load(); });
        };
        p.a->send(kAtOnce);
        p.a->host->until("sent", [&] { return p.a->host->sent == kAtOnce; });
        p.a->on_thread([] {});
        CHECK(p.fabric.under_way() == 0);
    }
    b.until("all chunks", [&] { return b.chunks_received == kAtOnce; });
    p.b->on_thread([] {});
    CHECK(begun_before_the_other <= 32);
}

// Whatever it was doing, and also if what it has still to count fails, too.
TEST(rdma_path_that_meets_an_error_of_this_process_is_lost_and_says_which) {
    for (const bool sends : {true, false}) {
        Pair p;
        End& failing = sends ? *p.a : *p.b;
        End& other = sends ? *p.b : *p.a;
        {
            const HeldUp held_up(p.b->rail->reactor());
            failing.host->throws = true;
            p.a->send(100);
            if (!sends) p.a->host->until("sent", [&] { return p.a->host->sent == 100; });
        }
        failing.host->until("lost", [&] { return !failing.host->lost.empty(); });
        CHECK(failing.host->lost == failing.rail->describe() + ": std::bad_alloc");
        CHECK(p.fabric.queue_pairs(failing.rail->device_name()) == 0);
        failing.on_thread([] {});  // which goes on
        CHECK(other.host->lost.empty() && other.host->protocol.empty());
    }
}
