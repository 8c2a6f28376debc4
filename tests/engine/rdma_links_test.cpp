// Pair engines in one process, joined by the fake cards, with their faults.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <tuple>

#include "check.hpp"
#include "fake_verbs.hpp"
#include "rank_by_hand.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 64 << 10;
constexpr double kTimeout = 30.0;

Config config(uint32_t rank, std::vector<std::string> devices) {
    Config c = pipemorph::config(rank, Transport::rdma);
    c.rdma.devices = std::move(devices);
    c.rdma.verbs = &fake::Fabric::verbs();
    return c;
}

// From leased memory, as far as there is some.
uint64_t send_leased(Link& link, const Key& key, size_t bytes) {
    auto lease = link.lease(static_cast<int>(key.direction), bytes);
    return lease ? pipemorph::send_leased(link, std::move(*lease), key) : send(link, key, bytes);
}

void receive_right(Link& link, const Key& key, size_t bytes) {
    check_and_release(link, receive(link, key), bytes);
}

Key key(int64_t microbatch, int64_t direction = 0) {
    return {0, 0, microbatch, direction, 0};
}

// One call of the cards' that a test has stopped at: it goes on when this does.
class Gate {
  public:
    // To be called from where it shall stop; once open it stops no thread.
    void pass() {
        std::unique_lock lock(mu_);
        ++stopped_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return open_; });
    }
    void until_stopped() {
        std::unique_lock lock(mu_);
        const auto end = std::chrono::system_clock::now() + std::chrono::seconds(30);
        CHECK(changed_.wait_until(lock, end, [this] { return stopped_ > 0; }));
    }
    void open() {
        const std::lock_guard lock(mu_);
        open_ = true;
        changed_.notify_all();
    }

  private:
    std::mutex mu_;
    std::condition_variable changed_;
    int stopped_ = 0;
    bool open_ = false;
};

struct Pair {
    fake::Fabric fabric;
    std::optional<Engine> low;
    std::optional<Engine> high;
    std::shared_ptr<Link> dialled;
    std::shared_ptr<Link> accepted;

    explicit Pair(uint32_t rails = 1, uint32_t queue_pairs_low = 1, uint32_t queue_pairs_high = 1,
                  uint64_t flight_bytes = Config{}.flight_bytes) {
        std::vector<std::string> devices[2];
        for (uint32_t i = 0; i < 2 * rails; ++i) {
            devices[i % 2].push_back("fake" + std::to_string(i));
            fabric.add(devices[i % 2].back().c_str());
        }
        Config ours = config(0, devices[0]);
        Config theirs = config(1, devices[1]);
        ours.flight_bytes = flight_bytes;
        ours.rdma.queue_pairs = queue_pairs_low;
        theirs.rdma.queue_pairs = queue_pairs_high;
        low.emplace(std::move(ours));
        high.emplace(std::move(theirs));
    }
    // The tests' own gates must be open by then.
    ~Pair() {
        fabric.intercept(nullptr);
        fabric.flow();
        low->close(0.0);
        high->close(0.0);
    }
    void link() {
        std::thread acceptor([&] { accepted = high->accept(0, 7, kTimeout, [] {}); });
        dialled = low->connect(1, 7, "127.0.0.1", high->port(), kTimeout, [] {});
        acceptor.join();
    }
    void linked() {
        link();
        rails_up();
    }
    void rails_up() {
        for (Link* l : {&*dialled, &*accepted})
            until("all rails up", [&] {
                for (const PathStats& p : l->stats().paths)
                    if (p.kind == "rdma" && p.state != "UP") return false;
                return true;
            });
    }
};

bool gone(const fake::Call& call, const char* device) {
    return call.device == device &&
           (call.name == "destroy_qp" || (call.name == "modify_qp" && call.state == abi::kQpError));
}

}  // namespace

TEST(rdma_link_carries_all_sizes_both_ways) {
    Pair two(2);
    two.linked();
    two.accepted->reserve(0, 3, 1 << 20);
    two.dialled->reserve(1, 2, 1 << 20);
    constexpr size_t kSizes[] = {0, 1, kChunk, kChunk + 1, 1 << 20};
    for (int64_t i = 0; i < 20; ++i)
        for (Link* l : {&*two.dialled, &*two.accepted})
            send(*l, key(i, l == &*two.accepted), kSizes[size_t(i) % std::size(kSizes)]);
    for (int64_t i = 0; i < 20; ++i) {
        receive_right(*two.accepted, key(i, 0), kSizes[size_t(i) % std::size(kSizes)]);
        receive_right(*two.dialled, key(i, 1), kSizes[size_t(i) % std::size(kSizes)]);
    }
    const LinkStats s = two.dialled->stats();
    CHECK(s.transport == "rdma" && s.chunks_resent == 0);
    CHECK(s.paths[0].chunks > 0 && s.paths[1].chunks > 0 && s.paths[2].chunks == 0);
}

// Memory comes a moment after its first request.
Link::Lease leased_in_place(Link& link, size_t bytes) {
    std::optional<Link::Lease> lease;
    until("memory to be leased", [&] {
        lease = link.lease(0, bytes);
        return lease.has_value();
    });
    return std::move(*lease);
}

bool within(const Link& link, const uint8_t* data) {
    for (const auto& memory : link.lease_memory())
        if (data >= memory->data() && data < memory->data() + memory->size()) return true;
    return false;
}

TEST(rdma_link_copies_nothing_of_what_is_leased) {
    constexpr size_t kBytes = 300'000;
    Pair two(2, 2, 2);
    two.linked();
    two.accepted->reserve(0, 3, kBytes);
    CHECK(!two.dialled->lease(0, kBytes));  // it is only requested
    const Link::Lease unsent = leased_in_place(*two.dialled, kBytes);
    CHECK(within(*two.dialled, unsent.data) && !unsent.slot);
    two.dialled->end_lease(unsent);
    int64_t i = 0;
    // Which of the paths is free for a chunk is up to threads.
    until("each path to have carried some of it", [&] {
        // One lives on, so this is another one's.
        CHECK(leased_in_place(*two.dialled, kBytes).data != unsent.data);
        const uint64_t ticket = send_leased(*two.dialled, key(i), kBytes);
        receive_right(*two.accepted, key(i), kBytes);
        until("acknowledged", [&] { return two.dialled->sent(ticket); });
        const auto paths = two.dialled->stats().paths;
        const auto carried = [](const auto& path) { return path.chunks > 0; };
        return ++i >= 20 && std::all_of(paths.begin(), paths.begin() + 4, carried);
    });
    const LinkStats sent = two.dialled->stats();
    CHECK(sent.transport == "rdma" && sent.bytes_sent == static_cast<uint64_t>(i) * kBytes);
    CHECK(sent.bytes_copied_out == 0 && two.accepted->stats().bytes_copied_in == 0);
    CHECK(two.accepted->lease_memory().empty());  // it has leased nothing
}

TEST(rdma_link_that_has_ended_gives_its_memory_back_when_nobody_has_it) {
    Pair two;
    two.linked();
    two.accepted->reserve(0, 2, kChunk);
    const std::weak_ptr<Memory> slots = two.accepted->slot_memory().front();
    leased_in_place(*two.dialled, kChunk);
    const std::weak_ptr<Memory> leases = two.dialled->lease_memory().front();
    two.accepted->die("it is over");
    until("dead", [&] { return !two.accepted->alive() && !two.dialled->alive(); });
    CHECK(!slots.expired() && !leases.expired());
    two.accepted.reset();
    two.dialled.reset();
    until("given back", [&] { return slots.expired() && leases.expired(); });
}

// What there is goes round; beyond that messages are sent as if nothing had been leased.
TEST(rdma_link_leases_no_more_memory_than_it_may_have) {
    constexpr size_t kBytes = 128 << 10;
    Pair two(1, 1, 1, 3 * kBytes);
    two.linked();
    two.accepted->reserve(0, 6, kBytes);
    CHECK(!two.dialled->lease(0, 4 * kBytes) && two.dialled->lease_memory().empty());
    std::vector<Link::Lease> leases;
    for (int i = 0; i < 3; ++i) leases.push_back(leased_in_place(*two.dialled, kBytes - 100));
    CHECK(!two.dialled->lease(0, 1) && two.dialled->lease_memory().size() <= 3);
    send_leased(*two.dialled, key(0), kBytes);
    receive_right(*two.accepted, key(0), kBytes);
    CHECK(two.dialled->stats().bytes_copied_out == kBytes);
    leases.clear();
    // Neighbours are one again, so that a larger piece may be had.
    for (int64_t i = 1; i <= 6; ++i) {
        const uint64_t ticket = send_leased(*two.dialled, key(i), kBytes);
        receive_right(*two.accepted, key(i), kBytes);
        until("acknowledged", [&] { return two.dialled->sent(ticket); });
    }
    CHECK(two.dialled->stats().bytes_copied_out == kBytes);
}

// The rail is lost with a lease on its way: it goes another way, and then its memory is lent again.
TEST(rdma_link_sends_a_lease_again_whose_rail_is_lost) {
    Pair two;
    two.linked();
    two.accepted->reserve(0, 2, kChunk);
    const uint8_t* const first = leased_in_place(*two.dialled, kChunk).data;
    two.fabric.hold();
    const uint64_t ticket = send_leased(*two.dialled, key(0), kChunk);
    until("under way", [&] { return two.fabric.under_way() >= 2; });
    two.dialled->sever_data_path(0);
    receive_right(*two.accepted, key(0), kChunk);
    until("acknowledged", [&] { return two.dialled->sent(ticket); });
    CHECK(two.dialled->stats().chunks_resent == 1 && two.dialled->stats().transport == "tcp");
    CHECK(two.dialled->stats().bytes_copied_out == 0);
    CHECK(leased_in_place(*two.dialled, kChunk).data == first);
    send_leased(*two.dialled, key(1), kChunk);
    const Arrived next = receive(*two.accepted, key(1));
    two.fabric.flow();  // what the old queue pair had sent
    check_and_release(*two.accepted, next, kChunk);
    CHECK(two.accepted->stats().messages_received == 2);
}

// A rail that cannot register the memory copies, the other one does not.
TEST(rdma_link_stages_what_is_leased_for_a_rail_that_cannot_reach_it) {
    for (const bool none : {false, true}) {
        Pair two(2);
        two.linked();
        two.accepted->reserve(0, 1, 1 << 20);
        two.fabric.intercept([&](const fake::Call& call) {
            return call.name == "reg_mr" && (none || call.device == "fake0") ? ENOMEM : 0;
        });
        if (none) {
            CHECK(!two.dialled->lease(0, 1 << 20));
            // It is no longer requested, once that is known.
            until("known", [&] {
                return !two.dialled->lease(0, 1 << 20) && two.dialled->lease_memory().empty();
            });
        }
        int64_t i = 0;
        LinkStats s;
        // Which of the rails is free for a chunk is up to threads.
        until("each rail to have carried some of it", [&] {
            if (!none) leased_in_place(*two.dialled, 1 << 20);
            const uint64_t ticket = send_leased(*two.dialled, key(i), 1 << 20);
            receive_right(*two.accepted, key(i++), 1 << 20);
            until("acknowledged", [&] { return two.dialled->sent(ticket); });
            s = two.dialled->stats();
            return s.paths[0].chunks > 0 && s.paths[1].chunks > 0;
        });
        CHECK(s.transport == "rdma");
        CHECK(s.bytes_copied_out == (none ? s.bytes_sent : s.paths[0].bytes));
    }
}

// Queue pairs that break at either end, in the middle of messages.
TEST(rdma_link_storm) {
    constexpr int64_t kMessages = 200;
    constexpr size_t kBytes = 300'000;
    Pair two(2);
    two.linked();
    two.accepted->reserve(0, 4, kBytes);
    two.dialled->reserve(1, 3, kBytes);
    std::atomic<int> running{2};
    std::string error;
    std::mutex error_mu;
    const auto receiver = [&](Link& link, int64_t direction) {
        return std::thread([&, direction] {
            try {
                for (int64_t i = 0; i < kMessages; ++i)
                    receive_right(link, key(i, direction), kBytes);
            } catch (const std::exception& e) {
                const std::lock_guard lock(error_mu);
                error += e.what();
            }
            --running;
        });
    };
    std::thread receivers[] = {receiver(*two.accepted, 0), receiver(*two.dialled, 1)};
    std::thread sender([&] {
        for (int64_t i = 0; i < kMessages; ++i) {
            send_leased(*two.dialled, key(i, 0), kBytes);
            if (i % 2 == 0)
                send_leased(*two.accepted, key(i, 1), kBytes);
            else
                send(*two.accepted, key(i, 1), kBytes);
        }
    });
    std::mt19937 random(3);
    int cuts = 0;
    while (running > 0) {
        Link& link = random() % 2 == 0 ? *two.dialled : *two.accepted;
        link.sever_data_path(random() % 2);
        ++cuts;
        const uint64_t enough = two.dialled->stats().messages_sent + 5;
        until("messages after a cut",
              [&] { return running == 0 || two.dialled->stats().messages_sent >= enough; });
    }
    sender.join();
    for (std::thread& t : receivers) t.join();
    if (!error.empty()) check::fail(__FILE__, __LINE__, error);
    const LinkStats a = two.dialled->stats();
    const LinkStats b = two.accepted->stats();
    CHECK(cuts > 1 && a.paths[0].times_lost + a.paths[1].times_lost > 0);
    until("all is acknowledged", [&] {
        return two.dialled->stats().sends_in_flight == 0 &&
               two.accepted->stats().sends_in_flight == 0;
    });
    CHECK(b.messages_received == kMessages && a.messages_received == kMessages);
}

// The kernel looks for a neighbour for up to a second, and all links' control is one thread.
TEST(rdma_link_control_does_not_wait_for_a_queue_pair_to_be_connected) {
    for (const char* slow : {"fake0", "fake1"}) {
        Pair two;
        Gate gate;
        two.fabric.intercept([&](const fake::Call& call) {
            if (call.device == slow && call.state == abi::kQpReadyToReceive) gate.pass();
            return 0;
        });
        struct Open {
            Gate& gate;
            ~Open() { gate.open(); }
        } open{gate};
        two.link();
        gate.until_stopped();
        // An empty message and its acknowledgement travel over control alone.
        send(*two.dialled, key(1), 0);
        receive_right(*two.accepted, key(1), 0);
        until("acknowledged", [&] { return two.dialled->stats().sends_in_flight == 0; });
        gate.open();
        two.rails_up();
    }
}

// Memory that a rail cannot take is found out while its queue pair is on the way to being up.
TEST(rdma_link_leaves_a_rail_that_was_barred_while_it_connected) {
    for (const char* quarantined : {"fake0", "fake1"}) {
        Pair two;
        Gate gate;
        std::atomic<bool> registers{true};
        two.fabric.intercept([&](const fake::Call& call) {
            if (call.device != quarantined) return 0;
            if (call.name == "reg_mr" && !registers) return ENOMEM;
            if (call.state == abi::kQpReadyToReceive) gate.pass();
            return 0;
        });
        struct Open {
            Gate& gate;
            ~Open() { gate.open(); }
        } open{gate};
        two.link();
        gate.until_stopped();
        registers = false;
        Link& receiver = quarantined == std::string("fake0") ? *two.dialled : *two.accepted;
        Link& sender = quarantined == std::string("fake0") ? *two.accepted : *two.dialled;
        const int64_t direction = &sender == &*two.accepted;
        receiver.reserve(static_cast<int>(direction), 1, kChunk);
        two.fabric.hold();
        gate.open();
        send(sender, key(0, direction), kChunk);
        receive_right(receiver, key(0, direction), kChunk);
        CHECK(sender.stats().transport == "tcp");
        // Not a word over the rail, not even to find out whether it works.
        CHECK(two.fabric.under_way() == 0);
    }
}

// A write that is under way lands as long as there is its queue pair, whatever was agreed.
TEST(rdma_link_moves_nothing_while_a_queue_pair_may_still_write_it) {
    Pair two;
    two.linked();
    two.accepted->reserve(0, 1, kChunk);
    std::atomic<bool> lives_on{true};
    std::atomic<int> refused{0};
    two.fabric.intercept([&](const fake::Call& call) {
        if (!lives_on || !gone(call, "fake1")) return 0;
        ++refused;
        return EIO;
    });
    two.fabric.hold();
    send(*two.dialled, key(0), kChunk);
    until("under way", [&] { return two.fabric.under_way() >= 2; });
    // The sender gives its rail up, and the receiver cannot.
    two.dialled->sever_data_path(0);
    until("the receiver has tried", [&] { return refused >= 4; });
    const bool moved = two.accepted->arrived(key(0));
    if (moved) {
        // What would become of the slot's next message.
        receive_right(*two.accepted, key(0), kChunk);
        send(*two.dialled, key(1), kChunk);
        const Arrived next = receive(*two.accepted, key(1));
        two.fabric.flow();
        check_and_release(*two.accepted, next, kChunk);
    }
    CHECK(!moved);
    lives_on = false;
    receive_right(*two.accepted, key(0), kChunk);
    CHECK(two.dialled->stats().transport == "tcp");
    two.fabric.flow();
    send(*two.dialled, key(1), kChunk);
    receive_right(*two.accepted, key(1), kChunk);
}

// The same where the end with the queue pair is the one that gives it up.
TEST(rdma_link_reports_a_loss_when_its_queue_pair_is_gone) {
    Pair two;
    two.linked();
    two.accepted->reserve(0, 1, kChunk);
    std::atomic<bool> lives_on{true};
    std::atomic<int> refused{0};
    two.fabric.intercept([&](const fake::Call& call) {
        if (!lives_on || !gone(call, "fake1")) return 0;
        ++refused;
        return EIO;
    });
    two.fabric.hold();
    send(*two.dialled, key(0), kChunk);
    until("under way", [&] { return two.fabric.under_way() >= 2; });
    two.accepted->sever_data_path(0);
    until("it has tried", [&] { return refused >= 4; });
    CHECK(two.accepted->stats().transport == "tcp");
    // It is not out of the world, and what lands counts no more.
    two.fabric.flow();
    CHECK(!two.accepted->arrived(key(0)));
    lives_on = false;
    two.dialled->sever_data_path(0);
    receive_right(*two.accepted, key(0), kChunk);
}

// That thread may be in the middle of its completions.
TEST(rdma_link_retires_a_queue_pair_on_the_thread_of_its_own_rail) {
    fake::Fabric fabric;
    fabric.add("fake1");
    fabric.add("fake3");
    std::promise<std::string> thread;
    std::atomic<bool> called{false};
    Engine engine(config(1, {"fake1", "fake3"}));
    std::shared_ptr<Link> accepted;
    std::thread acceptor([&] { accepted = engine.accept(0, 7, kTimeout, [] {}); });
    struct Join {
        std::thread& thread;
        ~Join() {
            if (thread.joinable()) thread.join();
        }
    } join{acceptor};
    Hello hello = hello_by_hand(Transport::rdma);
    hello.rails = 2;
    RankByHand dialler(engine.port(), hello);
    acceptor.join();
    // A path, and its next connection on another of the acceptor's rails.
    const QpAddress qp{99, 0, {}, 0, 5};
    dialler.say(OfferFrame{0, 1, 0, 0, qp}, 1);
    const AnswerFrame first = dialler.hear<AnswerFrame>();
    CHECK(first.epoch == 1 && first.error.empty());
    fabric.intercept([&](const fake::Call& call) {
        if (!gone(call, "fake1") || called.exchange(true)) return 0;
        char name[16];
        CHECK(pthread_getname_np(pthread_self(), name, sizeof name) == 0);
        thread.set_value(name);
        return 0;
    });
    dialler.say(OfferFrame{0, 2, 0, 1, qp}, 2);
    const AnswerFrame second = dialler.hear<AnswerFrame>();
    CHECK(second.epoch == 2 && second.error.empty());
    auto retired = thread.get_future();
    CHECK(retired.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
    CHECK(retired.get() == "pm-fake1");
}

TEST(rdma_link_dies_of_a_queue_pair_that_cannot_be_destroyed) {
    fake::Fabric fabric;
    fabric.add("fake0");
    fabric.add("fake1");
    Config configs[] = {config(0, {"fake0"}), config(1, {"fake1"})};
    for (Config& c : configs) c.peer_deadline = 1.0;
    Engine low(configs[0]);
    Engine high(configs[1]);
    std::shared_ptr<Link> accepted;
    std::thread acceptor([&] { accepted = high.accept(0, 7, kTimeout, [] {}); });
    const auto dialled = low.connect(1, 7, "127.0.0.1", high.port(), kTimeout, [] {});
    acceptor.join();
    until("up", [&] { return accepted->stats().paths[0].state == "UP"; });
    fabric.intercept([](const fake::Call& call) { return gone(call, "fake1") ? EIO : 0; });
    dialled->sever_data_path(0);
    until("dead", [&] { return !accepted->alive() && !dialled->alive(); });
    fabric.intercept(nullptr);
    CHECK(accepted->error().find("fake1 port 1: a queue pair cannot be destroyed: Input/output "
                                 "error, so it may still write to receive slots") !=
          std::string::npos);
    CHECK(dialled->error().find("rank 1 gave it up: fake1 port 1: a queue pair cannot") !=
          std::string::npos);
    until("destroyed in the end", [&] { return fabric.queue_pairs("fake1") == 0; });
}

// What registering finds out comes too late for a link whose queue pairs are just being destroyed.
TEST(rdma_link_that_is_ending_has_no_rail_to_be_barred) {
    for (const bool offered : {false, true}) {
        Pair two;
        Gate gate;
        Gate ends;
        std::atomic<bool> over{false};
        const std::string ours = offered ? "fake0" : "fake1";
        two.fabric.intercept([&](const fake::Call& call) {
            if (offered && call.device == "fake1" && call.state == abi::kQpReadyToReceive)
                gate.pass();
            if (!over || call.device != ours) return 0;
            if (call.name == "reg_mr") return ENOMEM;
            if (gone(call, ours.c_str())) ends.pass();
            return 0;
        });
        struct Open {
            Gate& gate;
            ~Open() { gate.open(); }
        } open_gate{gate}, open_ends{ends};
        two.link();
        if (offered)
            gate.until_stopped();  // the dialler has no answer yet
        else
            two.rails_up();
        Link& link = offered ? *two.dialled : *two.accepted;
        over = true;
        link.die("it is over");
        ends.until_stopped();
        link.reserve(offered, 1, kChunk);
        CHECK(link.alive() && link.stats().slots_granted == 0);
        ends.open();
        until("ended", [&] { return !link.alive(); });
        CHECK(link.error() == "it is over");
        CHECK(THROWS(EngineError, link.reserve(offered, 1, kChunk)) == "it is over");
    }
}

TEST(rdma_link_dials_again_when_a_queue_pair_meets_an_error_of_this_process) {
    Pair two;
    // At each end one that is made, and one that is connected.
    std::atomic<int> failures[] = {1, 1, 1, 1};
    two.fabric.intercept([&](const fake::Call& call) {
        const bool connects = call.name == "modify_qp" && call.state == abi::kQpReadyToReceive;
        if (call.name != "create_qp" && !connects) return 0;
        if (failures[2 * connects + (call.device == "fake1")]-- > 0) throw std::bad_alloc();
        return 0;
    });
    two.linked();
    for (const auto& each : failures) CHECK(each < 0);
    two.accepted->reserve(0, 2, 3 * kChunk);
    send(*two.dialled, key(0), 3 * kChunk);
    receive_right(*two.accepted, key(0), 3 * kChunk);
    CHECK(two.dialled->stats().transport == "rdma");
}

// Messages go on over TCP until the queue pair is made again, and then over that.
TEST(rdma_link_falls_back_to_tcp_and_comes_back) {
    Pair two;
    two.linked();
    two.accepted->reserve(0, 4, 5 * kChunk);
    int64_t microbatch = 0;
    const auto pass = [&] {
        send(*two.dialled, key(microbatch), 5 * kChunk);
        receive_right(*two.accepted, key(microbatch), 5 * kChunk);
        ++microbatch;
    };
    for (uint64_t round = 1; round <= 3; ++round) {
        two.rails_up();
        pass();
        CHECK(two.dialled->stats().transport == "rdma");
        two.dialled->sever_data_path(0);
        for (;;) {
            pass();
            const LinkStats s = two.dialled->stats();
            if (s.failbacks == round) break;
            CHECK(s.failbacks < round);
        }
        CHECK(two.dialled->stats().fallbacks == round);
    }
    CHECK(two.dialled->stats().paths.at(0).times_lost == 3);
}

// While paths break and are fenced, and with each message in a slot of its size.
TEST(rdma_link_registers_in_steps_what_grows_for_ever) {
    Pair two;
    two.linked();
    const int before = two.fabric.open_objects();
    constexpr size_t kPage = 4096;
    constexpr size_t kMost = 200;
    for (size_t pages = 1; pages <= kMost; ++pages) {
        two.accepted->reserve(0, 2, pages * kPage);
        const auto microbatch = static_cast<int64_t>(pages);
        until("larger slots", [&] {
            try {
                send(*two.dialled, key(microbatch), pages * kPage);
                return true;
            } catch (const EngineError&) {
                return false;
            }
        });
        if (pages % 20 == 0) two.dialled->sever_data_path(0);
        receive_right(*two.accepted, key(microbatch), pages * kPage);
    }
    two.rails_up();
    size_t mapped = 0;
    for (const auto& memory : two.accepted->slot_memory()) mapped += memory->size();
    CHECK(mapped < 4 * 2 * kMost * kPage + (size_t{2} << 20));  // rounded up to 2 MiB at the end
    // A region each, and what queue pairs that are just being replaced are made of.
    CHECK(two.accepted->slot_memory().size() < 16);
    CHECK(two.fabric.open_objects() < before + 16 + 16);
    CHECK(two.accepted->stats().reconnects > 0);
}

// Every pair of rails has as many as both ends want, in the same order at both.
TEST(rdma_links_have_several_queue_pairs_of_a_rail) {
    for (const auto& [ours, theirs, of_each] : {std::tuple{2U, 2U, 2U}, std::tuple{3U, 1U, 1U}}) {
        Pair two(2, ours, theirs);
        two.linked();
        const auto rails = [](const Link& link) {
            std::vector<std::string> names;
            for (const PathStats& p : link.stats().paths)
                if (p.kind == "rdma") names.push_back(p.rail);
            return names;
        };
        const auto low = rails(*two.dialled);
        CHECK(low.size() == 2 * of_each && rails(*two.accepted).size() == low.size());
        CHECK(std::count(low.begin(), low.end(), "fake0 port 1") == of_each);
        CHECK(std::count(low.begin(), low.end(), "fake2 port 1") == of_each);
        two.accepted->reserve(0, 4, 64 * kChunk);
        for (int64_t m = 0; m < 4; ++m) send(*two.dialled, key(m), 64 * kChunk);
        for (int64_t m = 0; m < 4; ++m) receive_right(*two.accepted, key(m), 64 * kChunk);
        for (const PathStats& p : two.dialled->stats().paths)
            if (p.kind == "rdma") CHECK(p.window >= Flow::kLeastChunks * kChunk);
    }
}
