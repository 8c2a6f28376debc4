#include <algorithm>
#include <limits>
#include <random>

#include "check.hpp"
#include "messages.hpp"
#include "no_memory.hpp"
#include "protocol/inbox.hpp"
#include "protocol/outbox.hpp"
#include "protocol/reliable.hpp"
#include "protocol/telemetry.hpp"

using namespace pipemorph;

namespace {

// An outbox and an inbox with the network between them taken away.
struct Pair {
    Outbox out;
    Inbox in;
    std::vector<uint8_t> source = std::vector<uint8_t>(64 * kChunk);

    explicit Pair(size_t queues = 4) : out(queues, kChunk) {}

    void reserve(int direction, uint32_t slots, uint64_t bytes) {
        const uint32_t segment =
            in.add_segment(direction, {0, slots, bytes}, Memory::anonymous(slots * bytes));
        for (const auto& grant : in.grant_segment(segment)) out.granted(grant);
    }
    uint64_t post(const MessageInfo& m) { return out.post(m, source.data(), nullptr)->info.id; }
    std::optional<ChunkTask> next(uint32_t path = 0, uint32_t epoch = 1) {
        return out.next_chunk(path, epoch, 2, 2);
    }
    // Carries a chunk over. Whether that completed its message (which acknowledges it).
    bool carry(const ChunkTask& task) {
        const ChunkSink sink = in.begin_chunk(task.header);
        if (sink.verdict != ChunkSink::Verdict::take) return false;
        const auto done = in.finish_chunk(sink, true, 3);
        if (done.message_complete) CHECK(out.acknowledged(done.message));
        return done.message_complete;
    }
    void finish_with(const Key& key) {
        const auto arrived = in.take(key);
        CHECK(arrived);
        const auto grant = in.release(*arrived->slot, arrived->serial);
        CHECK(grant);
        out.granted(*grant);
    }
};

}  // namespace

TEST(bitmap_sets_each_bit_once) {
    Bitmap b(13);
    CHECK(!b.full() && b.count() == 0);
    for (size_t i = 0; i < 13; ++i) {
        CHECK(!b.test(i) && b.set(i) && b.test(i) && !b.set(i));
        CHECK(b.count() == i + 1);
    }
    CHECK(b.full());
    b.clear(5);
    b.clear(5);
    CHECK(b.count() == 12 && !b.test(5) && b.set(5) && b.full());
}

TEST(a_message_waits_for_a_slot_and_gives_it_back) {
    Pair p;
    p.post(message(0, 3 * kChunk));
    CHECK(!p.out.has_chunks() && !p.next());
    p.reserve(0, 1, 4 * kChunk);
    p.post(message(1, kChunk));
    for (int i = 0; i < 3; ++i) CHECK(p.carry(*p.next()) == (i == 2));
    CHECK(!p.next());  // the only slot is full
    CHECK(p.in.slots_in_use(0) == 1);
    p.finish_with(message(0, 0).key);
    CHECK(p.in.slots_in_use(0) == 0);
    CHECK(p.carry(*p.next()));
    CHECK(p.in.has(message(1, 0).key) && p.out.in_flight() == 0);
}

TEST(directions_do_not_share_slots) {
    Pair p;
    p.reserve(0, 1, kChunk);
    p.reserve(1, 1, kChunk);
    p.post(message(0, kChunk, 0));
    p.post(message(1, kChunk, 0));  // has to wait
    p.post(message(0, kChunk, 1));
    CHECK(p.carry(*p.next()));
    CHECK(p.carry(*p.next()));
    CHECK(!p.next());
    CHECK(p.in.has(message(0, 0, 0).key) && p.in.has(message(0, 0, 1).key));
}

TEST(a_queue_that_waits_does_not_hold_up_the_others) {
    Pair p(2);
    p.reserve(0, 1, 8 * kChunk);
    p.reserve(0, 2, kChunk);
    p.post(message(0, 8 * kChunk));  // queue 0, takes the large slot
    p.post(message(1, kChunk));      // queue 1
    p.post(message(2, 8 * kChunk));  // queue 0, has to wait for the large slot
    p.post(message(3, kChunk));      // queue 1, need not wait
    std::vector<int64_t> order;
    while (const auto task = p.next()) {
        order.push_back(task->message->info.key.microbatch);
        p.carry(*task);
    }
    // Small ones first; only message 2 remains.
    CHECK((order == std::vector<int64_t>{1, 3, 0, 0, 0, 0, 0, 0, 0, 0}));
    CHECK(p.out.in_flight() == 1);
}

TEST(messages_of_one_size_leave_one_after_the_other) {
    Pair p;
    p.reserve(0, 3, 9 * kChunk);
    for (int i = 0; i < 3; ++i) p.post(message(i, 9 * kChunk));
    std::vector<int64_t> order;
    while (const auto task = p.next()) {
        order.push_back(task->message->info.key.microbatch);
        p.carry(*task);
    }
    CHECK(order.size() == 27 && std::is_sorted(order.begin(), order.end()));
}

TEST(a_large_message_has_its_turn_among_small_ones) {
    Pair p;
    p.reserve(0, 1, 64 * kChunk);
    p.reserve(0, 160, kChunk);
    p.post(message(0, 64 * kChunk));
    for (int i = 1; i <= 160; ++i) p.post(message(i, kChunk));
    int large = 0;
    for (int i = 0; i < 80; ++i) {
        const auto task = p.next();
        large += task->message->info.key.microbatch == 0;
        p.carry(*task);
    }
    CHECK(large == 10);
}

TEST(a_message_larger_than_any_slot_is_an_error_with_numbers) {
    Pair p;
    p.reserve(0, 2, kChunk);
    const std::string why = THROWS(EngineError, p.post(message(0, kChunk + 1)));
    CHECK(why.find("4097") != std::string::npos && why.find("4096") != std::string::npos);
    // Posted before the receiver had said how large its slots are.
    const uint64_t ticket = p.post(message(0, 5 * kChunk, 1));
    CHECK(p.out.ticket(ticket) == Outbox::Ticket::in_flight);
    p.reserve(1, 1, kChunk);
    CHECK(p.out.ticket(ticket) == Outbox::Ticket::failed);
    CHECK(p.out.failure(ticket).find("20480") != std::string::npos);
    p.post(message(0, kChunk, 1));  // its key and queue are free again
    CHECK(p.carry(*p.next()));
}

TEST(of_very_many_messages_that_fail_none_counts_as_sent) {
    constexpr int64_t kMany = 5000;
    Pair p;
    std::vector<uint64_t> tickets;
    for (int64_t i = 0; i < kMany; ++i) tickets.push_back(p.post(message(i, 2 * kChunk)));
    p.reserve(0, 1, kChunk);
    for (const uint64_t ticket : tickets) {
        CHECK(p.out.ticket(ticket) == Outbox::Ticket::failed);
        CHECK(!p.out.failure(ticket).empty());
    }
}

TEST(a_key_in_flight_is_refused_and_free_after_its_acknowledgement) {
    Pair p;
    p.reserve(0, 2, kChunk);
    p.post(message(0, kChunk));
    const std::string why = THROWS(EngineError, p.post(message(0, kChunk)));
    CHECK(why.find("in flight") != std::string::npos);
    CHECK(p.carry(*p.next()));
    p.post(message(0, kChunk));
}

TEST(a_chunk_counts_once) {
    Pair p;
    p.reserve(0, 1, 2 * kChunk);
    p.post(message(0, 2 * kChunk));
    const auto first = *p.next();
    CHECK(!p.carry(first));
    CHECK(p.in.begin_chunk(first.header).verdict == ChunkSink::Verdict::duplicate);
    const auto second = *p.next();
    CHECK(p.carry(second));
    CHECK(p.in.begin_chunk(second.header).verdict == ChunkSink::Verdict::duplicate);
    p.finish_with(message(0, 0).key);
    // The slot has been granted anew: what is meant for its former use must not touch it.
    CHECK(p.in.begin_chunk(second.header).verdict == ChunkSink::Verdict::stale);
    CHECK(!p.in.take(message(0, 0).key));
}

TEST(two_paths_cannot_write_one_chunk_at_once) {
    Pair p;
    p.reserve(0, 1, 2 * kChunk);
    p.post(message(0, 2 * kChunk));
    const auto task = *p.next();
    const ChunkSink sink = p.in.begin_chunk(task.header);
    CHECK(sink.verdict == ChunkSink::Verdict::take);
    CHECK(p.in.begin_chunk(task.header).verdict == ChunkSink::Verdict::invalid);
    p.in.finish_chunk(sink, false, 3);  // it did not come through
    CHECK(p.in.begin_chunk(task.header).verdict == ChunkSink::Verdict::take);
}

TEST(chunks_that_do_not_fit_their_slot_are_invalid) {
    Pair p;
    p.reserve(0, 1, 2 * kChunk);
    p.post(message(0, 2 * kChunk));
    const ChunkHeader good = p.next()->header;
    const auto verdict = [&](auto change) {
        ChunkHeader h = good;
        change(h);
        return p.in.begin_chunk(h).verdict;
    };
    using V = ChunkSink::Verdict;
    CHECK(verdict([](ChunkHeader& h) { h.slot = 1; }) == V::invalid);
    CHECK(verdict([](ChunkHeader& h) { h.slot = UINT32_MAX; }) == V::invalid);
    CHECK(verdict([](ChunkHeader& h) { h.serial += 1; }) == V::invalid);
    CHECK(verdict([](ChunkHeader& h) { h.message.bytes = 3 * kChunk; }) == V::invalid);
    CHECK(verdict([](ChunkHeader& h) { h.message.key.direction = 1; }) == V::invalid);
    CHECK(verdict([](ChunkHeader&) {}) == V::take);
    CHECK(verdict([](ChunkHeader& h) { h.message.id = 99; }) == V::invalid);
    CHECK(verdict([](ChunkHeader& h) { h.chunk_bytes /= 2; }) == V::invalid);
}

TEST(only_missing_chunks_of_the_lost_path_are_sent_again) {
    Pair p;
    p.reserve(0, 1, 6 * kChunk);
    p.post(message(0, 6 * kChunk));
    CHECK(!p.carry(*p.next(0)));
    const auto lost = *p.next(0);
    const auto elsewhere = *p.next(1);  // still under way on a path that lives
    CHECK(p.out.assigned_to(0, 1) == std::vector<uint64_t>{1});
    CHECK(p.out.assigned_to(0, 2).empty());

    const BitmapFrame report{0, 1, p.in.report({1})};
    p.out.fenced(report);
    p.out.fenced(report);  // said twice, queued once
    const auto again = *p.next(1);
    CHECK(again.header.index == lost.header.index && p.out.chunks_resent == 1);
    CHECK(p.next(1)->header.index == 3);
    CHECK(!p.carry(again) && !p.carry(elsewhere));
    CHECK(p.out.assigned_to(0, 1).empty());
}

TEST(a_report_about_an_unknown_message_means_nothing_came) {
    Pair p;
    p.reserve(0, 1, 2 * kChunk);
    p.post(message(0, 2 * kChunk));
    p.next(0);
    p.next(0);
    p.out.fenced({0, 1, p.in.report({1})});
    CHECK(!p.carry(*p.next(1)) && p.carry(*p.next(1)));
    CHECK(p.out.chunks_resent == 2);
}

TEST(larger_slots_are_added_and_small_messages_keep_the_small_ones) {
    Pair p;
    p.reserve(0, 2, kChunk);
    CHECK(p.in.missing(0, 2, kChunk).empty());
    CHECK(p.in.missing(0, 3, kChunk).front().place == 2);
    CHECK(p.in.missing(0, 2, 2 * kChunk).front().slots == 2);
    CHECK(p.in.missing(1, 2, kChunk).front().slots == 2);
    p.reserve(0, 1, 4 * kChunk);
    p.post(message(0, kChunk));
    p.post(message(1, 4 * kChunk));
    CHECK(p.carry(*p.next()));
    for (int i = 0; i < 4; ++i) p.carry(*p.next());
    CHECK(p.out.in_flight() == 0);
}

TEST(abandoned_tickets_are_told_from_finished_ones) {
    Pair p;
    p.reserve(0, 2, kChunk);
    const uint64_t done = p.post(message(0, kChunk));
    CHECK(p.carry(*p.next()));
    const uint64_t lost = p.post(message(1, kChunk));
    auto hold = std::make_shared<int>(1);
    p.out.post(message(2, kChunk), p.source.data(), hold);
    CHECK(hold.use_count() == 2);
    {
        const NoMemory none;  // it needs none
        p.out.abandon();
    }
    CHECK(hold.use_count() == 1);
    CHECK(p.out.ticket(done) == Outbox::Ticket::done);
    CHECK(p.out.ticket(lost) == Outbox::Ticket::abandoned);
    CHECK(p.out.ticket(99) == Outbox::Ticket::unknown);
}

TEST(empty_messages_need_no_slot) {
    Pair p;
    const uint64_t id = p.post(message(0, 0));
    const auto m = p.out.next_inline(1, 1);
    CHECK(m && m->id == id && !p.out.next_inline(1, 1));
    p.in.deliver_empty(*m, 2);
    CHECK(p.out.acknowledged(id) && !p.out.acknowledged(id));
    const auto arrived = p.in.take(message(0, 0).key);
    CHECK(arrived && !arrived->slot);
}

// Any interleaving of posts, deliveries, losses, reports and releases delivers each message once.
TEST(random_losses_still_deliver_exactly_once) {
    for (uint32_t seed = 0; seed < 200; ++seed) {
        std::mt19937 random(seed);
        Pair p(1 + seed % 5);
        p.reserve(0, 3, 8 * kChunk);
        constexpr uint32_t kPaths = 3;
        std::vector<uint32_t> epoch(kPaths, 1);
        std::vector<std::deque<ChunkTask>> wire(kPaths);
        std::vector<Key> waiting;
        size_t posted = 0;
        size_t delivered = 0;
        constexpr size_t kMessages = 30;
        for (int step = 0; delivered < kMessages; ++step) {
            CHECK(step < 100'000);
            const uint32_t path = random() % kPaths;
            switch (random() % 6) {
                case 0:
                    if (posted < kMessages) {
                        const auto m =
                            message(static_cast<int64_t>(posted++), 1 + random() % (8 * kChunk));
                        waiting.push_back(m.key);
                        p.post(m);
                    }
                    break;
                case 1:
                case 2:
                    if (const auto task = p.next(path, epoch[path])) wire[path].push_back(*task);
                    break;
                case 3:
                    if (!wire[path].empty()) {
                        p.carry(wire[path].front());
                        wire[path].pop_front();
                    }
                    break;
                case 4:
                    if (random() % 4 == 0) {  // the path breaks and loses what was on it
                        wire[path].clear();
                        const auto assigned = p.out.assigned_to(path, epoch[path]);
                        p.out.fenced({path, epoch[path], p.in.report(assigned)});
                        ++epoch[path];
                    }
                    break;
                case 5:
                    for (auto it = waiting.begin(); it != waiting.end();) {
                        if (!p.in.has(*it)) {
                            ++it;
                            continue;
                        }
                        p.finish_with(*it);
                        CHECK(!p.in.has(*it));
                        ++delivered;
                        it = waiting.erase(it);
                    }
                    break;
            }
        }
        CHECK(p.out.in_flight() == 0 && p.in.slots_in_use(0) == 0);
    }
}

TEST(control_frames_survive_reconnects_in_order_and_once) {
    std::mt19937 random(5);
    ReliableStream a;
    ReliableStream b;
    uint64_t sent = 0;
    uint64_t got = 0;
    std::vector<uint8_t> wire;
    while (got < 500) {
        if (sent < 500) a.send(AckFrame{{++sent}, {}});
        if (random() % 3 == 0) a.write(wire, 200 + random() % 500);
        const bool broken = random() % 10 == 0;  // somewhere, in mid-frame or between two
        if (broken) wire.resize(wire.empty() ? 0 : random() % wire.size());
        while (wire.size() >= kFrameHeaderSize) {
            const auto h = decode_frame_header(Bytes(wire).first(kFrameHeaderSize));
            CHECK(h);
            if (wire.size() < kFrameHeaderSize + h->body_bytes) break;
            const auto frame =
                decode_frame(h->type, Bytes(wire).subspan(kFrameHeaderSize, h->body_bytes));
            const auto verdict = b.received(h->sequence);
            CHECK(verdict != ReliableStream::Verdict::gap);
            if (verdict == ReliableStream::Verdict::deliver)
                CHECK(std::get<AckFrame>(*frame).messages.at(0) == ++got);
            wire.erase(wire.begin(), wire.begin() + static_cast<std::ptrdiff_t>(kFrameHeaderSize +
                                                                                h->body_bytes));
        }
        if (broken || !wire.empty()) {
            wire.clear();
            CHECK(a.resume(b.last_received()));
        } else if (random() % 2 == 0) {
            CHECK(a.acknowledged(b.last_received()));
        }
    }
    CHECK(a.acknowledged(500) && a.all_acknowledged());
    CHECK(!a.acknowledged(501));
    CHECK(!a.resume(499));
    CHECK(b.received(502) == ReliableStream::Verdict::gap);
}

TEST(echoes_say_only_what_can_be) {
    constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    const auto echo = echo_of({1000, 500, 700, 900}, 1100, 2000);
    CHECK(echo && echo->rtt_ns == 800 && echo->peer_minus_ours_ns == 0);
    // A clock that was set back in between is the peer's affair, and no round trip of years.
    CHECK(echo_of({1000, 0, 1'000'000'000'000'000, 0}, 0, 2000)->rtt_ns == 60'000'000'000);
    CHECK(!echo_of({1000, 0, 0, 1001}, 0, 2000));  // shorter than nothing
    for (const int64_t ping : {kLeast, int64_t{-1}, int64_t{0}, int64_t{2001}, kMost})
        CHECK(!echo_of({ping, 0, 0, 0}, 0, 2000));
    for (const int64_t odd : {kLeast, int64_t{-1}, kMost}) {
        CHECK(!echo_of({1, odd, 0, 0}, 0, 2000) && !echo_of({1, 0, odd, 0}, 0, 2000));
        CHECK(!echo_of({1, 0, 0, odd}, 0, 2000));
    }
}

TEST(echo_summary_and_offset) {
    EchoMeter meter;
    CHECK(!meter.summary() && !meter.clock_offset_ns());
    for (int64_t i = 1; i <= 100; ++i) meter.add(i * 1000, i == 7 ? -5 : 1000 * i);
    meter.add(500, 42);  // the quietest echo says what the clocks differ by
    const auto s = *meter.summary();
    CHECK(s.min_ns == 500 && s.p99_ns == 99'000);
    CHECK(*meter.clock_offset_ns() == -42);
}
