#include "wire/mac.hpp"

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
    FrameMac says(key(1));
    FrameMac hears(key(1));
    for (uint8_t i = 0; i < 10; ++i) CHECK(hears.fits(frame(i), says.mac(frame(i))));
}

TEST(seal_does_not_fit_what_was_repeated_left_out_or_moved) {
    FrameMac says(key(1));
    const Mac first = says.mac(frame(1));
    const Mac second = says.mac(frame(1));
    CHECK(first != second);
    FrameMac repeated(key(1));
    CHECK(repeated.fits(frame(1), first) && !repeated.fits(frame(1), first));
    FrameMac skipping(key(1));
    CHECK(!skipping.fits(frame(1), second));
}

TEST(seal_does_not_fit_another_frame_or_key_or_length) {
    FrameMac says(key(1));
    const Mac mac = says.mac(frame(1));
    for (size_t bit = 0; bit < frame(1).size() * 8; ++bit) {
        auto altered = frame(1);
        altered[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        CHECK(!FrameMac(key(1)).fits(altered, mac));
    }
    for (size_t bit = 0; bit < mac.size() * 8; ++bit) {
        Mac altered = mac;
        altered[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        CHECK(!FrameMac(key(1)).fits(frame(1), altered));
    }
    CHECK(!FrameMac(key(2)).fits(frame(1), mac));
    CHECK(!FrameMac(key(1)).fits(frame(1), Bytes(mac).first(8)));
    CHECK(!FrameMac(key(1)).fits(frame(1), {}));
}

TEST(seal_covers_all_of_a_frame_and_goes_behind_it) {
    FrameMac says(key(1));
    std::vector<uint8_t> wire = {1, 2, 3};
    const EncodedFrame frame = encode_frame(AckFrame{{7}, {}});
    append_frame(wire, frame, 5, 6, &says);
    const size_t size = kFrameHeaderSize + frame.body.size();
    CHECK(wire.size() == 3 + size + kMacSize);
    const Bytes sent = Bytes(wire).subspan(3);
    CHECK(FrameMac(key(1)).fits(sent.first(size), sent.subspan(size)));
}
