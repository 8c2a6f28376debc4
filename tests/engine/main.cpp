#include <cstdio>
#include <cstring>
#include <string>

#include "check.hpp"

namespace {

// Whether the name contains every argument TEXT, and of no argument -TEXT what is after the dash.
bool is_chosen(const char* name, int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
        const bool excluded = argv[i][0] == '-';
        if ((std::strstr(name, argv[i] + excluded) != nullptr) == excluded) return false;
    }
    return true;
}

}  // namespace

// Runs every test that the arguments choose.
int main(int argc, char** argv) {
    int failed = 0;
    int ran = 0;
    std::string why;  // again, at the end: of a long output the middle may be cut out
    for (const auto& test : check::tests()) {
        if (!is_chosen(test.name, argc, argv)) continue;
        ++ran;
        try {
            test.run();
            std::printf("ok      %s\n", test.name);
        } catch (const std::exception& e) {
            ++failed;
            const std::string said = std::string("FAILED  ") + test.name + ": " + e.what() + "\n";
            std::fputs(said.c_str(), stdout);
            why += said;
        }
        std::fflush(stdout);
    }
    std::printf("%s%d ran, %d failed\n", why.c_str(), ran, failed);
    return failed == 0 && ran > 0 ? 0 : 1;
}
