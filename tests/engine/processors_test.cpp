// Where threads run: on a host with one processor there is nowhere to go.
#include "os/processors.hpp"

#include "check.hpp"

using namespace pipemorph;

namespace {

size_t count(const Processors& processors) {
    size_t n = 0;
    for (size_t i = 0; i < 8192; ++i) n += processors.has(i);
    return n;
}

}  // namespace

TEST(a_thread_steps_aside_and_may_come_back) {
    const auto before = Processors::allowed();
    CHECK(before && !before->empty());
    // Another thread may be moved by the kernel between two lines; it comes to rest soon.
    bool moved = false;
    for (int tries = 0; tries < 1000 && !moved; ++tries) {
        const uint32_t here = current_processor();
        moved = step_aside(here);
        CHECK(Processors::allowed() == before);
    }
    CHECK(moved == (count(*before) > 1));
}

TEST(a_thread_does_not_move_for_a_processor_that_it_is_not_on) {
    Processors one = Processors::allowed()->none();
    CHECK(one.empty() && !one.apply());
    const auto before = Processors::allowed();
    const uint32_t here = current_processor();
    one.add(here);
    CHECK(one.has(here) && one.apply());
    CHECK(!step_aside(here + 1));
    CHECK(!step_aside(here));  // nowhere else to go
    CHECK(Processors::allowed() == one);
    CHECK(before->apply());
}
