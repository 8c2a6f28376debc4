// The rules of a link: what it does with frames, when it answers, and which path takes what.
#include "protocol/link_core.hpp"

#include <algorithm>

#include "check.hpp"
#include "messages.hpp"

using namespace pipemorph;

namespace {

// What a core has to say, as a flush would write it.
std::vector<Frame> said_by(LinkCore& core) {
    core.collect();
    std::vector<uint8_t> wire;
    core.stream().write(wire, 1 << 20);
    std::vector<Frame> frames;
    for (Bytes rest = wire; !rest.empty();) {
        const auto h = decode_frame_header(rest.first(kFrameHeaderSize));
        CHECK(h);
        frames.push_back(
            decode_frame(h->type, rest.subspan(kFrameHeaderSize, h->body_bytes)).value());
        rest = rest.subspan(kFrameHeaderSize + h->body_bytes);
    }
    return frames;
}

}  // namespace

// Posted before the receiver has reserved anything, which then says all of it at once.
TEST(a_message_waits_for_the_largest_of_the_slots_that_are_granted_together) {
    for (const bool small_first : {true, false}) {
        LinkCore core({true, 1, 1, kChunk});
        core.assign_paths({}, Transport::tcp, 1);
        core.attach(0, 1, std::nullopt, 0);
        std::vector<uint8_t> payload(5 * kChunk);
        const auto large = core.post(message(0, 5 * kChunk), payload.data(), nullptr, 1, 1);
        AckFrame slots{{}, {{0, 0, 1, 0, 0, kChunk}, {0, 1, 1, 1, 0, 5 * kChunk}}};
        if (!small_first) std::swap(slots.slots[0], slots.slots[1]);
        Frame frame = std::move(slots);
        CHECK(core.handle(frame, 2, 2).empty());
        CHECK(core.out().ticket(large->info.id) == Outbox::Ticket::in_flight);
        CHECK(core.next_chunk(0, 1, 2, 2)->message->slot->slot == 1);
    }
}

TEST(acknowledgements_and_grants_wait_for_each_other) {
    LinkCore core({false, 1, 1, kChunk});
    core.assign_paths({}, Transport::tcp, 1);
    core.attach(0, 1, std::nullopt, 0);
    core.grant_room(core.add_room(0, {0, 2, kChunk}, Memory::anonymous(2 * kChunk), false));
    const auto granted = said_by(core);
    CHECK(granted.size() == 1 && std::get<AckFrame>(granted[0]).messages.empty());
    const auto slots = std::get<AckFrame>(granted[0]).slots;
    CHECK(slots.size() == 2);

    const auto arrives = [&](int64_t number) {
        ChunkHeader h;
        h.epoch = 1;
        h.slot = slots[static_cast<size_t>(number)].slot;
        h.serial = slots[static_cast<size_t>(number)].serial;
        h.chunk_bytes = kChunk;
        h.message.id = static_cast<uint64_t>(number) + 1;
        h.message.bytes = kChunk;
        h.message.key.microbatch = number;
        core.finish_chunk(core.begin_chunk(h), true, 0);
        CHECK(core.take_actions().flush);
        const auto arrived = core.take(h.message.key);
        core.release(arrived->slot.value(), arrived->serial, false);
    };
    for (const int64_t number : {0, 1}) arrives(number);
    const auto both = said_by(core);
    CHECK(both.size() == 1);
    const auto& ack = std::get<AckFrame>(both[0]);
    CHECK((ack.messages == std::vector<uint64_t>{1, 2}) && ack.slots.size() == 2);
    CHECK(ack.slots[0].serial == slots[0].serial + 1 && said_by(core).empty());
}

TEST(a_sender_is_short_of_slots_when_it_knows_of_no_more_than_one) {
    LinkCore core({false, 1, 1, kChunk});
    core.assign_paths({}, Transport::tcp, 1);
    core.attach(0, 1, std::nullopt, 0);
    core.grant_room(core.add_room(0, {0, 4, kChunk}, Memory::anonymous(4 * kChunk), false));
    const auto granted = said_by(core);
    const auto slots = std::get<AckFrame>(granted.at(0)).slots;
    std::vector<Arrived> held;
    const auto arrives = [&](size_t number) {
        ChunkHeader h;
        h.epoch = 1;
        h.slot = slots[number].slot;
        h.serial = slots[number].serial;
        h.chunk_bytes = kChunk;
        h.message.id = number + 1;
        h.message.bytes = kChunk;
        h.message.key.microbatch = static_cast<int64_t>(number);
        CHECK(core.finish_chunk(core.begin_chunk(h), true, 0) == kChunk);
        held.push_back(core.take(h.message.key).value());
    };
    const auto release = [&](size_t number) {
        core.release(held[number].slot.value(), held[number].serial, false);
    };
    arrives(0);
    arrives(1);
    CHECK(!core.is_short_of_slots(0));
    release(0);
    CHECK(!core.is_short_of_slots(0) && !core.is_short_of_slots(1));  // two that it knows of
    arrives(2);
    CHECK(core.is_short_of_slots(0));  // one, one that waits, and two that are in use
    said_by(core);
    CHECK(!core.is_short_of_slots(0));  // it knows of both
    arrives(3);
    CHECK(!core.is_short_of_slots(0));  // it has one more, and there is none to tell of
}

// Otherwise each would leave it to the others, which together are faster than it is.
TEST(rails_that_are_alike_do_not_leave_a_chunk_to_each_other) {
    LinkCore core({true, 1, 1, kChunk});
    core.assign_paths({{0, 0}, {1, 1}, {2, 2}}, Transport::tcp, 0);
    core.start(1);
    for (const auto& [path, epoch] : core.due(1)) {
        QpAddress qp;
        qp.mtu = 1;
        CHECK(core.offer(path, epoch, qp, "", 1) && core.take_answer({path, epoch, "", qp}, 1));
        CHECK(core.connected(path, epoch, "", 1) && core.path_up(path, epoch, 1));
        core.path_measured(path, epoch, 1e9, 1);
    }
    Frame grant = AckFrame{{}, {{0, 0, 1, 0, 0, kChunk}}};
    CHECK(core.handle(grant, 1, 1).empty());
    MessageInfo info;
    info.bytes = kChunk;
    std::vector<uint8_t> payload(kChunk);
    core.post(info, payload.data(), nullptr, 1, 1);
    int given = 0;
    for (uint32_t path = 0; path < 3; ++path) given += core.next_chunk(path, 1, 1, 1).has_value();
    CHECK(given == 1);
}

// A rail whose memory is full takes no more, so it must not look like one that others should leave
// chunks to.
TEST(rails_do_not_wait_for_one_that_has_no_room) {
    constexpr uint64_t kBlocks = 8;
    constexpr int64_t kRoundTrip = 100'000;
    PathSet paths(kChunk, 2000 * kChunk);
    paths.assign({{0, 0}, {1, 1}}, Transport::tcp, 0);
    for (const auto& [path, epoch] : paths.due(1)) {
        paths.hold(path);
        paths.connected(path, epoch, 1);
        paths.pace(path, epoch);
    }
    int64_t now = 1;
    uint64_t sent[2];
    // As much as goes out at once, and a round trip later it is there.
    const auto fill = [&](uint64_t most_of_first) {
        sent[0] = sent[1] = 0;
        for (bool any = true; any;) {
            any = false;
            for (uint32_t path = 0; path < 2; ++path) {
                if ((path == 0 && sent[0] == most_of_first) || !paths.has_room(path, now)) continue;
                paths.chunk_assigned(path, kChunk, now);
                ++sent[path];
                any = true;
            }
        }
        now += kRoundTrip;
        for (uint32_t path = 0; path < 2; ++path)
            for (uint64_t i = 0; i < sent[path]; ++i) paths.delivered(path, 1, now);
    };
    for (int i = 0; i < 6; ++i) fill(1000);
    const uint64_t window = sent[1];
    CHECK(window >= 8 * kBlocks && sent[0] == window);
    fill(kBlocks);
    CHECK(sent[1] <= window + 1);  // half of one that could have grown to twice as much
    paths.limit(0, 1, kBlocks * kChunk);
    fill(kBlocks);
    CHECK(sent[0] == kBlocks && sent[1] >= 2 * window - 1);
}

// Pauses double up to 2 s.
TEST(rails_that_cannot_be_connected_are_dialled_less_and_less_often) {
    PathSet paths(kChunk, 0);
    paths.assign({{0, 0}}, Transport::tcp, 0);
    int dialled = 0;
    for (int64_t now = 1; now < 120'000'000'000; now += 10'000'000)
        for (const auto& [path, epoch] : paths.due(now)) {
            ++dialled;
            paths.dial_failed(path, epoch, "no answer", now);
        }
    CHECK(dialled > 60 && dialled < 80);
}

// The sender would send again what the report does not name, although it is here.
TEST(acknowledgements_are_not_overtaken_by_reports) {
    LinkCore core({false, 1, 1, kChunk});
    core.assign_paths({}, Transport::tcp, 1);
    core.attach(0, 1, std::nullopt, 0);
    core.grant_room(core.add_room(0, {0, 1, kChunk}, Memory::anonymous(kChunk), false));
    const auto granted = said_by(core);
    ChunkHeader h;
    h.epoch = 1;
    h.serial = std::get<AckFrame>(granted.at(0)).slots.at(0).serial;
    h.chunk_bytes = kChunk;
    h.message.id = 1;
    h.message.bytes = kChunk;
    core.finish_chunk(core.begin_chunk(h), true, 0);
    Frame fence = FenceFrame{0, 1, {1}};
    CHECK(core.handle(fence, 0, 0).empty());
    core.retired(0, {1}, 0);
    const auto frames = said_by(core);
    CHECK(std::get<AckFrame>(frames.at(0)).messages.at(0) == 1);
    const auto report = std::find_if(frames.begin(), frames.end(), [](const Frame& f) {
        return std::holds_alternative<BitmapFrame>(f);
    });
    CHECK(report != frames.end() && std::get<BitmapFrame>(*report).reports.at(0).chunks == 0);
}

// An empty message takes no slot: the acknowledgement of one too many waits for the application.
TEST(link_core_bounds_empty_messages_that_nobody_takes) {
    constexpr int64_t kMany = 10'000;
    LinkCore core({false, 0, 1, 4096});
    size_t acknowledged = 0;
    const auto count = [&] {
        for (const Frame& frame : said_by(core))
            if (const auto* ack = std::get_if<AckFrame>(&frame))
                acknowledged += ack->messages.size();
    };
    const auto key = [](int64_t i) { return Key{0, 0, i, 0, 0}; };
    for (int64_t i = 0; i < kMany; ++i) {
        InlineFrame empty;
        empty.message.id = static_cast<uint64_t>(i) + 1;
        empty.message.key = key(i);
        Frame frame = std::move(empty);
        CHECK(core.handle(frame, 0, 0).empty());
    }
    count();
    CHECK(acknowledged == 4096);
    for (int64_t i = 0; i < kMany; ++i) CHECK(core.take(key(i)));
    CHECK(core.take_actions().flush);
    count();
    CHECK(acknowledged == kMany);
    // And then as before.
    InlineFrame last;
    last.message.id = kMany + 1;
    last.message.key = key(kMany);
    Frame frame = std::move(last);
    CHECK(core.handle(frame, 0, 0).empty());
    count();
    CHECK(acknowledged == kMany + 1);
}

// What is under way would be less than nothing, and no path would ever be late, or each at once.
TEST(an_acknowledgement_of_what_was_not_sent_breaks_the_protocol) {
    LinkCore core({false, 1, 1, kChunk});
    core.assign_paths({}, Transport::tcp, 1);
    core.attach(0, 1, std::nullopt, 0);
    std::vector<uint8_t> payload(2 * kChunk);
    core.post(message(0, 2 * kChunk), payload.data(), nullptr, 1, 1);
    const auto acknowledge = [&] {
        Frame ack = AckFrame{{1}, {}};
        return core.handle(ack, 2, 2);
    };
    const auto is_refused = [&] {
        return acknowledge().find("which has not been sent") != std::string::npos;
    };
    CHECK(is_refused());
    Frame grant = AckFrame{{}, {{0, 0, 1, 0, 0, 2 * kChunk}}};
    CHECK(core.handle(grant, 2, 2).empty());
    CHECK(core.next_chunk(0, 1, 2, 2));
    CHECK(is_refused());
    CHECK(core.next_chunk(0, 1, 2, 2));
    CHECK(core.out().bytes_under_way() == 2 * kChunk);
    CHECK(acknowledge().empty() && core.out().bytes_under_way() == 0);
    CHECK(acknowledge().empty());  // once more: it is known no more
}
