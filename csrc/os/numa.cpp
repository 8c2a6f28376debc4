#include "os/numa.hpp"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <climits>
#include <fstream>

namespace pipemorph::numa {
namespace {

constexpr size_t kMostNodes = 1024;  // limit of kernels
constexpr size_t kMostProcessors = 8192;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using Nodes = std::array<unsigned long, kMostNodes / kWordBits>;

std::string first_line(const std::string& path) {
    std::ifstream in(path);
    std::string line;
    std::getline(in, line);
    return line;
}

// Processors of `allowed` on the node; empty if there are none, or all are.
std::optional<Processors> of_node(int node, const std::string& nodes, const Processors& allowed) {
    const std::string list = first_line(nodes + "/node" + std::to_string(node) + "/cpulist");
    Processors out = allowed.none();
    for (const int processor : parse_list(list))
        if (allowed.has(static_cast<size_t>(processor))) out.add(static_cast<size_t>(processor));
    if (out.empty() || out == allowed) return std::nullopt;
    return out;
}

enum class Answer { done, theirs, refused };

Answer prefer(int node) {
    int mode = 0;
    Nodes mask{};
    if (::syscall(SYS_get_mempolicy, &mode, mask.data(), kMostNodes, nullptr, 0UL) != 0)
        return Answer::refused;
    if (mode != MPOL_DEFAULT) return Answer::theirs;
    mask.fill(0);
    const auto at = static_cast<size_t>(node);
    mask[at / kWordBits] = 1UL << (at % kWordBits);
    // One more bit, since the kernel subtracts one.
    return ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), kMostNodes + 1) == 0
               ? Answer::done
               : Answer::refused;
}

}  // namespace

int node_of(const std::string& device_folder) {
    const std::string text = first_line(device_folder + "/numa_node");
    int node = kNowhere;
    std::from_chars(text.data(), text.data() + text.size(), node);
    return node >= 0 && static_cast<size_t>(node) < kMostNodes ? node : kNowhere;
}

int common(const std::vector<int>& nodes) {
    for (const int node : nodes)
        if (node != nodes.front()) return kNowhere;
    return nodes.empty() ? kNowhere : nodes.front();
}

std::vector<int> parse_list(const std::string& text) {
    std::vector<int> out;
    const char* at = text.data();
    const char* const end = at + text.size();
    while (at < end) {
        int first = 0;
        auto parsed = std::from_chars(at, end, first);
        if (parsed.ec != std::errc() || first < 0) return {};
        int last = first;
        if (parsed.ptr < end && *parsed.ptr == '-') {
            parsed = std::from_chars(parsed.ptr + 1, end, last);
            if (parsed.ec != std::errc()) return {};
        }
        if (last < first || static_cast<size_t>(last) >= kMostProcessors) return {};
        for (int i = first; i <= last; ++i) out.push_back(i);
        if (parsed.ptr < end && *parsed.ptr != ',') return {};
        at = parsed.ptr + (parsed.ptr < end ? 1 : 0);
    }
    return out;
}

bool run_on(int node, const std::string& nodes) {
    if (node < 0) return false;
    const auto allowed = Processors::allowed();
    if (!allowed) return false;
    const auto wanted = of_node(node, nodes, *allowed);
    return wanted && wanted->apply();
}

OnNode::OnNode(int node, const std::string& nodes) {
    if (node < 0 || static_cast<size_t>(node) >= kMostNodes) return;
    switch (prefer(node)) {
        case Answer::done:
            means_ = Means::policy;
            return;
        case Answer::theirs:
            means_ = Means::theirs;
            return;
        case Answer::refused:
            break;
    }
    processors_ = Processors::allowed();
    if (!processors_) return;
    const auto wanted = of_node(node, nodes, *processors_);
    if (wanted && wanted->apply()) means_ = Means::affinity;
}

OnNode::~OnNode() {
    // Restoring the previous state cannot fail.
    if (means_ == Means::policy) ::syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL);
    if (means_ == Means::affinity) processors_->apply();
}

}  // namespace pipemorph::numa
