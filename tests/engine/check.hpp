// A test harness in a page: TEST registers, CHECK throws, main runs what its arguments name.
#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Test {
    const char* name;
    std::function<void()> run;
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Register {
    Register(const char* name, std::function<void()> run) {
        tests().push_back({name, std::move(run)});
    }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::ostringstream out;
    out << file << ":" << line << ": " << what;
    throw Failure(out.str());
}

template <typename E, typename F>
std::string thrown(const char* file, int line, const char* type, F&& run) {
    try {
        run();
    } catch (const E& e) {
        return e.what();
    }
    fail(file, line, std::string("nothing thrown, expected ") + type);
}

}  // namespace check

#define TEST(name)                                              \
    static void name();                                         \
    static const check::Register register_##name(#name, &name); \
    static void name()

#define CHECK(condition) \
    (static_cast<bool>(condition) ? void() : check::fail(__FILE__, __LINE__, #condition))

// The message of the exception that `expression` throws.
#define THROWS(type, expression) \
    check::thrown<type>(__FILE__, __LINE__, #type, [&] { (void)(expression); })
