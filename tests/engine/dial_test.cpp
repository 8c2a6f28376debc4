// Addresses that do not answer.
#include "engine/dial.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <future>
#include <vector>

#include "check.hpp"
#include "os/clock.hpp"

using namespace pipemorph;

namespace {

// A listener that accepts no one: its queue is full, so it drops what comes later.
struct FullListener {
    FullListener() : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in name{};
        name.sin_family = AF_INET;
        name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof name;
        CHECK(::bind(fd.get(), reinterpret_cast<sockaddr*>(&name), size) == 0);
        CHECK(::listen(fd.get(), 0) == 0);
        CHECK(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&name), &size) == 0);
        address = resolve("127.0.0.1", ntohs(name.sin_port), false).front();
        for (int i = 0; i < 3; ++i) waiting.push_back(start_connect(address));
        pollfd last{waiting.back().get(), POLLOUT, 0};
        CHECK(::poll(&last, 1, 200) == 0);
    }

    Fd fd;
    Address address;
    std::vector<Fd> waiting;
};

}  // namespace

TEST(dial_gives_an_address_that_does_not_answer_up_before_its_limit) {
    const FullListener listener;
    Config config;
    config.secret = {'k', 'e', 'y'};
    Runtime runtime(config);
    std::promise<DialResult> said;
    const int64_t start = steady_ns();
    runtime.control.post([&] {
        dial(runtime, listener.address, Hello{}, 120 * kSecond,
             [&](DialResult result) { said.set_value(std::move(result)); });
    });
    auto result = said.get_future();
    CHECK(result.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    CHECK(steady_ns() - start >= kSecond);  // a packet may get lost
    CHECK(result.get().error == "cannot connect to " + listener.address.text() + ": no answer");
    runtime.stop();
}
