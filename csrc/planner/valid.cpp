#include "planner/valid.hpp"

#include "planner/core.hpp"

namespace pipemorph::planner {

bool is_valid(int microbatches, const Order& order, const std::vector<std::vector<int>>& numbers,
              const std::vector<int>& caps, const std::vector<int>& device_limits) {
    std::vector<int> above, here;  // per backward, the F before it, of the stage above and of this
    for (size_t stage = 0; stage < order.size(); ++stage) {
        Residency held(device_limits[stage]);
        int done[kKinds] = {0, 0, 0};
        here.clear();
        for (size_t position = 0; position < order[stage].size(); ++position) {
            const int kind = order[stage][position];
            if (kind > kFused) return false;
            const int m = done[kind == kFused ? int{kBackward} : kind]++;
            if (numbers[stage][position] != m || m >= microbatches) return false;
            if (kind == kFused && done[kWeight]++ != m) return false;
            if (done[kBackward] > done[kForward] || done[kWeight] > done[kBackward]) return false;
            if (caps[stage] && done[kForward] - done[kWeight] > caps[stage]) return false;
            if (kind == kBackward || kind == kFused) here.push_back(done[kForward]);
            if (!held.fits(kind, m)) return false;
            held.run(kind, m);
        }
        for (const int count : done)
            if (count != microbatches) return false;
        for (size_t k = 0; stage && k < here.size(); ++k)
            if (above[k] < here[k]) return false;
        std::swap(above, here);
    }
    return true;
}

}  // namespace pipemorph::planner
