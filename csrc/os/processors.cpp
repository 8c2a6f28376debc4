#include "os/processors.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

namespace pipemorph {
namespace {

constexpr size_t kMost = 8192;  // limit of kernels
constexpr double kNoQuota = std::numeric_limits<double>::infinity();

// Processors that one group may use; without its files, it has no quota.
double quota_of(const std::string& folder) {
    std::string quota;
    double period = 0;
    if (std::ifstream v2(folder + "/cpu.max"); v2 >> quota >> period && quota != "max")
        return std::atof(quota.c_str()) / period;
    double used = -1;
    std::ifstream(folder + "/cpu.cfs_quota_us") >> used;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    return used > 0 && period > 0 ? used / period : kNoQuota;
}

// Least quota of a process's groups and of all above them. If /proc names a group as the host does,
// a container has its own at the top.
double least_quota(const std::string& root) {
    double least = kNoQuota;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool v2 = controllers.empty();
        if (!v2 && (',' + controllers + ',').find(",cpu,") == std::string::npos) continue;
        const std::string top = root + "/sys/fs/cgroup" + (v2 ? "" : "/" + controllers);
        std::string group = line.substr(second + 1);
        for (;;) {
            least = std::min(least, quota_of(top + group));
            if (group.empty()) break;
            group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
        }
    }
    return least;
}

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

size_t Processors::count() const {
    size_t n = 0;
    for (const unsigned long word : words_) n += static_cast<size_t>(std::popcount(word));
    return n;
}

size_t usable_processors(const std::string& root) {
    const auto allowed = Processors::allowed();
    const size_t most = allowed ? allowed->count() : std::thread::hardware_concurrency();
    const double quota = std::ceil(least_quota(root));
    return quota < static_cast<double>(most) ? static_cast<size_t>(quota)
                                             : std::max<size_t>(most, 1);
}

}  // namespace pipemorph
