// Replays what fuzzing found worth keeping, with every build of the suite. test_engine_fuzz.py
// goes on from there with libFuzzer.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "check.hpp"
#include "fuzz_targets.hpp"

namespace {

std::filesystem::path corpus(const char* target) {
    return std::filesystem::path(__FILE__).parent_path() / "fuzz" / "corpus" / target;
}

}  // namespace

TEST(fuzz_corpus_replays) {
    for (const char* name : {"handshake", "control"}) {
        size_t played = 0;
        for (const auto& entry : std::filesystem::directory_iterator(corpus(name))) {
            std::ifstream in(entry.path(), std::ios::binary);
            const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
            fuzz::target(name)({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
            ++played;
        }
        CHECK(played >= 20);
    }
}

TEST(fuzz_targets_survive_random_bytes) {
    std::mt19937 random(11);
    for (int round = 0; round < 20'000; ++round) {
        std::vector<uint8_t> bytes(random() % 300);
        for (uint8_t& b : bytes) b = static_cast<uint8_t>(random() % 3 == 0 ? random() : 0);
        for (const char* name : {"handshake", "control"}) {
            // Hashing is what a handshake costs.
            if (name[0] == 'c' || round % 20 == 0) fuzz::target(name)(bytes);
        }
    }
}
