#include "protocol/reliable.hpp"

#include <algorithm>

namespace pipemorph {

void ReliableStream::send(const Frame& frame) {
    unacknowledged_.push_back(encode_frame(frame));
}

void ReliableStream::write(std::vector<uint8_t>& out, size_t limit, FrameMac* frame_mac) {
    while (next_to_write_ < unacknowledged_.size() && out.size() < limit) {
        append_frame(out, unacknowledged_[next_to_write_], acknowledged_ + 1 + next_to_write_,
                     received_, frame_mac);
        ++next_to_write_;
    }
}

ReliableStream::Verdict ReliableStream::received(uint64_t sequence) {
    if (sequence <= received_) return Verdict::repeated;
    if (sequence != received_ + 1) return Verdict::gap;
    received_ = sequence;
    return Verdict::deliver;
}

bool ReliableStream::acknowledged(uint64_t sequence) {
    if (sequence <= acknowledged_) return true;
    const uint64_t count = sequence - acknowledged_;
    if (count > unacknowledged_.size()) return false;
    unacknowledged_.erase(unacknowledged_.begin(),
                          unacknowledged_.begin() + static_cast<std::ptrdiff_t>(count));
    next_to_write_ -= std::min<size_t>(next_to_write_, count);
    acknowledged_ = sequence;
    return true;
}

bool ReliableStream::resume(uint64_t peer_received) {
    if (peer_received < acknowledged_ || !acknowledged(peer_received)) return false;
    next_to_write_ = 0;
    return true;
}

}  // namespace pipemorph
