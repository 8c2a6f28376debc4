#include <cstdio>
#include <cstring>

#include "check.hpp"

// Runs every test, or those whose name contains one of the arguments.
int main(int argc, char** argv) {
    int failed = 0;
    int ran = 0;
    for (const auto& test : check::tests()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; ++i)
            wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
        if (!wanted) continue;
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
