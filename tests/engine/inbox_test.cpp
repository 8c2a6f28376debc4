// Destinations that are posted for messages of the same key, and room for sizes that change.
#include "protocol/inbox.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 4096;
const Key kKey{0, 0, 0, 0, 0};

// An inbox of two slots, and a sender that has them in turn.
struct Fed {
    Inbox in;
    std::vector<SlotGrant> grants;
    uint64_t next_id = 1;

    Fed() {
        grants =
            in.grant_segment(in.add_segment(0, {0, 2, 2 * kChunk}, Memory::anonymous(4 * kChunk)));
    }
    // One chunk of a message into a slot. Whether the message is whole now.
    bool chunk(uint64_t id, uint64_t bytes, uint32_t index, uint8_t content) {
        ChunkHeader h;
        h.slot = grants.front().slot;
        h.serial = grants.front().serial;
        h.index = index;
        h.chunk_bytes = kChunk;
        h.message.id = id;
        h.message.key = kKey;
        h.message.bytes = bytes;
        const ChunkSink sink = in.begin_chunk(h);
        CHECK(sink.verdict == ChunkSink::Verdict::take);
        *sink.data = content;
        const auto done = in.finish_chunk(sink, true, 3);
        if (done.message_complete) grants.erase(grants.begin());
        if (done.grant) grants.push_back(*done.grant);
        return done.message_complete;
    }
    void arrive(uint8_t content) { CHECK(chunk(next_id++, 1, 0, content)); }
    Arrived take() {
        auto taken = in.take(kKey);
        CHECK(taken);
        if (taken->slot) grants.push_back(*in.release(*taken->slot, taken->serial));
        return *taken;
    }
};

}  // namespace

TEST(a_destination_is_for_the_oldest_message_of_its_key_and_for_no_other) {
    Fed fed;
    uint8_t first = 0;
    uint8_t second = 0;

    // It is there already when it is posted for again.
    CHECK(fed.in.post(kKey, {&first, 1, nullptr}));
    fed.arrive('a');
    CHECK(!fed.in.post(kKey, {&second, 1, nullptr}));
    Arrived taken = fed.take();
    CHECK(taken.data == &first && !taken.copy_to && first == 'a');
    CHECK(fed.in.post(kKey, {&second, 1, nullptr}));
    fed.arrive('b');
    taken = fed.take();
    CHECK(taken.data == &second && second == 'b' && first == 'a');

    // Two are there, one of them before anything was posted: that is the one.
    fed.arrive('c');
    CHECK(fed.in.post(kKey, {&first, 1, nullptr}));
    fed.arrive('d');
    CHECK(first == 'a');  // the caller of `take` copies
    taken = fed.take();
    CHECK(*taken.data == 'c' && taken.copy_to && taken.copy_to->data == &first);
    taken = fed.take();
    CHECK(*taken.data == 'd' && !taken.copy_to);
    CHECK(!fed.in.take(kKey));
}

TEST(a_destination_posted_for_half_a_message_is_not_the_next_ones) {
    Fed fed;
    std::vector<uint8_t> into(2 * kChunk);
    CHECK(!fed.chunk(1, into.size(), 0, 'a'));
    CHECK(fed.in.post(kKey, {into.data(), into.size(), nullptr}));
    CHECK(!fed.in.post(kKey, {into.data(), into.size(), nullptr}));
    CHECK(fed.chunk(1, into.size(), 1, 'a'));
    CHECK(!fed.chunk(2, into.size(), 0, 'b') && fed.chunk(2, into.size(), 1, 'b'));
    // What has arrived is as good as before when the link is dead, and so is where it is to go.
    fed.in.abandon();
    const Arrived older = fed.take();
    CHECK(*older.data == 'a' && older.copy_to && older.copy_to->data == into.data());
    const Arrived newer = fed.take();
    CHECK(*newer.data == 'b' && !newer.copy_to);
}

TEST(a_destination_that_an_empty_message_finds_is_its_own) {
    Fed fed;
    uint8_t first = 0;
    CHECK(fed.in.post(kKey, {&first, 1, nullptr}));
    MessageInfo empty;
    empty.key = kKey;
    fed.in.deliver_empty(empty, 3);
    CHECK(!fed.in.post(kKey, {&first, 1, nullptr}));
    fed.arrive('a');
    CHECK(fed.take().copy_to->data == &first && first == 0);
    CHECK(!fed.take().copy_to);
}

namespace {

// What is reserved in direction 0, and what has come of it.
struct Reserved {
    Inbox in;
    uint64_t bytes = 0;
    size_t segments = 0;
    std::vector<uint64_t> asked;  // the most of each place

    void reserve(uint32_t slots, uint64_t each) {
        if (asked.size() < slots) asked.resize(slots);
        for (uint32_t i = 0; i < slots; ++i) asked[i] = std::max(asked[i], each);
        for (const Inbox::Room& room : in.missing(0, slots, each)) {
            in.add_segment(0, room, memory);
            bytes += room.slots * room.bytes;
            ++segments;
        }
        CHECK(in.missing(0, slots, each).empty());
        CHECK(bytes < 4 * std::accumulate(asked.begin(), asked.end(), uint64_t{0}));
    }
    // Only counted: nothing is written there.
    std::shared_ptr<Memory> memory = Memory::anonymous(4096);
};

}  // namespace

TEST(slots_begin_at_whole_pages_however_their_memory_was_rounded_up) {
    constexpr uint64_t kEach = uint64_t{700} << 10;
    Inbox in;
    const auto memory = Memory::anonymous(3 * kEach);
    CHECK(memory->size() / 3 % 64 != 0);
    for (const SlotGrant& grant : in.grant_segment(in.add_segment(0, {0, 3, kEach}, memory)))
        CHECK(grant.offset % 4096 == 0);
}

TEST(room_is_made_exactly_for_one_size_and_for_a_second) {
    Reserved r;
    r.reserve(4, 1000);
    r.reserve(4, 1000);
    CHECK(r.bytes == 4000 && r.segments == 1);
    r.reserve(4, 1100);
    CHECK(r.bytes == 8400 && r.segments == 2);
    r.reserve(6, 900);  // the other four are large enough
    CHECK(r.bytes == 10'200 && r.segments == 3);
    r.reserve(6, 1050);  // they still are, and what the two have is little
    CHECK(r.bytes == 12'300 && r.segments == 4);
    r.reserve(1, 1200);
    CHECK(r.bytes == 12'300 + 2100 && r.segments == 5);
}

TEST(room_for_sizes_that_change_for_ever_stays_in_proportion) {
    Reserved growing;
    for (uint64_t each = 1000; each < 200'000; each += 1000) growing.reserve(4, each);
    CHECK(growing.segments < 12);

    Reserved any;
    uint64_t seed = 1;
    for (int i = 0; i < 2000; ++i) {
        seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
        const auto slots = static_cast<uint32_t>(1 + (seed >> 33) % 16);
        any.reserve(slots, 1 + (seed >> 40) % (1000 + 100 * static_cast<uint64_t>(i)));
    }
}
