// Destinations that are posted for messages of the same key.
#include "protocol/inbox.hpp"

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
        grants = in.grant_segment(in.add_segment(0, 2, 2 * kChunk, Memory::anonymous(4 * kChunk)));
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
