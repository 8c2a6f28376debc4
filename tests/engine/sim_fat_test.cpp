// Long and fat links: what a wire of so many bytes per second and so long a round trip carries, if
// the rules of the product's LinkCore at both ends say when a chunk may go and how many slots there
// are. Time is simulated; cards and processors cost none.
#include <cstdio>
#include <functional>
#include <queue>

#include "check.hpp"
#include "os/clock.hpp"
#include "protocol/link_core.hpp"

using namespace pipemorph;

namespace {

constexpr uint32_t kChunk = 1 << 20;
constexpr uint64_t kMessage = uint64_t{16} << 20;
constexpr uint64_t kGigabit = 125'000'000;  // bytes

struct Wire {
    double bytes_per_second = 0;  // of all rails together
    int64_t round_trip_ns = 0;
};

class FatLink {
  public:
    FatLink(uint32_t rails, Wire wire, uint64_t flight_bytes)
        : wire(wire), rails_(rails), free_at_(rails) {
        std::vector<std::pair<uint32_t, uint32_t>> pairs;
        for (uint32_t i = 0; i < rails; ++i) pairs.emplace_back(i, i);
        for (const bool dials : {true, false}) {
            ends_.emplace_back(
                LinkCore::Settings{dials, uint32_t{dials}, 8, kChunk, flight_bytes, 5 * kSecond});
            LinkCore& core = ends_.back();
            core.assign_paths(pairs, Transport::tcp, 0);
            core.start(now_);
        }
        // What an application reserves that knows nothing of the distance.
        add_slots(0, 4);
        for (const auto& [path, epoch] : low().due(now_)) {
            QpAddress qp;
            qp.mtu = 1;
            low().offer(path, epoch, qp, "", now_);
            const OfferFrame offer{path, epoch, path, path, qp};
            CHECK(high().take_offer(offer) && high().answer(offer, qp, "", now_));
            CHECK(low().take_answer({path, epoch, "", qp}, now_));
            CHECK(low().connected(path, epoch, "", now_));
            for (LinkCore& core : ends_) {
                CHECK(core.path_up(path, epoch, now_));
                core.pace(path, epoch);
            }
        }
        tick();
    }

    // Carries on for so long; what share of the wire's rate was acknowledged.
    double run(double seconds) {
        const int64_t from = now_;
        const uint64_t before = low().out().bytes_sent;
        const int64_t end = now_ + to_ns(seconds);
        while (!events_.empty() && events_.top().at_ns <= end) {
            // The queue hands out what it holds as constant.
            const Event next = events_.top();
            events_.pop();
            now_ = next.at_ns;
            next.run();
            for (LinkCore& core : ends_) act(core);
        }
        now_ = end;
        const double bytes = static_cast<double>(low().out().bytes_sent - before);
        return bytes / to_seconds(now_ - from) / wire.bytes_per_second;
    }
    uint64_t under_way() const {
        uint64_t bytes = 0;
        for (const PathSet::Path& p : ends_[0].paths()) bytes += p.flow.in_flight();
        return bytes;
    }
    uint64_t most_under_way() const { return most_under_way_; }
    uint64_t slot_bytes() const { return ends_[1].in().extent(0).bytes; }
    uint64_t late() const { return ends_[0].counters().late_messages; }

    Wire wire;

  private:
    struct Event {
        int64_t at_ns;
        uint64_t number;
        std::function<void()> run;
        bool operator<(const Event& o) const {
            return std::pair(at_ns, number) > std::pair(o.at_ns, o.number);
        }
    };
    LinkCore& low() { return ends_[0]; }
    LinkCore& high() { return ends_[1]; }
    void after(int64_t ns, std::function<void()> run) {
        events_.push({now_ + ns, next_event_++, std::move(run)});
    }

    void add_slots(uint32_t place, uint32_t slots) {
        // No end writes there.
        const uint32_t segment =
            high().add_room(0, {place, slots, kMessage}, Memory::anonymous(4096), false);
        for (uint32_t rail = 0; rail < rails_; ++rail)
            high().add_region({rail, segment, 0, uint64_t{1} << 40, 0}, "", now_);
        high().grant_room(segment);
    }

    void act(LinkCore& core) {
        const Actions actions = core.take_actions();
        CHECK(actions.fail.empty() && actions.retire.empty());
        for (const Actions::Grow& what : actions.grow) {
            add_slots(what.room.place, what.room.slots);
            core.grown(what.direction, true);
        }
        write_control(core);
        if (actions.wake && &core == &high()) receive();
        if (&core == &low()) {
            post();
            for (uint32_t path = 0; path < rails_; ++path) pump(path);
        }
    }

    // LinkControl::flush, and what it has written when it has come over.
    void write_control(LinkCore& core) {
        core.collect();
        if (!core.stream().has_unwritten()) return;
        std::vector<uint8_t> bytes;
        core.stream().write(bytes, size_t{1} << 30);
        LinkCore& to = &core == &low() ? high() : low();
        after(wire.round_trip_ns / 2, [this, &to, bytes = std::move(bytes)] {
            to.frame_received(now_);
            for (Bytes rest(bytes); !rest.empty();) {
                const auto h = decode_frame_header(rest.first(kFrameHeaderSize)).value();
                auto frame =
                    decode_frame(h.type, rest.subspan(kFrameHeaderSize, h.body_bytes)).value();
                rest = rest.subspan(kFrameHeaderSize + h.body_bytes);
                CHECK(to.stream().acknowledged(h.acknowledged));
                CHECK(to.stream().received(h.sequence) == ReliableStream::Verdict::deliver);
                if (LinkCore::handles(frame)) CHECK(to.handle(frame, 0, now_).empty());
            }
        });
    }

    void tick() {
        for (LinkCore& core : ends_) {
            core.frame_received(now_);
            core.echoed(wire.round_trip_ns, now_);
            core.check_flow(now_);
        }
        after(50 * kMillisecond, [this] { tick(); });
    }

    // The application always has more to send.
    void post() {
        while (low().out().in_flight() < 256) {
            MessageInfo info;
            info.key.microbatch = posted_++;
            info.bytes = kMessage;
            // No end reads there.
            low().post(info, reinterpret_cast<const uint8_t*>(uintptr_t{1} << 40), nullptr, 0,
                       now_);
        }
    }

    void receive() {
        Key key;
        for (;; ++received_) {
            key.microbatch = received_;
            const auto arrived = high().take(key);
            if (!arrived) return;
            after(200'000, [this, slot = *arrived->slot, serial = arrived->serial] {
                high().release(slot, serial, true);
            });
        }
    }

    void pump(uint32_t path) {
        const uint32_t epoch = low().paths()[path].machine.epoch();
        while (auto task = low().next_chunk(path, epoch, 0, now_)) {
            most_under_way_ = std::max(most_under_way_, under_way());
            const double seconds =
                static_cast<double>(task->bytes) * rails_ / wire.bytes_per_second;
            free_at_[path] = std::max(free_at_[path], now_) + to_ns(seconds);
            const int64_t there = free_at_[path] - now_ + wire.round_trip_ns / 2;
            after(there, [this, header = task->header] {
                const ChunkSink sink = high().begin_chunk(header);
                CHECK(sink.verdict == ChunkSink::Verdict::take);
                high().finish_chunk(sink, true, 0);
            });
            after(there + wire.round_trip_ns / 2,
                  [this, path, epoch] { low().delivered(path, epoch, now_); });
        }
    }

    const uint32_t rails_;
    std::deque<LinkCore> ends_;
    std::priority_queue<Event> events_;
    uint64_t next_event_ = 0;
    int64_t now_ = kSecond;
    std::vector<int64_t> free_at_;
    int64_t posted_ = 0;
    int64_t received_ = 0;
    uint64_t most_under_way_ = 0;
};

}  // namespace

TEST(sim_long_and_fat_links_run_at_their_rate) {
    for (const uint64_t gigabits : {100, 400}) {
        for (const uint32_t rails : {1, 4}) {
            const uint64_t flight =
                gigabits == 100 ? LinkCore::Settings{}.flight_bytes : uint64_t{2} << 30;
            FatLink link(rails, {static_cast<double>(gigabits * kGigabit), 20 * kMillisecond},
                         flight);
            const double at_first = link.run(3.0);
            const double then = link.run(1.0);
            std::printf(
                "        %llu Gb/s, 20 ms, %u queue pairs: %.2f of the rate in the first 3 s, %.3f "
                "then; %llu MiB under way, %llu MiB of slots\n",
                (unsigned long long)gigabits, rails, at_first, then,
                (unsigned long long)(link.most_under_way() >> 20),
                (unsigned long long)(link.slot_bytes() >> 20));
            CHECK(then >= 0.9);
            CHECK(link.most_under_way() <= flight && link.slot_bytes() <= flight);
            CHECK(link.late() == 0);
        }
    }
}

// What the window was measured on does not hold for ever.
TEST(sim_long_links_follow_the_wire) {
    FatLink link(1, {100.0 * kGigabit, 2 * kMillisecond}, uint64_t{1} << 30);
    link.run(3.0);
    CHECK(link.run(1.0) >= 0.9);
    // Another way, ten times as long: within what a measured round trip is believed.
    link.wire.round_trip_ns = 20 * kMillisecond;
    link.run(15.0);
    const double longer = link.run(1.0);
    // And a tenth of the rate: no queue of seconds before it.
    link.wire.bytes_per_second /= 10;
    link.run(15.0);
    const double slower = link.run(1.0);
    const double product = link.wire.bytes_per_second * to_seconds(link.wire.round_trip_ns);
    const double queue = static_cast<double>(link.under_way()) / product;
    std::printf(
        "        a longer way: %.3f of the rate; a slower one: %.3f, %.1f times what fits\n",
        longer, slower, queue);
    CHECK(longer >= 0.9 && slower >= 0.9 && queue < 4);
}
