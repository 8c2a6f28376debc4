// A name service that answers when the test lets it.
#include <dlfcn.h>
#include <netdb.h>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "two_engines.hpp"

using namespace pipemorph;

namespace {

constexpr char kHost[] = "silent.test";

// Its requests wait, and then find this host.
class Silence {
  public:
    Silence() { silent(true); }
    ~Silence() {
        silent(false);
        std::unique_lock lock(mu_);
        while (asked_ > 0) wait_ns(changed_, lock, kSecond);
    }
    Silence(const Silence&) = delete;
    Silence& operator=(const Silence&) = delete;

    static void silent(bool is) {
        const std::lock_guard lock(mu_);
        silent_ = is;
        changed_.notify_all();
    }
    static void ask() {
        std::unique_lock lock(mu_);
        ++asked_;
        while (silent_) wait_ns(changed_, lock, kSecond);
        --asked_;
        changed_.notify_all();
    }

  private:
    static inline std::mutex mu_;
    static inline std::condition_variable changed_;
    static inline bool silent_ = false;
    static inline int asked_ = 0;
};

}  // namespace

// In place of the C library's, for all of these tests.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints,
                           addrinfo** found) {
    using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
    static const auto real = reinterpret_cast<Real>(::dlsym(RTLD_NEXT, "getaddrinfo"));
    if (host != nullptr && std::strcmp(host, kHost) == 0) {
        Silence::ask();
        host = "127.0.0.1";
    }
    return real(host, service, hints, found);
}

TEST(connect_does_not_wait_longer_for_a_name_service_than_for_a_peer) {
    const Silence silence;
    Engine engine(config(0, Transport::tcp));
    const int64_t start = steady_ns();
    const std::string why = THROWS(EngineTimeout, engine.connect(1, 7, kHost, 9, 0.2, [] {}));
    CHECK(steady_ns() - start < 10 * kSecond);
    CHECK(why.find("not connected to silent.test:9 within 0.2 s") != std::string::npos);
    CHECK(why.find("'silent.test': the name service has not answered") != std::string::npos);
}

TEST(connect_is_interrupted_while_a_name_is_looked_up) {
    const Silence silence;
    Engine engine(config(0, Transport::tcp));
    const std::string why =
        THROWS(EngineError, engine.connect(1, 7, kHost, 9, 300.0, [&engine] { engine.close(0); }));
    CHECK(why.find("the engine is closed") != std::string::npos);
}

TEST(connect_takes_the_answer_of_a_name_service_that_is_late) {
    const Silence silence;
    Engine low(config(0, Transport::tcp));
    Engine high(config(1, Transport::tcp));
    std::shared_ptr<Link> accepted;
    std::thread acceptor([&] { accepted = high.accept(0, 7, 20.0, [] {}); });
    const auto dialled =
        low.connect(1, 7, kHost, high.port(), 20.0, [] { Silence::silent(false); });
    acceptor.join();
    CHECK(dialled->alive() && accepted->alive());
}
