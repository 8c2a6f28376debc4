// Placement of memory and threads near the device they serve, on hosts with several NUMA nodes.
//
// It uses sysfs and system calls, without libnuma, and is an optimization only: without information
// or permission, memory and threads stay at their default place. Container runtimes forbid the
// memory policy calls without CAP_SYS_NICE; pages then go to the node of the thread that touches
// them first, so that thread moves there meanwhile.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "os/processors.hpp"

namespace pipemorph::numa {

constexpr int kNowhere = -1;
inline constexpr const char* kNodes = "/sys/devices/system/node";

// Node of a device by its folder in sysfs, such as /sys/class/infiniband/mlx5_0/device; kNowhere if
// there is one node only, or the firmware does not report it.
int node_of(const std::string& device_folder);

// Node that all of them share; kNowhere if they differ, or one is unknown.
int common(const std::vector<int>& nodes);

// Parses a list: "0-2,8" → 0, 1, 2, 8. Empty for invalid text.
std::vector<int> parse_list(const std::string& text);

// Confines the calling thread to those processors of a node that it may already use. False, without
// a change, if there are none, or it runs nowhere else.
bool run_on(int node, const std::string& nodes = kNodes);

// Scope in which the calling thread's new pages come from a node, if it has free ones.
class OnNode {
  public:
    enum class Means {
        none,      // unknown, impossible, or not allowed
        policy,    // set_mempolicy
        affinity,  // first touch
        theirs     // the process has a policy of its own, as by numactl
    };

    explicit OnNode(int node, const std::string& nodes = kNodes);
    ~OnNode();
    OnNode(const OnNode&) = delete;
    OnNode& operator=(const OnNode&) = delete;

    Means means() const { return means_; }

  private:
    Means means_ = Means::none;
    std::optional<Processors> processors_;  // to be restored
};

}  // namespace pipemorph::numa
