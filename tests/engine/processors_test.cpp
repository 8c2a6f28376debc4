// How many processors there are to use.
#include "os/processors.hpp"

#include "check.hpp"
#include "tree.hpp"

using namespace pipemorph;

// Less than one processor's time, so that it counts on any host.
TEST(a_quota_of_processor_time_counts_whichever_group_has_it) {
    const size_t all = Processors::allowed()->count();
    const auto usable = [](std::initializer_list<std::pair<std::string, std::string>> files) {
        Tree tree;
        for (const auto& [path, text] : files) tree.put(path, text);
        return usable_processors(tree.root);
    };
    const std::string groups = "proc/self/cgroup";
    const std::string v2 = "0::/kubepods/pod1/rank";
    const std::string v1 = "5:memory:/pod1\n4:cpu,cpuacct:/pod1/rank\n1:name=systemd:/";
    const std::string top = "sys/fs/cgroup/";
    CHECK(usable({}) == all);
    CHECK(usable({{groups, v2}, {top + "kubepods/pod1/rank/cpu.max", "max 100000"}}) == all);
    CHECK(usable({{groups, v2}, {top + "kubepods/pod1/rank/cpu.max", "50000 100000"}}) == 1);
    CHECK(usable({{groups, v2},
                  {top + "kubepods/pod1/rank/cpu.max", "max 100000"},
                  {top + "kubepods/cpu.max", "100000 100000"}}) == 1);
    CHECK(usable({{groups, "0::/"}, {top + "cpu.max", "99000 100000"}}) == 1);
    CHECK(usable({{groups, v2}, {top + "cpu.max", "1000000000 1000"}}) == all);
    CHECK(usable({{groups, v2}, {top + "cpu.max", "nonsense"}}) == all);
    for (const std::string folder :
         {"pod1/rank/", "pod1/", ""}) {  // "": a container's own, at the top
        const std::string at = top + "cpu,cpuacct/" + folder + "cpu.cfs_";
        CHECK(usable({{groups, v1}, {at + "quota_us", "-1"}, {at + "period_us", "100000"}}) == all);
        CHECK(usable({{groups, v1}, {at + "quota_us", "20000"}, {at + "period_us", "100000"}}) ==
              1);
    }
    CHECK(usable({{groups, "2:memory:/pod1"}, {top + "memory/pod1/cpu.max", "1 100000"}}) == all);
    if (all > 1) CHECK(usable({{groups, "0::/"}, {top + "cpu.max", "150000 100000"}}) == 2);
}
