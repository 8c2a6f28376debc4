// Which processors the calling thread may run on, for hosts of any size.
#pragma once

#include <climits>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pipemorph {

class Processors {
  public:
    // The calling thread's. Nothing if the system does not say.
    static std::optional<Processors> allowed();
    // Confine the calling thread to these. False if none of them may be used: nothing is changed.
    bool apply() const;

    Processors none() const { return Processors(words_.size()); }
    bool has(size_t processor) const;
    void add(size_t processor);
    void remove(size_t processor);
    size_t count() const;
    bool empty() const { return count() == 0; }
    bool operator==(const Processors&) const = default;

  private:
    explicit Processors(size_t words) : words_(words, 0) {}
    static constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
    std::vector<unsigned long> words_;
};

// How many this process can keep busy: those that the calling thread may run on, or fewer where a
// control group of the process, of version 1 or 2, has a quota of processor time. `root`: what to
// put before /proc and /sys.
size_t usable_processors(const std::string& root = "");

}  // namespace pipemorph
