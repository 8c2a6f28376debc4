// When a peer is sought, and when it counts as dead, for hosts and peers that do their worst.
#include "protocol/peer_watch.hpp"

#include "check.hpp"
#include "os/clock.hpp"

using namespace pipemorph;

namespace {

constexpr int64_t kLook = 50 * kMillisecond;  // as often as a link looks

struct Watched {
    int64_t deadline;
    int64_t now = 1'000 * kSecond;
    PeerWatch peer{deadline, now};
    bool up = false;

    // Watches for `span` ns. False as soon as the peer counts as dead.
    bool live(int64_t span, bool sends = false) {
        for (const int64_t end = now + span; now < end;) {
            now += kLook;
            if (up && sends) peer.frame_received(false, now);
            peer.measure_pause(now);
            if (up && peer.is_silent(now)) {
                up = false;
                peer.lost(now);
            }
            if (!up && (peer.is_gone(now) || peer.is_unreachable_too_long(now))) return false;
        }
        return true;
    }
    void connect() {
        peer.connected(now);
        up = true;
    }
    bool cut() {
        up = false;
        return peer.lost(now);
    }
};

constexpr int64_t kDeadlines[] = {kSecond, 10 * kSecond, 300 * kSecond};

}  // namespace

TEST(peer_that_is_heard_lives_and_one_that_falls_silent_is_dead_in_time) {
    for (const int64_t deadline : kDeadlines) {
        Watched w{deadline};
        w.connect();
        CHECK(w.live(3 * deadline, true));
        const int64_t silent_since = w.now;
        CHECK(!w.live(3 * deadline));
        CHECK(w.now - silent_since > deadline + deadline / 2);
        CHECK(w.now - silent_since <= deadline + deadline / 2 + 2 * kLook);
    }
}

TEST(peer_that_comes_back_in_time_starts_anew) {
    for (const int64_t deadline : kDeadlines) {
        Watched w{deadline};
        for (int round = 0; round < 5; ++round) {
            w.connect();
            w.peer.frame_received(true, w.now);
            CHECK(w.live(kSecond, true));
            CHECK(w.cut());  // it worked, so it is sought at once
            CHECK(w.peer.is_reconnect_due(w.now));
            CHECK(w.live(deadline * 3 / 4));
        }
    }
}

// It answers dials and signs of life, and cuts within a second, for ever.
TEST(peer_whose_connections_bring_nothing_new_is_dead_after_the_deadline_and_dialled_seldom) {
    for (const int64_t deadline : kDeadlines) {
        Watched w{deadline};
        w.connect();
        w.peer.frame_received(true, w.now);
        const int64_t cut_first = w.now;
        w.cut();
        int dials = 0;
        while (w.live(kLook)) {
            CHECK(w.now - cut_first < 2 * deadline);
            if (!w.peer.is_reconnect_due(w.now) || !w.peer.begin_reconnect()) continue;
            CHECK(!w.peer.begin_reconnect());  // one at a time
            ++dials;
            w.peer.reconnected();
            w.connect();
            w.peer.frame_received(false, w.now);
            CHECK(!w.cut());
        }
        CHECK(w.now - cut_first > deadline && w.now - cut_first <= deadline + 2 * kLook);
        // Each after twice as long as the one before, up to a tenth of the deadline or half a
        // second.
        CHECK(dials <= 6 + deadline / std::min(deadline / 10, kSecond / 2));
    }
}

TEST(peer_is_dialled_again_after_twice_as_long_until_a_connection_works) {
    Watched w{10 * kSecond};
    w.connect();
    w.peer.frame_received(true, w.now);
    CHECK(w.cut());
    for (int round = 0; round < 2; ++round) {
        for (const int64_t pause : {20, 40, 80, 160, 320, 500, 500}) {
            CHECK(w.peer.begin_reconnect());
            w.peer.dial_unanswered(true, w.now);
            CHECK(!w.peer.is_reconnect_due(w.now + pause * kMillisecond - 1));
            CHECK(w.peer.is_reconnect_due(w.now + pause * kMillisecond));
            w.now += pause * kMillisecond;
        }
        w.connect();
        // Not by what was said before, but by anything after a second.
        w.peer.frame_received(false, w.now);
        w.peer.frame_received(false, w.now + kSecond);
        CHECK(w.cut());
    }
}

TEST(peer_is_gone_where_nobody_listens_any_more) {
    for (const int64_t deadline : kDeadlines) {
        Watched w{deadline};
        w.connect();
        w.peer.frame_received(true, w.now);
        w.cut();
        w.peer.probe_finished(false, w.now);
        CHECK(w.live(deadline * 2 / 5 - kLook));
        // Somebody listens: a process that starts, or a network that is back.
        w.peer.probe_finished(true, w.now);
        CHECK(w.live(deadline / 5));
        const int64_t refused = w.now;
        w.peer.probe_finished(false, w.now);
        CHECK(!w.peer.is_reconnect_due(w.now) && w.peer.is_reconnect_due(w.now + deadline / 40));
        while (w.live(kLook)) w.peer.probe_finished(false, w.now);
        CHECK(w.peer.is_gone(w.now));
        CHECK(w.now - refused <= deadline * 2 / 5 + 2 * kLook);
    }
}

TEST(peer_that_is_found_again_is_not_gone) {
    Watched w{10 * kSecond};
    w.connect();
    w.cut();
    w.peer.dial_unanswered(false, w.now);
    CHECK(w.live(3 * kSecond));
    w.connect();
    w.cut();
    CHECK(w.live(3 * kSecond));
}

TEST(peer_is_not_to_blame_for_a_pause_of_this_process) {
    for (const int64_t deadline : kDeadlines) {
        const int64_t pause = 100 * deadline;
        // Connected, lost, and where no process listens.
        for (int state = 0; state < 3; ++state) {
            Watched w{deadline};
            w.connect();
            w.peer.frame_received(true, w.now);
            if (state > 0) w.cut();
            if (state > 1) w.peer.probe_finished(false, w.now);
            CHECK(w.live(deadline / 5));
            w.now += pause;
            CHECK(w.peer.measure_pause(w.now) == pause);
            CHECK(!w.peer.is_silent(w.now) && !w.peer.is_gone(w.now));
            CHECK(state == 0 || w.peer.unreachable_ns(w.now) <= deadline / 5 + 2 * kLook);
            CHECK(w.live(deadline / 8));
            CHECK(!w.live(2 * deadline));
        }
        // What is too short for one counts.
        Watched w{deadline};
        w.connect();
        w.now += deadline / 5;
        CHECK(w.peer.measure_pause(w.now) == 0);
    }
}

TEST(peer_is_told_of_life_ten_times_a_second) {
    Watched w{10 * kSecond};
    CHECK(w.peer.pings(w.now));
    w.peer.pinged(w.now);
    CHECK(!w.peer.pings(w.now + 99 * kMillisecond) && w.peer.pings(w.now + 100 * kMillisecond));
}
