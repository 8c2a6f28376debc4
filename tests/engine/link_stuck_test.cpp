// Faults that do not pass: a link whose paths get nothing through ends with a reason, in time.
#include <algorithm>

#include "check.hpp"
#include "messages.hpp"
#include "os/clock.hpp"
#include "protocol/link_core.hpp"

using namespace pipemorph;

namespace {

constexpr int64_t kPatience = 5 * kSecond;

// The dialling end of a link with one socket, and a peer that sends frames all the time.
struct Sender {
    explicit Sender(std::optional<uint32_t> thread = std::nullopt, size_t sockets = 1)
        : core({true, 1, 1, kChunk, uint64_t{512} << 20, kPatience}), local_thread(thread) {
        core.assign_paths({}, Transport::tcp, sockets);
        connect();
    }

    void connect() {
        auto calls = core.due(now);
        for (; calls.empty(); calls = core.due(now)) core.frame_received(now += 20 * kMillisecond);
        for (const auto& [path, epoch] : calls) core.attach(path, epoch, local_thread, now);
    }
    // Time passes until the link ends, at most for so long. Returns why it has ended.
    std::string pass(int64_t ns) {
        for (const int64_t end = now + ns; now < end;) {
            now += 50 * kMillisecond;
            core.frame_received(now);
            if (std::string why = core.check_flow(now); !why.empty()) return why;
        }
        return {};
    }
    uint64_t post(int64_t number, uint32_t chunks) {
        Frame grant = AckFrame{{}, {{0, uint32_t(number), 1, 0, 0, uint64_t{chunks} * kChunk}}};
        CHECK(core.handle(grant, now, now).empty());
        payload.resize(std::max<size_t>(payload.size(), size_t{chunks} * kChunk));
        return core
            .post(message(number, uint64_t{chunks} * kChunk), payload.data(), nullptr, now, now)
            ->info.id;
    }
    uint32_t epoch() const { return core.paths()[0].machine.epoch(); }
    uint32_t send_all() {
        uint32_t n = 0;
        while (core.next_chunk(0, epoch(), now, now)) ++n;
        return n;
    }
    void acknowledge(uint64_t id) {
        Frame ack = AckFrame{{id}, {}};
        CHECK(core.handle(ack, now, now).empty());
    }
    // The connection breaks, and of each message the receiver has the chunks of these bits.
    void lose(const std::string& why, const std::vector<ChunkReport>& reports) {
        const uint32_t lost = epoch();
        CHECK(core.path_lost(0, lost, why, now));
        Frame report = BitmapFrame{0, lost, reports};
        CHECK(core.handle(report, now, now).empty());
    }
    std::string lose_all(uint64_t id, int64_t every) {
        send_all();
        std::string why = pass(every);
        if (why.empty()) {
            lose("receiving: Connection timed out", {{id, 0, {}}});
            connect();
        }
        return why;
    }

    LinkCore core;
    std::optional<uint32_t> local_thread;
    std::vector<uint8_t> payload;
    int64_t now = kSecond;
};

}  // namespace

TEST(link_of_which_nothing_gets_through_ends_in_time) {
    // Cut at once, cut after a while, and as a kernel gives data up that is not acknowledged.
    for (const int64_t every : {200 * kMillisecond, 2 * kSecond, kPatience}) {
        for (const uint32_t chunks : {1u, 3u, 100u}) {
            Sender sender;
            const uint64_t id = sender.post(7, chunks);
            std::string why;
            while (why.empty() && sender.now < 60 * kSecond) why = sender.lose_all(id, every);
            const int64_t took = sender.now - kSecond;
            CHECK(took > 2 * kPatience && took < 3 * kPatience + 2 * kSecond);
            for (const char* said : {"microbatch 7", "nothing of", "has got through in 1",
                                     "data connections were lost", "Connection timed out", "MTU"})
                CHECK(why.find(said) != std::string::npos);
        }
    }
}

TEST(link_that_swallows_what_it_is_given_ends_in_time) {
    Sender sender;
    const uint64_t id = sender.post(7, 2);
    std::string why;
    while (why.empty() && sender.now < 60 * kSecond) {
        sender.send_all();
        why = sender.pass(50 * kMillisecond);
        for (const Actions::Fail& f : sender.core.take_actions().fail) {
            sender.lose(f.why, {{id, 0, {}}});
            sender.connect();
        }
    }
    CHECK(sender.now < 4 * kPatience + 2 * kSecond);
    CHECK(why.find("was not acknowledged by rank 1") != std::string::npos);
}

// Small ones over the same connection do not make up for it.
TEST(link_ends_although_other_messages_get_through) {
    Sender sender;
    const uint64_t large = sender.post(7, 50);
    std::string why;
    for (int64_t i = 8; why.empty() && sender.now < 60 * kSecond; ++i) {
        const uint64_t small = sender.post(i, 1);
        sender.send_all();
        sender.acknowledge(small);
        why = sender.lose_all(large, kSecond);
    }
    CHECK(sender.now < 4 * kPatience + 2 * kSecond &&
          why.find("microbatch 7") != std::string::npos);
}

// However often its connection is cut: a little more arrives each time.
TEST(link_that_makes_progress_goes_on) {
    Sender sender;
    const uint64_t id = sender.post(7, 40);
    for (uint8_t have = 0; have < 40; ++have) {
        sender.send_all();
        CHECK(sender.pass(2 * kSecond).empty());
        std::vector<uint8_t> bits(5);
        for (uint8_t i = 0; i <= have; ++i) bits[i / 8] |= static_cast<uint8_t>(1 << i % 8);
        sender.lose("cut", {{id, 40, bits}});
        sender.connect();
        CHECK(sender.core.path_errors(sender.now).find("data paths were lost") == 0);
    }
    sender.acknowledge(id);
    CHECK(sender.pass(60 * kSecond).empty() && sender.core.path_errors(sender.now).empty());
}

TEST(link_without_any_path_ends_in_time_if_it_is_needed) {
    for (const bool needed : {true, false}) {
        Sender sender;
        if (needed) sender.post(7, 1);
        sender.core.path_lost(0, sender.epoch(), "cut", sender.now);
        std::string why;
        while (why.empty() && sender.now < 60 * kSecond) {
            why = sender.pass(kSecond);
            for (const auto& [path, epoch] : sender.core.due(sender.now))
                sender.core.dial_failed(path, epoch, "no answer", sender.now);
        }
        CHECK(needed == (why.find("no data path has been up for 10") != std::string::npos));
        CHECK(!needed || sender.now < 2 * kPatience + 3 * kSecond);
    }
}

// A peer that sends nothing is a case of another test.
TEST(link_does_not_end_of_what_happened_while_its_peer_was_stopped) {
    Sender sender;
    const uint64_t id = sender.post(7, 1);
    for (int i = 0; i < 20; ++i) {
        sender.send_all();
        sender.now += 60 * kSecond;
        sender.lose("cut", {{id, 0, {}}});
        sender.connect();
        CHECK(sender.core.check_flow(sender.now).empty());
    }
}

TEST(sockets_are_dialled_with_smaller_segments_after_one_was_of_no_use) {
    Sender sender;
    const uint64_t id = sender.post(7, 1);
    std::vector<uint32_t> segments{sender.core.paths().segment_bytes()};
    for (int i = 0; i < 4; ++i) {
        sender.lose_all(id, 3 * kSecond);
        segments.push_back(sender.core.paths().segment_bytes());
    }
    CHECK((segments == std::vector<uint32_t>{0, 1200, 536, 536, 536}));
    CHECK(sender.core.path_errors(sender.now).find("more than 536 bytes") != std::string::npos);
    // Between two processes of a host nothing can drop them.
    Sender local(0);
    local.lose_all(local.post(7, 1), 3 * kSecond);
    CHECK(local.core.paths().segment_bytes() == 0);
    // One that was cut at once says nothing of packets.
    Sender cut;
    const uint64_t one = cut.post(7, 1);
    for (int i = 0; i < 5; ++i) cut.lose_all(one, kSecond);
    CHECK(cut.core.paths().segment_bytes() == 0);
    // One that has carried something is not to blame.
    Sender useful;
    const uint64_t two = useful.post(7, 2);
    useful.send_all();
    CHECK(useful.pass(3 * kSecond).empty());
    useful.lose("cut", {{two, 2, {1}}});
    CHECK(useful.core.paths().segment_bytes() == 0);
}

// Or the message would go over each in vain before smaller segments are tried.
TEST(sockets_with_the_segments_of_one_that_was_of_no_use_are_dialled_anew) {
    Sender sender(std::nullopt, 4);
    const uint64_t id = sender.post(7, 1);
    for (const size_t others : {3u, 3u, 0u}) {
        sender.lose_all(id, 3 * kSecond);
        const auto failed = sender.core.take_actions().fail;
        CHECK(failed.size() == others);
        for (const Actions::Fail& f : failed) {
            const uint32_t lost = sender.core.paths()[f.path].machine.epoch();
            CHECK(f.path != 0 && sender.core.path_lost(f.path, lost, f.why, sender.now));
            Frame report = BitmapFrame{f.path, lost, {}};
            CHECK(sender.core.handle(report, sender.now, sender.now).empty());
        }
        CHECK(sender.pass(kSecond).empty());
        if (others > 0) sender.connect();
    }
}

// The acceptor's data got nowhere: the dialler, which makes the connections, hears it by the fence.
TEST(sockets_are_dialled_with_smaller_segments_when_the_peer_says_that_nothing_came) {
    for (const bool something : {false, true}) {
        Sender dialler;
        LinkCore& core = dialler.core;
        core.grant_room(core.add_room(1, {0, 1, kChunk}, Memory::anonymous(kChunk), false));
        if (something) {
            ChunkHeader h;
            h.epoch = dialler.epoch();
            h.serial = 1;
            h.chunk_bytes = kChunk;
            h.message = message(0, kChunk, 1);
            h.message.id = 5;
            CHECK(core.finish_chunk(core.begin_chunk(h), true, 0) == kChunk);
        }
        CHECK(dialler.pass(3 * kSecond).empty());
        Frame fence = FenceFrame{0, dialler.epoch(), {9}};
        CHECK(core.handle(fence, dialler.now, dialler.now).empty());
        CHECK(core.paths().segment_bytes() == (something ? 0 : 1200));
    }
}
