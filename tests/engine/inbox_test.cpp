// Room for sizes that change.
#include "protocol/inbox.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "check.hpp"

using namespace pipemorph;

namespace {

// What is reserved in direction 0, and what has come of it.
struct Reserved {
    Inbox in;
    uint64_t bytes = 0;
    size_t segments = 0;
    std::vector<uint64_t> peaks;  // the most of each place

    void reserve(uint32_t slots, uint64_t each) {
        if (peaks.size() < slots) peaks.resize(slots);
        for (uint32_t i = 0; i < slots; ++i) peaks[i] = std::max(peaks[i], each);
        for (const Inbox::Room& room : in.missing(0, slots, each)) {
            in.add_segment(0, room, memory);
            bytes += room.slots * room.bytes;
            ++segments;
        }
        CHECK(in.missing(0, slots, each).empty());
        CHECK(bytes < 4 * std::accumulate(peaks.begin(), peaks.end(), uint64_t{0}));
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
