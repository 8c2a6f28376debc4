#include <cstdio>
#include <cstring>
#include <string>

#include "check.hpp"

// Runs every test, or those whose name contains the argument; with -TEXT those whose name does not.
int main(int argc, char** argv) {
    int failed = 0;
    int ran = 0;
    std::string why;  // again, at the end: of a long output the middle may be cut out
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
            const std::string said = std::string("FAILED  ") + test.name + ": " + e.what() + "\n";
            std::fputs(said.c_str(), stdout);
            why += said;
        }
        std::fflush(stdout);
    }
    std::printf("%s%d ran, %d failed\n", why.c_str(), ran, failed);
    return failed == 0 && ran > 0 ? 0 : 1;
}
