#include "wire/mac.hpp"

#include <algorithm>

namespace pipemorph {

Mac FrameMac::mac(Bytes frame) {
    std::array<uint8_t, 8> place;
    for (size_t i = 0; i < place.size(); ++i) place[i] = static_cast<uint8_t>(place_ >> (8 * i));
    ++place_;
    const Digest whole = mac_.update(place).update(frame).finish();
    Mac out;
    std::copy_n(whole.begin(), out.size(), out.begin());
    return out;
}

}  // namespace pipemorph
