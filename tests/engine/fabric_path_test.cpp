// Two paths over endpoints of libfabric's provider for TCP, woken and polled. (Two endpoints of its
// provider for shared memory cannot share a process: the second one reads what the first unmapped.)
#include "path/fabric_path.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <iostream>
#include <mutex>

#include "base/error.hpp"
#include "check.hpp"
#include "os/clock.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 64 << 10;
constexpr uint32_t kSlots = 4;

namespace abi = fabric_abi;
using Wake = FabricEndpoint::Wake;

std::shared_ptr<FabricDevice> device() {
    const FabricSearch search = find_fabric_devices("tcp");
    if (!search.version.empty()) CHECK(search.devices.size() == 1);
    if (search.devices.empty()) {
        std::cout << "skipped: " << search.trouble << "\n";
        return nullptr;
    }
    return search.devices.front();
}

uint8_t content(uint64_t message, size_t at) {
    return static_cast<uint8_t>((at * 7 + message * 31) >> 3);
}

// One end of a link: what it sends, and slots for what comes.
struct End final : PathHost {
    std::mutex mu;
    std::condition_variable changed;
    std::vector<uint8_t> slots = std::vector<uint8_t>(size_t{kSlots} * kChunk);
    uint64_t to_send = 0;
    uint64_t begun = 0;
    uint64_t intact = 0;
    uint64_t wrong = 0;  // taken, and not what was sent
    int broken = 0;
    int refusals = 0;
    uint64_t bytes_out = 0;  // copied
    uint64_t bytes_in = 0;
    int ups = 0;
    bool suspect = false;
    std::string lost;
    std::string protocol;
    size_t bytes = kChunk;
    bool hold = false;  // the thread that takes a chunk stays there
    bool holds = false;

    std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) override {
        const std::lock_guard lock(mu);
        if (begun == to_send) return std::nullopt;
        const uint64_t number = begun++;
        const auto payload = std::make_shared<std::vector<uint8_t>>(bytes);
        for (size_t i = 0; i < bytes; ++i) (*payload)[i] = content(number, i);
        ChunkTask task;
        task.message = std::make_shared<OutMessage>();
        task.message->hold = payload;
        task.header.path = path;
        task.header.epoch = epoch;
        task.header.slot = static_cast<uint32_t>(number % kSlots);
        task.header.chunk_bytes = kChunk;
        task.header.message.id = number + 1;  // none has 0
        task.header.message.bytes = bytes;
        task.data = payload->data();
        task.bytes = bytes;
        return task;
    }
    ChunkSink begin_chunk(const ChunkHeader& h) override {
        std::unique_lock lock(mu);
        holds = hold;
        changed.notify_all();
        changed.wait(lock, [this] { return !hold; });
        ChunkSink sink;
        sink.verdict = ChunkSink::Verdict::take;
        sink.data = slots.data() + size_t{h.slot} * kChunk;
        sink.slot_data = sink.data;
        sink.serial = h.message.id - 1;
        sink.index = static_cast<uint32_t>(h.length());
        return sink;
    }
    void finish_chunk(const ChunkSink& sink, bool ok) override {
        const std::lock_guard lock(mu);
        intact += ok ? 1 : 0;
        broken += ok ? 0 : 1;
        if (ok)
            for (size_t i = 0; i < sink.index; ++i)
                if (sink.data[i] != content(sink.serial, i)) {
                    ++wrong;
                    break;
                }
        changed.notify_all();
    }
    void refused() override {
        const std::lock_guard lock(mu);
        ++refusals;
        changed.notify_all();
    }
    void stale_chunk() override {}
    void copied_out(uint64_t count) override {
        const std::lock_guard lock(mu);
        bytes_out += count;
    }
    void copied_in(uint64_t count) override {
        const std::lock_guard lock(mu);
        bytes_in += count;
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
    void path_up(uint32_t, uint32_t) override {
        const std::lock_guard lock(mu);
        ++ups;
        changed.notify_all();
    }
    void path_suspect(uint32_t, uint32_t, bool suspicious) override {
        const std::lock_guard lock(mu);
        suspect = suspicious;
        changed.notify_all();
    }
    std::optional<Segment> next_segment_to_offer() override { return std::nullopt; }
    void segment_offered(uint32_t, uint64_t, Fd) override {}
    std::shared_ptr<Memory> peer_segment(uint32_t) override { return nullptr; }

    template <typename F>
    void until(F&& condition) {
        std::unique_lock lock(mu);
        const auto end = std::chrono::system_clock::now() + std::chrono::seconds(20);
        if (!changed.wait_until(lock, end, condition))
            throw check::Failure("nothing came; lost: " + lost + ", protocol: " + protocol +
                                 ", intact: " + std::to_string(intact));
    }
    void release() {
        const std::lock_guard lock(mu);
        hold = false;
        changed.notify_all();
    }
};

// A device of the provider's whose library a test looks into, or takes something away from: what is
// not named here is the provider's own.
struct Watch {
    size_t said = 0;                 // bytes of the address that the peer says
    std::atomic<int> addresses = 0;  // that had zeros behind that
    bool domains_stay = false;
    std::atomic<bool> sends_never_complete = false;
    std::mutex opens;  // whoever opens a domain
} watch;

struct Watched {
    static std::shared_ptr<FabricDevice> device(const FabricDevice& real) {
        static Libfabric library = real.library();
        real_fabric = real.library().fabric;
        library.fabric = fabric;
        return std::make_shared<FabricDevice>(library, library.dupinfo(real.info()));
    }

  private:
    // An object of the provider's with a copy of its table of calls, which it has for ever.
    template <typename Ops>
    static Ops* own(Ops*& ops) {
        static std::vector<std::unique_ptr<Ops>> all;
        static std::mutex mu;
        const std::lock_guard lock(mu);
        all.push_back(std::make_unique<Ops>(*ops));
        return ops = all.back().get();
    }
    static int fabric(abi::FabricAttr* attr, abi::Fabric** out, void* context) {
        const int result = real_fabric.load()(attr, out, context);
        if (result != 0) return result;
        real_domain = (*out)->ops->domain;
        own((*out)->ops)->domain = domain;
        return 0;
    }
    static int domain(abi::Fabric* fabric, abi::Info* info, abi::Domain** out, void* context) {
        const std::lock_guard lock(watch.opens);
        const int result = real_domain.load()(fabric, info, out, context);
        if (result != 0) return result;
        real_av_open = (*out)->ops->av_open;
        real_cq_open = (*out)->ops->cq_open;
        auto* const ops = own((*out)->ops);
        ops->av_open = av_open;
        ops->cq_open = cq_open;
        real_close = (*out)->fid.ops->close;
        own((*out)->fid.ops)->close = close_domain;
        return 0;
    }
    static int cq_open(abi::Domain* domain, abi::CqAttr* attr, abi::Cq** out, void* context) {
        const int result = real_cq_open.load()(domain, attr, out, context);
        if (result != 0) return result;
        real_read = (*out)->ops->read;
        own((*out)->ops)->read = read;
        return 0;
    }
    static ssize_t read(abi::Cq* cq, void* out, size_t count) {
        const ssize_t n = real_read.load()(cq, out, count);
        if (n <= 0 || !watch.sends_never_complete) return n;
        auto* const entries = static_cast<abi::CqEntry*>(out);
        const auto end = std::remove_if(entries, entries + n, [](const abi::CqEntry& each) {
            return (each.flags & abi::kSend) != 0;
        });
        return end == entries ? ssize_t{-abi::kAgain} : end - entries;
    }
    static int close_domain(abi::Fid* domain) {
        return watch.domains_stay ? -EBUSY : real_close.load()(domain);
    }
    static int av_open(abi::Domain* domain, abi::AvAttr* attr, abi::Av** out, void* context) {
        const int result = real_av_open.load()(domain, attr, out, context);
        if (result != 0) return result;
        real_insert = (*out)->ops->insert;
        own((*out)->ops)->insert = insert;
        return 0;
    }
    static int insert(abi::Av* av, const void* address, size_t count, uint64_t* out, uint64_t flags,
                      void* context) {
        const auto* bytes = static_cast<const uint8_t*>(address);
        if (std::all_of(bytes + watch.said, bytes + FabricEndpoint::kMaxAddress + 1,
                        [](uint8_t b) { return b == 0; }))
            ++watch.addresses;
        return real_insert.load()(av, address, count, out, flags, context);
    }
    static inline std::atomic<decltype(Libfabric::fabric)> real_fabric;
    static inline std::atomic<decltype(abi::OpsFabric::domain)> real_domain;
    static inline std::atomic<decltype(abi::OpsDomain::av_open)> real_av_open;
    static inline std::atomic<decltype(abi::OpsDomain::cq_open)> real_cq_open;
    static inline std::atomic<decltype(abi::OpsCq::read)> real_read;
    static inline std::atomic<decltype(abi::Ops::close)> real_close;
    static inline std::atomic<decltype(abi::OpsAv::insert)> real_insert;
};

ConnectionKeys keys(uint8_t ours, uint8_t theirs) {
    ConnectionKeys keys;
    keys.ours.fill(ours);
    keys.theirs.fill(theirs);
    return keys;
}

struct Pair {
    Reactor reactors[2]{Reactor("one"), Reactor("other")};
    Reactor setup{"set-up"};
    std::shared_ptr<End> ends[2] = {std::make_shared<End>(), std::make_shared<End>()};
    std::shared_ptr<FabricPath> paths[2];
    std::vector<std::shared_ptr<FabricPath>> older;
    uint32_t epoch = 0;
    const std::shared_ptr<FabricDevice> device_;
    const Integrity integrity;
    FabricPath::Settings settings{kChunk, 10 * kSecond};

    Pair(std::shared_ptr<FabricDevice> device, Integrity how = Integrity::crc,
         Wake wake = Wake::descriptor)
        : device_(std::move(device)), integrity(how) {
        settings.wake = wake;
    }
    ~Pair() {
        for (auto& end : ends) end->release();
        for (auto& reactor : reactors) reactor.stop();
        setup.stop();
    }
    void connect() {
        ++epoch;
        int fds[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
        for (int i = 0; i < 2; ++i) {
            if (paths[i]) older.push_back(paths[i]);
            const auto side = static_cast<uint8_t>(i);
            paths[i] = std::make_shared<FabricPath>(
                reactors[i], setup, ends[i], 0, epoch, Fd(fds[i]),
                keys(uint8_t(1 + side), uint8_t(2 - side)), integrity, device_, settings);
        }
        for (auto& path : paths) path->start();
    }
    void up() {
        connect();
        for (auto& end : ends) end->until([&] { return end->ups == static_cast<int>(epoch); });
    }
    void send(int from, uint64_t messages) {
        {
            const std::lock_guard lock(ends[from]->mu);
            ends[from]->to_send += messages;
        }
        paths[from]->kick();
    }
    bool retire(int which) {
        std::mutex mu;
        std::condition_variable changed;
        std::optional<bool> result;
        reactors[which].post([&] {
            const bool retired = paths[which]->retire();
            const std::lock_guard lock(mu);
            result = retired;
            changed.notify_all();
        });
        std::unique_lock lock(mu);
        changed.wait(lock, [&] { return result.has_value(); });
        return *result;
    }
};

void carries_both_ways(Integrity integrity, Wake wake) {
    const auto found = device();
    if (!found) return;
    Pair pair(found, integrity, wake);
    pair.up();
    constexpr uint64_t kMany = 200;
    pair.send(0, kMany);
    pair.send(1, kMany);
    for (auto& end : pair.ends) end->until([&] { return end->intact == kMany; });
    for (auto& end : pair.ends) {
        const std::lock_guard lock(end->mu);
        CHECK(end->wrong == 0 && end->broken == 0 && end->lost.empty() && end->refusals == 0);
        CHECK(end->bytes_out == kMany * kChunk && end->bytes_in == kMany * kChunk);
    }
}

}  // namespace

TEST(fabric_devices_are_those_of_efa_or_of_the_provider_that_is_named) {
    const FabricSearch all = find_fabric_devices("");
    if (all.version.empty()) {
        CHECK(all.trouble.find("libfabric") != std::string::npos);
        std::cout << "skipped: " << all.trouble << "\n";
        return;
    }
    for (const FabricOffer& offer : all.offers)
        CHECK((offer.provider == "efa") == offer.unused.empty());
    CHECK(all.devices.empty() == !all.trouble.empty());
    const FabricSearch tcp = find_fabric_devices("tcp");
    CHECK(tcp.devices.size() == 1 && tcp.trouble.empty());
    CHECK(tcp.devices[0]->provider().starts_with("tcp"));
    const FabricSearch none = find_fabric_devices("nobody");
    CHECK(none.devices.empty() && none.trouble.find("FI_PROVIDER is nobody") != std::string::npos);
}

TEST(fabric_path_carries_both_ways_over_tcp) {
    for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead})
        carries_both_ways(integrity, Wake::descriptor);
}

TEST(fabric_path_carries_both_ways_if_it_has_to_poll) {
    carries_both_ways(Integrity::crc, Wake::none);
}

TEST(fabric_path_carries_small_and_large_messages) {
    const auto found = device();
    if (!found) return;
    Pair pair(found);
    pair.up();
    uint64_t sum = 0;
    // Below and above what the provider sends at once, and the most and the least there is.
    for (const size_t bytes :
         {size_t{1}, size_t{100}, size_t{4096}, size_t{20'000}, size_t{kChunk}}) {
        pair.ends[0]->bytes = bytes;
        pair.send(0, 20);
        sum += 20;
        pair.ends[1]->until([&] { return pair.ends[1]->intact == sum; });
    }
    CHECK(pair.ends[1]->wrong == 0);
}

TEST(fabric_path_takes_nothing_after_it_was_retired) {
    const auto found = device();
    if (!found) return;
    Pair pair(found);
    pair.up();
    // In the middle of traffic: messages are in flight, and some in the endpoint's memory.
    pair.send(0, 100'000);
    pair.ends[1]->until([&] { return pair.ends[1]->intact > 20; });
    CHECK(pair.retire(1));
    // The slots belong to somebody else from now on.
    End& receiver = *pair.ends[1];
    uint64_t before = 0;
    {
        const std::lock_guard lock(receiver.mu);
        std::fill(receiver.slots.begin(), receiver.slots.end(), uint8_t{0xee});
        before = receiver.intact;
    }
    // The sender finds the socket closed for writing, and its path lost.
    pair.ends[0]->until([&] { return !pair.ends[0]->lost.empty(); });
    // A new pair of endpoints carries, beside whatever the old one left.
    {
        const std::lock_guard lock(receiver.mu);
        CHECK(receiver.intact == before);
        CHECK(std::all_of(receiver.slots.begin(), receiver.slots.end(),
                          [](uint8_t b) { return b == 0xee; }));
    }
    {
        const std::lock_guard lock(pair.ends[0]->mu);
        pair.ends[0]->to_send = pair.ends[0]->begun;
    }
    pair.up();
    pair.send(0, 20);
    receiver.until([&] { return receiver.intact == before + 20; });
    CHECK(receiver.wrong == 0);
}

TEST(fabric_path_is_given_up_where_the_peer_takes_nothing) {
    const auto found = device();
    if (!found) return;
    Pair pair(found);
    pair.settings.dead_after_ns = 400 * kMillisecond;
    pair.up();
    {
        const std::lock_guard lock(pair.ends[1]->mu);
        pair.ends[1]->hold = true;
    }
    pair.send(0, 30);
    pair.ends[1]->until([&] { return pair.ends[1]->holds; });
    pair.ends[0]->until([&] { return pair.ends[0]->suspect; });
    pair.ends[0]->until([&] { return !pair.ends[0]->lost.empty(); });
    CHECK(pair.ends[0]->lost.find("took nothing for") != std::string::npos);
    // No more than the window was ever under way.
    CHECK(pair.ends[0]->begun <= 8);
    pair.ends[1]->release();
    pair.ends[1]->until([&] { return !pair.ends[1]->lost.empty(); });
}

TEST(fabric_path_is_severed_and_made_again) {
    const auto found = device();
    if (!found) return;
    Pair pair(found);
    uint64_t whole = 0;
    for (int round = 0; round < 3; ++round) {
        pair.up();
        pair.send(0, 10);
        whole += 10;
        pair.ends[1]->until([&] { return pair.ends[1]->intact == whole; });
        pair.paths[round % 2]->sever();
        for (auto& end : pair.ends) {
            end->until([&] { return !end->lost.empty(); });
            const std::lock_guard lock(end->mu);
            end->lost.clear();
        }
    }
}

TEST(fabric_path_whose_endpoint_takes_long_to_open_holds_up_nobody_and_is_lost_after_3_s) {
    const auto found = device();
    if (!found) return;
    Pair pair(Watched::device(*found));
    {
        const std::lock_guard nobody_opens(watch.opens);
        pair.connect();
        End& end = *pair.ends[0];
        // Started by now, and free for others.
        pair.reactors[0].post([&end] { end.path_suspect(0, 0, true); });
        end.until([&] { return end.suspect && end.lost.empty(); });
        for (auto& each : pair.ends) each->until([&] { return !each->lost.empty(); });
        // The other one may have heard of that first.
        const auto says_why = [](const auto& each) {
            return each->lost.find("has not opened an endpoint within 3 s") != std::string::npos;
        };
        CHECK(std::any_of(std::begin(pair.ends), std::end(pair.ends), says_why));
    }
    // What has been opened too late is closed, and the next one is used.
    pair.connect();
    for (auto& end : pair.ends) end->until([&] { return end->ups > 0; });
}

// Whoever can reach the port of an endpoint can send to it.
TEST(fabric_path_refuses_messages_of_strangers) {
    const auto found = device();
    if (!found) return;
    Reactor reactor("test");
    Reactor setup("set-up");
    const auto end = std::make_shared<End>();
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const Fd peer(fds[0]);
    CHECK(::fcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
    const auto path = std::make_shared<FabricPath>(reactor, setup, end, 0, 1, Fd(fds[1]),
                                                   keys(1, 2), Integrity::crc, found,
                                                   FabricPath::Settings{kChunk, 10 * kSecond});
    path->start();
    // Its hello: whether it polls, its provider, its address.
    std::array<uint8_t, 325 + kSealSize> hello;
    CHECK(::recv(peer.get(), hello.data(), hello.size(), MSG_WAITALL) ==
          static_cast<ssize_t>(hello.size()));
    Reader r(hello);
    r.u8();
    r.text(64);
    const Bytes address = r.raw(r.u16());
    // The stranger's endpoint has longer blocks than the path's.
    FabricEndpoint stranger(found, 2, 1, 2 * kChunk);
    stranger.connect({address.begin(), address.end()});
    // But for the seal it is the first message of the peer, a probe.
    std::memset(stranger.send_block(0), 0, 2 * kChunk);
    stranger.send_block(0)[8] = 1;
    int expected = 0;
    for (const size_t bytes : {size_t{300}, size_t{1}, size_t{kChunk}, size_t{2 * kChunk}}) {
        const int64_t limit = steady_ns() + 20 * kSecond;
        bool posted = false;
        bool sent = false;
        ++expected;
        for (;;) {
            posted = posted || stranger.send(0, bytes);
            for (const auto& done : stranger.poll(4)) sent = sent || done.sent;
            const std::lock_guard lock(end->mu);
            if (sent && end->refusals == expected) break;
            CHECK(steady_ns() < limit && end->lost.empty());
        }
    }
    CHECK(end->intact == 0 && end->ups == 0);
    reactor.stop();
    setup.stop();
}

// libfabric is not told how long an address is, and reads as far as its provider likes.
TEST(fabric_endpoint_reads_nothing_behind_the_peers_address) {
    const auto found = device();
    if (!found) return;
    FabricEndpoint endpoint(Watched::device(*found), 1, 1, kChunk);
    for (const size_t bytes : {endpoint.address().size(), size_t{1}}) {
        std::vector<uint8_t> said(2 * FabricEndpoint::kMaxAddress, 0xff);
        std::copy_n(endpoint.address().begin(), bytes, said.begin());
        said.resize(bytes);
        watch.said = bytes;
        watch.addresses = 0;
        try {
            endpoint.connect(said);
        } catch (const EngineError&) {  // it may well find that it is no address
        }
        CHECK(watch.addresses == 1);
    }
    const std::vector<uint8_t> too_long(FabricEndpoint::kMaxAddress + 1, 1);
    CHECK(THROWS(EngineError, endpoint.connect(too_long)).find("257 bytes") != std::string::npos);
}

// Where the fabric is broken and TCP is not, a path is dialled again and again.
TEST(fabric_endpoints_that_cannot_be_closed_do_not_add_up) {
    const auto found = device();
    if (!found) return;
    const auto watched = Watched::device(*found);
    watch.domains_stay = true;
    int made = 0;
    std::string why;
    while (why.empty() && made < 100) try {
            FabricEndpoint endpoint(watched, 1, 1, kChunk);
            ++made;
        } catch (const EngineError& e) {
            why = e.what();
        }
    watch.domains_stay = false;
    CHECK(made == 16);
    CHECK(why.find("could not close 16 endpoints") != std::string::npos);
    FabricEndpoint other(found, 1, 1, kChunk);
}

TEST(fabric_path_whose_messages_are_never_said_to_have_been_sent_is_lost) {
    const auto found = device();
    if (!found) return;
    Pair pair(Watched::device(*found));
    pair.settings.dead_after_ns = kSecond;
    pair.up();
    watch.sends_never_complete = true;
    pair.send(0, 100);
    pair.ends[0]->until([&] { return !pair.ends[0]->lost.empty(); });
    watch.sends_never_complete = false;
    CHECK(pair.ends[0]->lost.find("has not said for") != std::string::npos);
    CHECK(pair.ends[1]->intact >= 7 && pair.ends[1]->intact <= 8);
}
