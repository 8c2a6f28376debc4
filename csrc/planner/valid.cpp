#include "planner/valid.hpp"

#include <array>

#include "planner/core.hpp"

namespace pipemorph::planner {
namespace {

// True if no rank waits forever, with messages that take no time. `done`: zeros, per stage.
bool terminates(const std::vector<std::vector<int>>& stages_of, const Order& order,
                std::vector<std::array<int, kKinds>> done) {
    const int last = static_cast<int>(done.size()) - 1;
    std::vector<size_t> at(order.size());
    for (bool moving = true; moving;) {
        moving = false;
        for (size_t rank = 0; rank < order.size(); ++rank)
            for (; at[rank] < order[rank].size(); ++at[rank], moving = true) {
                const unsigned char code = order[rank][at[rank]];
                const int stage = stages_of[rank][code >> 2], kind = code & 3;
                const int counted = kind == kFused ? int{kBackward} : kind;
                const int from = kind == kForward ? stage - 1 : stage + 1;
                if (counted != kWeight && from >= 0 && from <= last &&
                    done[from][counted] <= done[stage][counted])
                    break;
                ++done[stage][counted];
            }
    }
    for (size_t rank = 0; rank < order.size(); ++rank)
        if (at[rank] < order[rank].size()) return false;
    return true;
}

}  // namespace

bool is_valid(int microbatches, const std::vector<std::vector<int>>& stages_of, const Order& order,
              const std::vector<std::vector<int>>& numbers, const std::vector<int>& caps,
              const std::vector<int>& device_limits) {
    std::vector<DeviceResidency> held(device_limits.begin(), device_limits.end());
    const std::vector<std::array<int, kKinds>> none(caps.size());
    auto all = none;
    for (size_t rank = 0; rank < order.size(); ++rank)
        for (size_t position = 0; position < order[rank].size(); ++position) {
            const unsigned char code = order[rank][position];
            const int stage = stages_of[rank][code >> 2], kind = code & 3;
            auto& done = all[stage];
            const int m = done[kind == kFused ? int{kBackward} : kind]++;
            if (numbers[rank][position] != m || m >= microbatches) return false;
            if (kind == kFused && done[kWeight]++ != m) return false;
            if (done[kBackward] > done[kForward] || done[kWeight] > done[kBackward]) return false;
            if (caps[stage] && done[kForward] - done[kWeight] > caps[stage]) return false;
            if (!held[stage].fits(kind, m)) return false;
            held[stage].run(kind, m);
        }
    for (const auto& done : all)
        for (const int count : done)
            if (count != microbatches) return false;
    return terminates(stages_of, order, none);
}

}  // namespace pipemorph::planner
