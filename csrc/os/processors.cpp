#include "os/processors.hpp"

#include <sched.h>

#include <algorithm>

namespace pipemorph {
namespace {

constexpr size_t kMost = 8192;  // what kernels are built for, at most

}  // namespace

std::optional<Processors> Processors::allowed() {
    Processors out(kMost / kWordBits);
    if (::sched_getaffinity(0, out.words_.size() * sizeof out.words_[0],
                            reinterpret_cast<cpu_set_t*>(out.words_.data())) != 0)
        return std::nullopt;
    return out;
}

bool Processors::apply() const {
    return ::sched_setaffinity(0, words_.size() * sizeof words_[0],
                               reinterpret_cast<const cpu_set_t*>(words_.data())) == 0;
}

bool Processors::has(size_t processor) const {
    const size_t word = processor / kWordBits;
    return word < words_.size() && (words_[word] >> (processor % kWordBits) & 1) != 0;
}

void Processors::add(size_t processor) {
    if (const size_t word = processor / kWordBits; word < words_.size())
        words_[word] |= 1UL << (processor % kWordBits);
}

void Processors::remove(size_t processor) {
    if (const size_t word = processor / kWordBits; word < words_.size())
        words_[word] &= ~(1UL << (processor % kWordBits));
}

bool Processors::empty() const {
    return std::all_of(words_.begin(), words_.end(), [](unsigned long w) { return w == 0; });
}

uint32_t current_processor() {
    return static_cast<uint32_t>(::sched_getcpu());
}

bool step_aside(uint32_t processor) {
    if (current_processor() != processor) return false;
    const auto allowed = Processors::allowed();
    if (!allowed) return false;
    Processors others = *allowed;
    others.remove(processor);
    // Moves at once; to be allowed back is no reason to go.
    if (others.empty() || !others.apply()) return false;
    return allowed->apply();
}

}  // namespace pipemorph
