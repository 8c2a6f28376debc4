// How links begin and how they end.
#include <sys/socket.h>

#include <algorithm>
#include <future>
#include <thread>

#include "check.hpp"
#include "rank_by_hand.hpp"

using namespace pipemorph;

TEST(link_auto_takes_shared_memory_on_one_host) {
    Two two(Transport::any);
    CHECK(two.dialled->transport() == Transport::shm);
    CHECK(two.accepted->transport() == Transport::shm);
}

TEST(link_one_side_may_insist_on_tcp) {
    Two two(config(0, Transport::any), config(1, Transport::tcp));
    CHECK(two.dialled->transport() == Transport::tcp);
    CHECK(two.accepted->transport() == Transport::tcp);
}

TEST(link_receive_while_closing_is_an_error_not_a_hang) {
    Two two(Transport::tcp);
    two.accepted->reserve(0, 1, 100);
    std::string why;
    std::thread waiter(
        [&] { why = THROWS(EngineError, receive(*two.accepted, {0, 0, 0, 0, 0}, 30.0)); });
    two.low.close(5.0);
    waiter.join();
    CHECK(why.find("rank 0 closed it") != std::string::npos);
    CHECK(why.find("link 7 (rank 0 <-> 1)") != std::string::npos);
}

TEST(link_close_waits_for_acknowledgements) {
    Two two(Transport::tcp);
    two.accepted->reserve(0, 1, 1 << 20);
    for (int64_t i = 0; i < 10; ++i) send(*two.dialled, {0, 0, i, 0, 0}, 1 << 20);
    std::thread closer([&] { two.low.close(30.0); });
    for (int64_t i = 0; i < 10; ++i)
        check_and_release(*two.accepted, receive(*two.accepted, {0, 0, i, 0, 0}), 1 << 20);
    closer.join();
}

TEST(link_a_silent_stranger_is_shown_the_door) {
    Engine engine(config(0, Transport::tcp));
    const auto address = resolve("127.0.0.1", engine.port(), false).front();
    const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(::connect(fd.get(), address.get(), address.size) == 0);
    timeval limit{30, 0};
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char byte;
    CHECK(::recv(fd.get(), &byte, 1, 0) == 0);  // closed, and not a byte said
    until("refused", [&] { return engine.refused().size() == 1; });
    CHECK(engine.refused()[0].find("sent nothing") != std::string::npos);
}

// Its dialler's last word may still come and say that the paths are of another kind.
TEST(link_takes_no_data_connection_before_it_is_confirmed) {
    Engine engine(config(1, Transport::tcp));
    std::shared_ptr<Link> accepted;
    std::thread acceptor([&] {
        try {
            accepted = engine.accept(0, 7, 30.0, [] {});
        } catch (const EngineError&) {  // seen below
        }
    });
    Runtime runtime(config(0, Transport::tcp));
    const auto dialled = [&](Purpose purpose) {
        Hello h = hello_by_hand(Transport::tcp);
        h.purpose = purpose;
        return dial_by_hand(runtime, engine.port(), std::move(h));
    };
    const DialResult control = dialled(Purpose::control);
    const DialResult early = dialled(Purpose::data);
    std::vector<uint8_t> confirm;
    FrameMac says(control.keys.ours);
    append_frame(confirm, encode_frame(ConfirmFrame{Transport::tcp}), 0, 0, &says);
    const bool confirmed = ::send(control.fd.get(), confirm.data(), confirm.size(), MSG_NOSIGNAL) ==
                           static_cast<ssize_t>(confirm.size());
    acceptor.join();
    const DialResult late = dialled(Purpose::data);
    runtime.stop();
    CHECK(control.fd && confirmed && accepted);
    CHECK(early.not_yet && early.error.find("not confirmed yet") != std::string::npos);
    CHECK(late.fd);
}

// Accepts whatever is dialled with one answer.
struct Answering {
    Runtime runtime;
    RefusalLog refusals;
    std::vector<Fd> accepted;  // the control thread's
    Listener listener;

    explicit Answering(HelloReply reply)
        : runtime(config(1, Transport::tcp)),
          listener(runtime, refusals, resolve("127.0.0.1", 0, true).front(),
                   [this, reply](const std::shared_ptr<PendingConnection>& pending) {
                       accepted.push_back(pending->accept(reply));
                   }) {
        runtime.control.post([this] { listener.start(); });
    }
    ~Answering() {
        std::promise<void> stopped;
        runtime.control.post([&] {
            listener.stop();
            stopped.set_value();
        });
        stopped.get_future().wait();
        runtime.stop();
    }
    std::shared_ptr<Link> connect(Engine& engine) {
        return engine.connect(1, 7, "127.0.0.1", listener.port(), 20.0, [] {});
    }
};

TEST(link_without_a_path_is_refused_by_its_dialler) {
    HelloReply no_socket;
    no_socket.transport = Transport::tcp;
    Answering peer(no_socket);
    Engine engine(config(0, Transport::tcp));
    const std::string why = THROWS(EngineError, peer.connect(engine));
    CHECK(why.find("rank 1 agreed to tcp without a single data path") != std::string::npos);
}

// As in another network namespace of one host.
TEST(link_uses_tcp_where_shared_memory_cannot_be_reached) {
    HelloReply reply;
    reply.transport = Transport::shm;
    reply.unix_name = "no listener is here";
    reply.sockets = 1;
    Answering peer(reply);
    Engine engine(config(0, Transport::any));
    const auto link = peer.connect(engine);
    CHECK(link->transport() == Transport::tcp);
    CHECK(link->stats().paths.size() == 1 && link->stats().paths[0].kind == "tcp");
}

// What a rank finds wrong right after it has connected, its neighbour has to find by itself.
TEST(link_that_its_dialler_closes_at_once_is_accepted_all_the_same) {
    for (int i = 0; i < 20; ++i) {
        Engine high(config(1, Transport::tcp));
        Engine low(config(0, Transport::tcp));
        auto accepted =
            std::async(std::launch::async, [&] { return high.accept(0, 7, 30.0, [] {}); });
        low.connect(1, 7, "127.0.0.1", high.port(), 30.0, [] {});
        low.close(0.0);
        const std::shared_ptr<Link> link = accepted.get();
        until("dead", [&] { return !link->alive(); });
        CHECK(link->error() == "link 7 (rank 0 <-> 1) is dead: rank 0 closed it");
    }
}

TEST(link_that_its_dialler_leaves_before_it_is_confirmed_ends_accept_in_words) {
    Engine high(config(1, Transport::tcp));
    Engine low(config(0, Transport::tcp));
    // The connection waits there for accept(), and never comes up.
    THROWS(EngineError, low.connect(1, 7, "127.0.0.1", high.port(), 30.0,
                                    [] { throw EngineError("interrupted"); }));
    const std::string why = THROWS(EngineError, high.accept(0, 7, 30.0, [] {}));
    CHECK(why ==
          "link 7 (rank 0 <-> 1) is dead: rank 0 gave it up: connect() had returned before it came "
          "up");
}

// Killed between its hello and its last frame: no process reports it, and none listens there.
TEST(link_of_a_dialler_that_is_gone_before_it_is_confirmed_ends_accept) {
    Config c = config(1, Transport::tcp);
    c.peer_deadline = 1.0;
    Engine engine(c);
    auto accepted = std::async(
        std::launch::async, [&] { return THROWS(EngineError, engine.accept(0, 7, 30.0, [] {})); });
    const Fd closed(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto address = resolve("127.0.0.1", 0, false).front();
    CHECK(::bind(closed.get(), address.get(), address.size) == 0);
    Runtime runtime(config(0, Transport::tcp));
    Hello hello = hello_by_hand(Transport::tcp);
    hello.listen_port = local_port(closed);
    DialResult control = dial_by_hand(runtime, engine.port(), std::move(hello));
    runtime.stop();
    CHECK(control.fd);
    const int64_t start = steady_ns();
    control.fd.reset();
    const std::string why = accepted.get();
    CHECK(why.find("is dead: rank 0 is gone: no process listens at 127.0.0.1:") !=
          std::string::npos);
    CHECK(steady_ns() - start < 10 * kSecond);
}

// Its engine knows what it ended of, and has others.
TEST(link_that_has_ended_gives_its_memory_back_when_nobody_has_it) {
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        two.accepted->reserve(0, 2, 4096);
        send(*two.dialled, {0, 0, 0, 0, 0}, 4096);
        Arrived message = receive(*two.accepted, {0, 0, 0, 0, 0});
        std::vector<std::weak_ptr<Memory>> memory;
        for (const auto& slots : two.accepted->slot_memory()) memory.push_back(slots);
        for (const auto& peers : two.dialled->lease_memory()) memory.push_back(peers);
        CHECK(memory.size() == (transport == Transport::shm ? 2 : 1));
        two.accepted->die("it is over");
        until("dead", [&] { return !two.accepted->alive() && !two.dialled->alive(); });
        const auto alive = [&memory] {
            return std::count_if(memory.begin(), memory.end(),
                                 [](const auto& each) { return !each.expired(); });
        };
        std::this_thread::sleep_for(std::chrono::milliseconds(150));  // a few ticks
        CHECK(alive() == static_cast<ptrdiff_t>(memory.size()));
        two.accepted.reset();
        two.dialled.reset();
        until("only what is shown remains", [&] { return alive() == 1; });
        const auto expected = payload(0, 4096);
        CHECK(std::equal(expected.begin(), expected.end(), message.data));
        message = {};
        until("nothing remains", [&] { return alive() == 0; });
        const std::string why = THROWS(EngineTimeout, two.high.accept(0, 7, 0.01, [] {}));
        CHECK(why.ends_with("the last connection failed: it is over"));
    }
}

TEST(link_tells_its_peer_what_it_died_of) {
    for (const bool dialler : {true, false}) {
        Two two(Transport::tcp);
        two.accepted->reserve(0, 1, 1 << 20);
        const std::shared_ptr<Link> dead = dialler ? two.dialled : two.accepted;
        const std::shared_ptr<Link> survivor = dialler ? two.accepted : two.dialled;
        const int64_t start = steady_ns();
        dead->die(dead->describe() + " is dead: " + std::string(5000, 'y'));
        until("dead", [&] { return !survivor->alive(); });
        // Sooner than by silence, which counts from half of the deadline on.
        CHECK(steady_ns() - start < to_ns(config(0, Transport::tcp).peer_deadline) / 2);
        const std::string said = "link 7 (rank 0 <-> 1) is dead: rank " +
                                 std::to_string(dialler ? 0 : 1) + " gave it up: yyy";
        CHECK(survivor->error().starts_with(said));
    }
}

// While a path's thread is in the middle of a copy, it may write into a slot.
TEST(link_tells_its_end_when_no_path_can_write_any_more) {
    struct Gate {
        std::promise<void> opens;
        ~Gate() { opens.set_value(); }
    };
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        Two two(transport);
        paths_up(*two.accepted);
        {
            Gate gate;
            std::promise<void> busy;
            two.high.runtime().data(0).post([&busy, open = gate.opens.get_future().share()] {
                busy.set_value();
                open.wait();
            });
            busy.get_future().wait();
            two.accepted->die("it is over");
            CHECK(two.accepted->alive() && two.accepted->error().empty());
            CHECK(!two.accepted->try_receive({0, 0, 0, 0, 0}));
        }
        until("dead", [&] { return !two.accepted->alive(); });
        CHECK(two.accepted->error() == "it is over");
    }
}

TEST(link_ends_with_the_words_of_what_its_engine_has_thrown) {
    for (const bool control : {true, false}) {
        Two two(Transport::tcp);
        Runtime& runtime = two.high.runtime();
        (control ? runtime.control : runtime.data(0)).post([] {
            throw std::runtime_error("no memory");
        });
        until("dead", [&] { return !two.accepted->alive() && !two.dialled->alive(); });
        const std::string why = std::string("the engine of rank 1 failed: thread ") +
                                (control ? "pm-control" : "pm-data-0") + ": no memory";
        CHECK(two.accepted->error() == "link 7 (rank 0 <-> 1) is dead: " + why);
        CHECK(two.dialled->error().ends_with("rank 1 gave it up: " + why));
        CHECK(THROWS(EngineError, two.high.accept(0, 8, 1.0, [] {})) == why);
        two.high.close(5.0);
    }
}

TEST(link_one_address_cannot_take_all_the_places_of_strangers) {
    Engine engine(config(0, Transport::tcp));
    const auto address = resolve("127.0.0.1", engine.port(), false).front();
    const auto source = resolve("127.0.0.2", 0, false).front();
    std::vector<Fd> silent;
    for (int i = 0; i < 200; ++i) {
        const Fd& fd = silent.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        CHECK(::bind(fd.get(), source.get(), source.size) == 0);
        CHECK(::connect(fd.get(), address.get(), address.size) == 0);
    }
    until("refused", [&] {
        const auto refused = engine.refused();
        return std::any_of(refused.begin(), refused.end(), [](const std::string& why) {
            return why.starts_with("127.0.0.2: too many unauthenticated connections at once") ||
                   why.starts_with("127.0.0.2: made room for others");
        });
    });
}
