// Memory and threads beside the device they serve, on hosts with several NUMA nodes.
//
// By sysfs and system calls, without libnuma. Nothing here is needed for anything to work: what
// cannot be found out, or is not allowed, leaves memory and threads where they would be anyway.
// Container runtimes forbid the memory policy calls without CAP_SYS_NICE; pages then go to the
// node of the thread that touches them first, so that thread is moved there for the time.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "os/processors.hpp"

namespace pipemorph::numa {

constexpr int kNowhere = -1;
inline constexpr const char* kNodes = "/sys/devices/system/node";

// The node of a device by its folder in sysfs, as /sys/class/infiniband/mlx5_0/device; kNowhere
// where there is one node only, or the firmware does not say.
int node_of(const std::string& device_folder);

// The node that all of them are on; kNowhere if they differ, or any is not known.
int common(const std::vector<int>& nodes);

// "0-2,8" → 0, 1, 2, 8. Empty for what is not such a list.
std::vector<int> parse_list(const std::string& text);

// Keep the calling thread on those processors of a node that it may use already. False if there
// are none, or it runs nowhere else anyway: nothing is changed then.
bool run_on(int node, const std::string& nodes = kNodes);

// While it lives, the calling thread's new pages come from a node if that has any left.
class OnNode {
  public:
    enum class Means {
        none,      // not known, not possible, or not allowed
        policy,    // set_mempolicy
        affinity,  // first touch
        theirs     // the process was started with a policy of its own, as by numactl
    };

    explicit OnNode(int node, const std::string& nodes = kNodes);
    ~OnNode();
    OnNode(const OnNode&) = delete;
    OnNode& operator=(const OnNode&) = delete;

    Means means() const { return means_; }

  private:
    Means means_ = Means::none;
    std::optional<Processors> processors_;  // to go back to
};

}  // namespace pipemorph::numa
