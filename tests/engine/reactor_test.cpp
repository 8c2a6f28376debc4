// What a reactor's thread does first.
#include "os/reactor.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <future>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "os/clock.hpp"

using namespace pipemorph;

TEST(reactor_hears_what_has_come_before_it_gives_anybody_up) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const Fd ours(fds[0]);
    const Fd peer(fds[1]);
    Reactor reactor("test");
    std::string order;
    std::promise<void> both;
    const auto happened = [&](char what) {
        order += what;
        if (order.size() == 2) both.set_value();
    };
    reactor.post([&] {
        reactor.add(ours.get(), EPOLLIN, [&](uint32_t) {
            char byte;
            if (::recv(ours.get(), &byte, 1, MSG_DONTWAIT) == 1) happened('e');
        });
        // The thread is held up until the deadline is over and the word is there as well.
        const int64_t due = steady_ns() + kMillisecond;
        reactor.after(kMillisecond, [&] { happened('t'); });
        if (::send(peer.get(), "x", 1, MSG_NOSIGNAL) != 1) happened('!');
        while (steady_ns() < due) {
        }
    });
    CHECK(both.get_future().wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    reactor.stop();
    CHECK(order == "et");
}

TEST(reactor_tells_what_was_thrown_and_goes_on) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    const Fd ours(fds[0]);
    const Fd peer(fds[1]);
    Reactor reactor("test");
    std::string said;
    reactor.on_failure([&](const std::string& what) { said += what + "; "; });
    std::promise<void> over;
    reactor.post([&] {
        reactor.add(ours.get(), EPOLLIN, [&](uint32_t) {
            reactor.remove(ours.get());
            throw std::runtime_error("a handler");
        });
        if (::send(peer.get(), "x", 1, MSG_NOSIGNAL) != 1) said += "not sent; ";
        reactor.after(0, [&] {
            reactor.post([&] { over.set_value(); });
            throw std::runtime_error("a timer");
        });
        throw std::runtime_error("a task");
    });
    CHECK(over.get_future().wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    reactor.stop();
    CHECK(said == "thread test: a task; thread test: a handler; thread test: a timer; ");
}

TEST(reactor_runs_delayed_tasks_together_and_in_time) {
    Reactor reactor("test");
    std::string order;
    std::promise<void> over;
    const int64_t began = steady_ns();
    int64_t came = 0;
    reactor.post_within(kSecond * 1000, [&] { order += 'a'; });
    reactor.post_within(20 * kMillisecond, [&] {
        order += 'b';
        came = steady_ns();
        over.set_value();
    });
    CHECK(over.get_future().wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    reactor.stop();
    CHECK(order == "ab" && came - began >= 20 * kMillisecond);
}

TEST(reactor_drops_delayed_tasks_when_it_stops) {
    Reactor reactor("test");
    auto held = std::make_shared<int>();
    const std::weak_ptr<int> alive = held;
    reactor.post_within(kSecond * 1000, [held = std::move(held)] {});
    CHECK(!alive.expired());
    reactor.stop();
    CHECK(alive.expired());
    auto late = std::make_shared<int>();
    const std::weak_ptr<int> still = late;
    reactor.post_within(0, [late = std::move(late)] {});
    CHECK(still.expired());
}
