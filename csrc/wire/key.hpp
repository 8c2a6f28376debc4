// Key of a message, and its metadata.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace pipemorph {

constexpr int kDirections = 2;  // 0: forward (activations), 1: backward (gradients)
constexpr size_t kMaxNote = 64;
// Limit by which a message's bitmap fits a control frame.
constexpr uint64_t kMaxChunks = uint64_t{1} << 22;

struct Key {
    int64_t generation = 0;
    int64_t iteration = 0;
    int64_t microbatch = 0;
    int64_t direction = 0;
    int64_t tensor = 0;

    bool operator==(const Key&) const = default;

    // "F microbatch 3 of iteration 7 (tensor 0, generation 1)"
    std::string describe() const {
        return std::string(direction == 0 ? "F" : "B") + " microbatch " +
               std::to_string(microbatch) + " of iteration " + std::to_string(iteration) +
               " (tensor " + std::to_string(tensor) + ", generation " + std::to_string(generation) +
               ")";
    }
};

struct KeyHash {
    size_t operator()(const Key& k) const {
        uint64_t h = 0;
        for (const int64_t v : {k.generation, k.iteration, k.microbatch, k.direction, k.tensor})
            h = (h ^ static_cast<uint64_t>(v)) * 0x9e3779b97f4a7c15ULL + (h >> 29);
        return h;
    }
};

struct MessageInfo {
    uint64_t id = 0;  // the sender's ticket; rises by one per message
    Key key;
    std::string note;
    uint64_t bytes = 0;
    int64_t posted_ns = 0;   // the sender's wall clock
    int64_t started_ns = 0;  // the sender's wall clock
};

}  // namespace pipemorph
