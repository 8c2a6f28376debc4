#include "wire/seal.hpp"

#include "check.hpp"
#include "wire/frames.hpp"

using namespace pipemorph;

namespace {

Digest key(uint8_t fill) {
    Digest out;
    out.fill(fill);
    return out;
}

std::vector<uint8_t> frame(uint8_t fill) {
    return std::vector<uint8_t>(40, fill);
}

}  // namespace

TEST(seal_fits_what_was_said_in_its_order) {
    Sealer says(key(1));
    Sealer hears(key(1));
    for (uint8_t i = 0; i < 10; ++i) CHECK(hears.fits(frame(i), says.seal(frame(i))));
}

TEST(seal_does_not_fit_what_was_repeated_left_out_or_moved) {
    Sealer says(key(1));
    const Seal first = says.seal(frame(1));
    const Seal second = says.seal(frame(1));
    CHECK(first != second);
    Sealer repeated(key(1));
    CHECK(repeated.fits(frame(1), first) && !repeated.fits(frame(1), first));
    Sealer left_out(key(1));
    CHECK(!left_out.fits(frame(1), second));
}

TEST(seal_does_not_fit_another_frame_or_key_or_length) {
    Sealer says(key(1));
    const Seal seal = says.seal(frame(1));
    for (size_t bit = 0; bit < frame(1).size() * 8; ++bit) {
        auto altered = frame(1);
        altered[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        CHECK(!Sealer(key(1)).fits(altered, seal));
    }
    for (size_t bit = 0; bit < seal.size() * 8; ++bit) {
        Seal altered = seal;
        altered[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        CHECK(!Sealer(key(1)).fits(frame(1), altered));
    }
    CHECK(!Sealer(key(2)).fits(frame(1), seal));
    CHECK(!Sealer(key(1)).fits(frame(1), Bytes(seal).first(8)));
    CHECK(!Sealer(key(1)).fits(frame(1), {}));
}

TEST(seal_covers_all_of_a_frame_and_goes_behind_it) {
    Sealer says(key(1));
    std::vector<uint8_t> wire = {1, 2, 3};
    const EncodedFrame frame = encode_frame(AckFrame{{7}, {}});
    append_frame(wire, frame, 5, 6, &says);
    const size_t size = kFrameHeaderSize + frame.body.size();
    CHECK(wire.size() == 3 + size + kSealSize);
    const Bytes sent = Bytes(wire).subspan(3);
    CHECK(Sealer(key(1)).fits(sent.first(size), sent.subspan(size)));
}
