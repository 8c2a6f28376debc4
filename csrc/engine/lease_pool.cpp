#include "engine/lease_pool.hpp"

#include <algorithm>
#include <iterator>

namespace pipemorph {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kAddAtOnce = uint64_t{64} << 20;  // takes some 20 ms to be registered

uint64_t whole_pages(uint64_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

std::optional<LeasePool::Piece> LeasePool::take(uint64_t bytes) {
    const size_t wanted = whole_pages(bytes);
    const std::lock_guard lock(mu_);
    for (size_t n = 0; n < segments_.size(); ++n) {
        Segment& segment = segments_[n];
        const auto found = std::find_if(segment.free.begin(), segment.free.end(),
                                        [&](const auto& f) { return f.second >= wanted; });
        if (found == segment.free.end()) continue;
        const auto [offset, length] = *found;
        uint8_t* const data = segment.memory->data() + offset;
        Piece piece{data, {data, [self = shared_from_this(), n, at = offset, wanted](void*) {
                               self->return_piece(n, at, wanted);
                           }}};
        segment.free.erase(found);
        if (length > wanted) segment.free.emplace(offset + wanted, length - wanted);
        return piece;
    }
    return std::nullopt;
}

void LeasePool::return_piece(size_t number, size_t offset, size_t bytes) noexcept {
    const std::lock_guard lock(mu_);
    auto& free = segments_[number].free;
    const auto after = free.lower_bound(offset);
    if (after != free.end() && after->first == offset + bytes) {
        bytes += after->second;
        free.erase(after);
    }
    const auto next = free.lower_bound(offset);
    if (next != free.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += bytes;
            return;
        }
    }
    try {
        free.emplace(offset, bytes);
    } catch (const std::bad_alloc&) {  // the piece is lost
    }
}

// Doubles the memory, so that a few calls suffice for repeated leases.
uint64_t LeasePool::to_add(uint64_t bytes) {
    const std::lock_guard lock(mu_);
    if (growing_ || no_more_) return 0;
    uint64_t size = Memory::mapped(std::max(bytes, std::min(bytes_, kAddAtOnce)));
    if (size > available_) size = Memory::mapped(bytes);
    if (size > available_) return 0;
    available_ -= size;
    growing_ = true;
    return size;
}

void LeasePool::add(std::shared_ptr<Memory> memory,
                    std::vector<std::shared_ptr<Registration>> registered) {
    const std::lock_guard lock(mu_);
    growing_ = false;
    no_more_ = !memory;
    if (!memory) return;
    const size_t size = memory->size();
    bytes_ += size;
    segments_.push_back({std::move(memory), std::move(registered), {{0, size}}});
}

void LeasePool::drop() {
    decltype(segments_) dropped;
    const std::lock_guard lock(mu_);
    dropped.swap(segments_);
}

std::vector<std::shared_ptr<Memory>> LeasePool::memory() const {
    const std::lock_guard lock(mu_);
    std::vector<std::shared_ptr<Memory>> out;
    for (const Segment& segment : segments_) out.push_back(segment.memory);
    return out;
}

std::optional<uint32_t> LeasePool::key(const VerbsDevice& device, const uint8_t* data) const {
    const std::lock_guard lock(mu_);
    for (const Segment& segment : segments_) {
        const uint8_t* const begin = segment.memory->data();
        if (data < begin || data >= begin + segment.memory->size()) continue;
        for (const auto& r : segment.registered)
            if (&r->device() == &device) return r->lkey();
    }
    return std::nullopt;
}

bool LeasePool::claim(uint64_t bytes) {
    const std::lock_guard lock(mu_);
    if (bytes > available_) return false;
    available_ -= bytes;
    return true;
}

void LeasePool::disclaim(uint64_t bytes) {
    const std::lock_guard lock(mu_);
    available_ += bytes;
}

}  // namespace pipemorph
