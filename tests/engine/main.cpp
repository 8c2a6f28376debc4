#include <cstdio>
#include <cstring>

#include "check.hpp"

// Runs every test, or those whose name contains the argument; with -TEXT those whose name does not.
int main(int argc, char** argv) {
    int failed = 0;
    int ran = 0;
    const char* text = argc < 2 ? "" : argv[1];
    const bool inverted = text[0] == '-';
    for (const auto& test : check::tests()) {
        const bool named = std::strstr(test.name, text + inverted) != nullptr;
        if (named == inverted) continue;
        ++ran;
        try {
            test.run();
            std::printf("ok      %s\n", test.name);
        } catch (const std::exception& e) {
            ++failed;
            std::printf("FAILED  %s: %s\n", test.name, e.what());
        }
        std::fflush(stdout);
    }
    std::printf("%d ran, %d failed\n", ran, failed);
    return failed == 0 && ran > 0 ? 0 : 1;
}
