// Where memory and threads go, on a sysfs of our own and on the kernel of this host.
#include "os/numa.hpp"

#include <linux/filter.h>
#include <linux/mempolicy.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <iterator>
#include <thread>

#include "check.hpp"
#include "os/memory.hpp"
#include "tree.hpp"

using namespace pipemorph;

namespace {

std::vector<int> processors() {
    cpu_set_t set;
    CHECK(::sched_getaffinity(0, sizeof set, &set) == 0);
    std::vector<int> out;
    for (int i = 0; i < CPU_SETSIZE; ++i)
        if (CPU_ISSET(i, &set)) out.push_back(i);
    return out;
}

// On a thread of its own, so that no other test runs with what this one sets.
template <typename F>
void apart(F&& run) {
    std::string failed;
    std::thread([&] {
        try {
            run();
        } catch (const check::Failure& e) {
            failed = e.what();
        }
    }).join();
    if (!failed.empty()) throw check::Failure(failed);
}

// For the calling thread, for good.
void forbid_policies() {
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_mempolicy, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_get_mempolicy, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{static_cast<unsigned short>(std::size(rules)), rules};
    CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int policy() {
    int mode = -1;
    if (::syscall(SYS_get_mempolicy, &mode, nullptr, 0UL, nullptr, 0UL) != 0) return -1;
    return mode;
}

}  // namespace

TEST(numa_node_of_a_device_is_what_sysfs_says) {
    const Tree sys;
    const auto node = [&](const std::string& text) {
        sys.put("mlx5_0/device/numa_node", text);
        return numa::node_of(sys.root + "/mlx5_0/device");
    };
    CHECK(node("0") == 0);
    CHECK(node("3") == 3);
    CHECK(node("-1") == numa::kNowhere);  // the firmware does not say
    CHECK(node("") == numa::kNowhere);
    CHECK(node("x") == numa::kNowhere);
    CHECK(node("99999999") == numa::kNowhere);
    CHECK(numa::node_of(sys.root + "/rxe0/device") == numa::kNowhere);
}

TEST(numa_rails_on_different_nodes_share_none) {
    CHECK(numa::common({}) == numa::kNowhere);
    CHECK(numa::common({1, 1}) == 1);
    CHECK(numa::common({0, 1}) == numa::kNowhere);
    CHECK(numa::common({1, numa::kNowhere}) == numa::kNowhere);
}

TEST(numa_lists_of_processors) {
    using List = std::vector<int>;
    CHECK(numa::parse_list("0-2,8") == (List{0, 1, 2, 8}));
    CHECK(numa::parse_list("5") == (List{5}));
    for (const char* bad : {"", "x", "1-", "3-1", "-1", "1,x", "0-99999999", "1 2"})
        CHECK(numa::parse_list(bad).empty());
}

TEST(numa_a_thread_runs_on_those_of_a_node_that_it_may_use) {
    const Tree sys;
    const std::vector<int> all = processors();
    sys.put("node0/cpulist", std::to_string(all.front()));
    sys.put("node1/cpulist", "8190");
    std::string whole;
    for (const int i : all) {
        if (!whole.empty()) whole += ',';
        whole += std::to_string(i);
    }
    sys.put("node2/cpulist", whole);
    apart([&] {
        CHECK(!numa::run_on(numa::kNowhere, sys.root));
        CHECK(!numa::run_on(1, sys.root));  // none of them is ours
        CHECK(!numa::run_on(2, sys.root));  // all of ours are there
        CHECK(!numa::run_on(7, sys.root));  // there is no such node
        CHECK(processors() == all);
        CHECK(numa::run_on(0, sys.root) == (all.size() > 1));
        CHECK(processors() == std::vector<int>{all.front()});
        // What it may not use any more it is not given back.
        sys.put("node3/cpulist", std::to_string(all.back()));
        if (all.size() > 1) CHECK(!numa::run_on(3, sys.root));
        CHECK(processors() == std::vector<int>{all.front()});
    });
    CHECK(processors() == all);
}

TEST(numa_new_pages_come_from_the_node_and_the_policy_goes_with_the_scope) {
    apart([&] {
        // Where a sandbox refuses the calls, the next test is all there is to see.
        if (policy() != MPOL_DEFAULT) return;
        const numa::OnNode nowhere(numa::kNowhere);
        CHECK(nowhere.means() == numa::OnNode::Means::none);
        {
            const numa::OnNode here(0);
            CHECK(here.means() == numa::OnNode::Means::policy);
            CHECK(policy() == MPOL_PREFERRED);
            const auto memory = Memory::anonymous(size_t{1} << 20);
            int node = -1;
            CHECK(::syscall(SYS_get_mempolicy, &node, nullptr, 0UL, memory->data(),
                            static_cast<unsigned long>(MPOL_F_NODE | MPOL_F_ADDR)) == 0);
            CHECK(node == 0);
            const numa::OnNode inner(0);
            CHECK(inner.means() == numa::OnNode::Means::theirs);
        }
        CHECK(policy() == MPOL_DEFAULT);
    });
}

// As container runtimes do to who has no CAP_SYS_NICE.
TEST(numa_where_policies_are_forbidden_the_thread_goes_to_the_node_and_comes_back) {
    const Tree sys;
    const std::vector<int> all = processors();
    sys.put("node0/cpulist", std::to_string(all.front()));
    apart([&] {
        forbid_policies();
        CHECK(policy() == -1);
        {
            const numa::OnNode here(0, sys.root);
            if (all.size() > 1) CHECK(here.means() == numa::OnNode::Means::affinity);
            CHECK(processors() == std::vector<int>{all.front()});
        }
        CHECK(processors() == all);
    });
}

TEST(numa_a_policy_of_the_users_is_left_alone) {
    apart([] {
        const unsigned long first = 1;
        if (::syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, &first, 64UL) != 0) {
            CHECK(errno == EPERM || errno == ENOSYS);
            return;
        }
        {
            const numa::OnNode here(0);
            CHECK(here.means() == numa::OnNode::Means::theirs);
            CHECK(policy() == MPOL_INTERLEAVE);
        }
        CHECK(policy() == MPOL_INTERLEAVE);
    });
}

TEST(numa_a_node_that_is_not_there_changes_nothing) {
    const std::vector<int> all = processors();
    apart([&] {
        {
            const numa::OnNode here(1000);
            CHECK(here.means() == numa::OnNode::Means::none);
        }
        CHECK(processors() == all);
    });
}
