// Small random generator of the planner, so that all platforms draw the same numbers.
#pragma once

#include <cstdint>

namespace pipemorph::planner {

class Rng {
  public:
    int draw_below(int count) {
        state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(count));
    }

    // Number in [0, 1), a multiple of 2^-20.
    double draw_unit() { return draw_below(1 << 20) / static_cast<double>(1 << 20); }

    template <typename T, int count>
    T draw_choice(const T (&choices)[count]) {
        return choices[draw_below(count)];
    }

  private:
    uint64_t state_ = 20250831;
};

}  // namespace pipemorph::planner
