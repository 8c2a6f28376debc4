#include <random>

#include "check.hpp"
#include "crypto/crc32c.hpp"
#include "wire/chunk.hpp"
#include "wire/frames.hpp"

using namespace pipemorph;

namespace {

MessageInfo some_message() {
    MessageInfo m;
    m.id = 77;
    m.key = {1, 2, 3, 1, 4};
    m.note = "sixteen bytes ok";
    m.bytes = 5'000'000;
    m.posted_ns = 123;
    m.started_ns = 456;
    return m;
}

ChunkHeader some_chunk() {
    ChunkHeader h;
    h.path = 3;
    h.epoch = 9;
    h.slot = 5;
    h.serial = 1234567890123;
    h.index = 4;
    h.chunk_bytes = 1 << 20;
    h.message = some_message();
    return h;
}

using Encoded = std::array<uint8_t, kChunkHeaderSize>;

Encoded encoded(const ChunkHeader& h) {
    Encoded out;
    encode_chunk(h, out);
    return out;
}

std::vector<Frame> one_of_each() {
    return {ConfirmFrame{Transport::shm},
            AckFrame{{42, 43}, {{1, 2, 3, 4, 5, 6}, {0, 7, 8, 9, 10, 11}}},
            InlineFrame{some_message()},
            FenceFrame{1, 2, {3, 4, 5}},
            BitmapFrame{1, 2, {{3, 10, {0xff, 0x03}}, {4, 0, {}}}},
            MappedFrame{3, "no memory"},
            PingFrame{1, 2},
            PongFrame{1, 2, 3, 4},
            ByeFrame{"done", true}};
}

}  // namespace

TEST(chunk_header_round_trip) {
    const ChunkHeader h = some_chunk();
    const auto back = decode_chunk(encoded(h));
    CHECK(back);
    CHECK(back->path == 3 && back->epoch == 9 && back->slot == 5 && back->serial == h.serial);
    CHECK(back->index == 4 && back->chunk_bytes == h.chunk_bytes);
    CHECK(back->message.key == h.message.key && back->message.note == h.message.note);
    CHECK(back->message.id == 77 && back->message.bytes == 5'000'000);
    CHECK(back->message.posted_ns == 123 && back->message.started_ns == 456);
    CHECK(back->chunks() == 5 && back->length() == 5'000'000 - 4 * (1 << 20));
}

TEST(every_damaged_chunk_header_is_noticed) {
    const Encoded good = encoded(some_chunk());
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
        Encoded bad = good;
        bad[bit / 8] = static_cast<uint8_t>(bad[bit / 8] ^ (1 << (bit % 8)));
        CHECK(!decode_chunk(bad));
    }
    for (size_t n = 0; n < good.size(); ++n) CHECK(!decode_chunk(Bytes(good).first(n)));
}

// With a right checksum: what a broken or hostile but authenticated peer could say.
TEST(hostile_chunk_headers_are_refused) {
    const auto refused = [](auto change) {
        ChunkHeader h = some_chunk();
        change(h);
        return !decode_chunk(encoded(h));
    };
    CHECK(!refused([](ChunkHeader&) {}));
    CHECK(refused([](ChunkHeader& h) { h.index = 5; }));
    CHECK(refused([](ChunkHeader& h) { h.index = UINT32_MAX; }));
    CHECK(refused([](ChunkHeader& h) { h.chunk_bytes = 0; }));
    CHECK(refused([](ChunkHeader& h) { h.chunk_bytes = 1; }));
    CHECK(refused([](ChunkHeader& h) { h.message.bytes = 0; }));
    CHECK(refused([](ChunkHeader& h) { h.message.bytes = UINT64_MAX; }));
    CHECK(refused([](ChunkHeader& h) { h.message.bytes = UINT64_MAX - (1 << 20) + 2; }));
    CHECK(refused([](ChunkHeader& h) { h.message.id = 0; }));
    CHECK(refused([](ChunkHeader& h) { h.message.key.direction = 2; }));
    CHECK(refused([](ChunkHeader& h) { h.message.key.direction = -1; }));
    CHECK(refused([](ChunkHeader& h) { h.type = static_cast<ChunkHeader::Type>(9); }));
    CHECK(refused([](ChunkHeader& h) { h.message.note = std::string(65, 'x'); }));
}

TEST(frames_round_trip) {
    for (const Frame& frame : one_of_each()) {
        const EncodedFrame e = encode_frame(frame);
        const auto back = decode_frame(e.type, e.body);
        CHECK(back && back->index() == frame.index());
        CHECK(encode_frame(*back).body == e.body);

        std::vector<uint8_t> wire;
        append_frame(wire, e, 5, 6);
        const auto header = decode_frame_header(Bytes(wire).first(kFrameHeaderSize));
        CHECK(header && header->sequence == 5 && header->acknowledged == 6);
        CHECK(header->type == e.type && header->body_bytes == e.body.size());
    }
}

TEST(truncated_and_overlong_frames_are_refused) {
    for (const Frame& frame : one_of_each()) {
        EncodedFrame e = encode_frame(frame);
        for (size_t n = 0; n < e.body.size(); ++n)
            CHECK(!decode_frame(e.type, Bytes(e.body).first(n)));
        e.body.push_back(0);
        CHECK(!decode_frame(e.type, e.body));
    }
}

TEST(hostile_frames_are_refused) {
    // Counts that promise more than there is must not make anybody allocate it.
    const std::vector<uint8_t> huge(16, 0xff);
    for (uint8_t type = 0; type < 20; ++type) CHECK(!decode_frame(type, huge) || type == 7);
    CHECK(!decode_frame(2, std::vector<uint8_t>{0xff, 0xff, 0xff, 0xff}));
    std::vector<uint8_t> header;
    append_frame(header, {4, {}}, 1, 1);
    CHECK(decode_frame_header(header));
    auto too_long = header;
    too_long[2] = 0xff;
    CHECK(!decode_frame_header(too_long));
    auto no_type = header;
    no_type[4] = 0;
    CHECK(!decode_frame_header(no_type));
    auto unknown = header;
    unknown[4] = 14;
    CHECK(!decode_frame_header(unknown));
    CHECK(!decode_frame(1, std::vector<uint8_t>{0}));
    CHECK(!decode_frame(1, std::vector<uint8_t>{5}));
}

TEST(random_frames_never_crash) {
    std::mt19937 random(3);
    for (int round = 0; round < 20'000; ++round) {
        std::vector<uint8_t> body(random() % 200);
        for (auto& b : body) b = static_cast<uint8_t>(random() % 4 == 0 ? random() : 0);
        const auto frame = decode_frame(static_cast<uint8_t>(random() % 12), body);
        if (frame) CHECK(encode_frame(*frame).body.size() == body.size());
    }
}
