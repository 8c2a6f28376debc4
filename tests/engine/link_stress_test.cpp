// Links under traffic in both directions while their connections are cut, and while they end: real
// engines, sockets and threads. PIPEMORPH_STRESS_MESSAGES asks for more than the suite takes.
#include <atomic>
#include <cstdlib>
#include <deque>

#include "two_engines.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kSlots = 4;
constexpr size_t kSlotBytes = size_t{1} << 20;

int64_t wanted(int64_t normally) {
    const char* given = std::getenv("PIPEMORPH_STRESS_MESSAGES");
    return given == nullptr ? normally : std::strtoll(given, nullptr, 10);
}

struct Dice {
    std::mt19937_64 random;
    explicit Dice(uint64_t seed) : random(seed) {}
    uint64_t operator()(uint64_t below) { return random() % below; }
};

Key key_of(int64_t number, int direction) {
    Key key;
    key.microbatch = number;
    key.direction = direction;
    return key;
}

// Plain or leased, far ahead of what there are slots for.
void send_many(Link& link, int direction, int64_t count, uint64_t seed) {
    Dice dice(seed);
    std::deque<uint64_t> under_way;
    for (int64_t i = 0; i < count; ++i) {
        const Key key = key_of(i, direction);
        const size_t bytes = size_of(i);
        auto lease = dice(3) == 0 ? link.lease(direction, bytes) : std::nullopt;
        under_way.push_back(lease ? send_leased(link, std::move(*lease), key)
                                  : send(link, key, bytes));
        for (; under_way.size() > 16 * kSlots; under_way.pop_front())
            wait_sent(link, under_way.front());
    }
    for (const uint64_t ticket : under_way) wait_sent(link, ticket);
}

void receive_many(Link& link, int direction, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        check_and_release(link, receive(link, key_of(i, direction)), size_of(i));
}

// What a thread of a test throws, thrown where the test can fail of it.
class Crowd {
  public:
    template <typename F>
    void run(F&& what) {
        threads_.emplace_back([this, what] {
            try {
                what();
            } catch (const std::exception& e) {
                const std::lock_guard lock(mu_);
                failed_ += std::string(e.what()) + "; ";
            } catch (...) {
                const std::lock_guard lock(mu_);
                failed_ += "a check failed; ";
            }
        });
    }
    std::string join() {
        for (std::thread& t : threads_) t.join();
        threads_.clear();
        return failed_;
    }

  private:
    std::vector<std::thread> threads_;
    std::mutex mu_;
    std::string failed_;
};

Config stressed(uint32_t rank, Transport transport, Integrity integrity) {
    Config c = config(rank, transport);
    c.integrity = integrity;
    c.sockets = 3;
    return c;
}

void reserve_both(Two& two) {
    two.accepted->reserve(0, kSlots, kSlotBytes);
    two.dialled->reserve(1, kSlots, kSlotBytes);
}

}  // namespace

TEST(links_deliver_once_whatever_is_cut_meanwhile) {
    const int64_t count = wanted(250);
    for (const Transport transport : {Transport::tcp, Transport::shm}) {
        for (const Integrity integrity : {Integrity::crc, Integrity::mac, Integrity::aead}) {
            Two two(stressed(0, transport, integrity), stressed(1, transport, integrity));
            reserve_both(two);
            Crowd crowd;
            crowd.run([&] { send_many(*two.dialled, 0, count, 1); });
            crowd.run([&] { receive_many(*two.accepted, 0, count); });
            crowd.run([&] { send_many(*two.accepted, 1, count, 3); });
            crowd.run([&] { receive_many(*two.dialled, 1, count); });
            std::atomic<bool> over{false};
            std::thread saboteur([&] {
                for (Dice dice(5); !over;) {
                    Link& link = dice(2) == 0 ? *two.dialled : *two.accepted;
                    if (dice(4) == 0)
                        link.sever_control();
                    else
                        link.sever_data_path(static_cast<uint32_t>(dice(link.path_count())));
                    std::this_thread::sleep_for(std::chrono::milliseconds(5 + dice(40)));
                }
            });
            const std::string failed = crowd.join();
            over = true;
            saboteur.join();
            if (!failed.empty()) check::fail(__FILE__, __LINE__, failed);
            for (const auto& [link, in] : {std::pair(two.dialled, 1), std::pair(two.accepted, 0)}) {
                until("all slots are free", [&] { return link->stats().slots_in_use == 0; });
                CHECK(link->alive() && link->stats().sends_in_flight == 0);
                CHECK(link->stats().messages_received == static_cast<uint64_t>(count));
                CHECK(!link->arrived(key_of(count, in)));
            }
            CHECK(two.dialled->stats().reconnects + two.accepted->stats().reconnects > 0);
        }
    }
}

TEST(links_end_in_the_middle_of_everything) {
    const int64_t rounds = wanted(400) / 10;
    for (int64_t round = 0; round < rounds; ++round) {
        Dice dice(static_cast<uint64_t>(round));
        const Transport transport = round % 2 == 0 ? Transport::tcp : Transport::shm;
        auto two = std::make_unique<Two>(stressed(0, transport, Integrity::crc),
                                         stressed(1, transport, Integrity::crc));
        reserve_both(*two);
        Crowd crowd;
        const auto until_it_ends = [](auto&& what) {
            return [what] {
                try {
                    what();
                } catch (const EngineTimeout&) {
                    throw;
                } catch (const EngineError&) {
                }
            };
        };
        constexpr int64_t kMany = 1'000'000;
        const auto low = two->dialled;
        const auto high = two->accepted;
        crowd.run(until_it_ends([low] { send_many(*low, 0, kMany, 1); }));
        crowd.run(until_it_ends([high] { send_many(*high, 1, kMany, 2); }));
        crowd.run(until_it_ends([low] { receive_many(*low, 1, kMany); }));
        crowd.run(until_it_ends([high] { receive_many(*high, 0, kMany); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(dice(60)));
        switch (dice(4)) {
            case 0:
                low->die("it is over");
                break;
            case 1:
                high->close(steady_ns() + static_cast<int64_t>(dice(2)) * 50 * kMillisecond);
                break;
            case 2:
                two->low.close(0.0);
                break;
            default:
                two->high.close(0.05);
                break;
        }
        const std::string failed = crowd.join();
        if (!failed.empty()) check::fail(__FILE__, __LINE__, failed);
        CHECK(!low->alive() && !high->alive());
        CHECK(!low->error().empty() && !high->error().empty());
    }
}
