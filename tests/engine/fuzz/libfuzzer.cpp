// The entry points that libFuzzer calls. Its target is named by PIPEMORPH_FUZZ_TARGET.
#include <cstdio>
#include <cstdlib>

#include "fuzz_targets.hpp"

namespace {

fuzz::Target chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    const char* name = std::getenv("PIPEMORPH_FUZZ_TARGET");
    chosen = fuzz::target(name == nullptr ? "" : name);
    if (chosen != nullptr) return 0;
    std::fprintf(stderr, "PIPEMORPH_FUZZ_TARGET is %s, expected handshake or control\n",
                 name == nullptr ? "not set" : name);
    std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    chosen({data, size});
    return 0;
}
