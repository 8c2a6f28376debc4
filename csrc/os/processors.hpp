// Processors that the calling thread may run on, for hosts of any size.
#pragma once

#include <climits>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pipemorph {

class Processors {
  public:
    // Processors of the calling thread; empty if the system does not report them.
    static std::optional<Processors> allowed();
    // Confines the calling thread to these. False, without a change, if none may be used.
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

// Number of processors that this process can keep busy: those that the calling thread may run on,
// or fewer if a control group of the process, of version 1 or 2, has a quota of processor time.
// `root`: prefix of /proc and /sys.
size_t usable_processors(const std::string& root = "");

}  // namespace pipemorph
