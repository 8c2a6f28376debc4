// What rails are chosen by, and the life of a path. No device is needed.
#include <arpa/inet.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "check.hpp"
#include "protocol/path_state.hpp"
#include "verbs/gid.hpp"
#include "wire/handshake.hpp"

using namespace pipemorph;

namespace {

using Type = GidInfo::Type;

GidBytes ipv4(uint8_t a, uint8_t b, uint8_t c, uint8_t d) {
    GidBytes gid{};
    gid[10] = gid[11] = 0xff;
    gid[12] = a;
    gid[13] = b;
    gid[14] = c;
    gid[15] = d;
    return gid;
}

GidBytes ipv6(uint8_t first, uint8_t second, uint8_t last) {
    GidBytes gid{};
    gid[0] = first;
    gid[1] = second;
    gid[15] = last;
    return gid;
}

constexpr int64_t kMs = 1'000'000;

// The table that the tests of `pipemorph doctor` read, too.
std::vector<GidInfo> gids_best_first() {
    std::ifstream in(std::filesystem::path(__FILE__).parent_path() / "gids_best_first.txt");
    CHECK(in.is_open());
    std::vector<GidInfo> out;
    for (std::string line; std::getline(in, line);) {
        if (line.starts_with('#')) continue;
        std::string address, type, netdev;
        GidInfo g;
        std::istringstream(line) >> g.index >> address >> type >> netdev;
        CHECK(::inet_pton(AF_INET6, address.c_str(), g.gid.data()) == 1);
        CHECK(!netdev.empty() && (type == "v1" || type == "v2"));
        g.type = type == "v2" ? Type::roce_v2 : Type::roce_v1;
        g.has_netdev = netdev != "-";
        out.push_back(g);
    }
    return out;
}

}  // namespace

TEST(gid_routable_roce_v2_with_a_netdev_is_best) {
    const GidBytes local = ipv6(0xfe, 0x80, 1);
    const GidBytes global = ipv6(0x20, 0x01, 1);
    const GidBytes four = ipv4(10, 0, 0, 1);
    std::vector<GidInfo> table = {
        {local, 0, Type::roce_v1, true}, {local, 1, Type::roce_v2, true},
        {four, 2, Type::roce_v1, true},  {global, 4, Type::roce_v2, true},
        {four, 5, Type::roce_v2, false}, {four, 6, Type::roce_v2, true},
        {four, 7, Type::roce_v2, true},
    };
    const auto best = [&] { return best_gid(table)->index; };
    CHECK(best() == 6);
    table.erase(table.begin() + 5, table.end());
    CHECK(best() == 4);
    table.erase(table.begin() + 3);
    CHECK(best() == 1);  // link-local, but v2 with a device: better than an address without one
    table.erase(table.begin() + 1);
    CHECK(best() == 5);
    CHECK(!best_gid({}));
}

TEST(gids_rank_as_doctor_ranks_them) {
    const std::vector<GidInfo> ranked = gids_best_first();
    CHECK(ranked.size() >= 10);
    std::vector<GidInfo> table = ranked;
    std::sort(table.begin(), table.end(),
              [](const GidInfo& a, const GidInfo& b) { return a.index < b.index; });
    for (const GidInfo& expected : ranked) {
        const uint32_t best = best_gid(table)->index;
        CHECK(best == expected.index);
        std::erase_if(table, [&](const GidInfo& g) { return g.index == best; });
    }
}

TEST(gid_is_said_as_people_write_it) {
    CHECK(gid_text(ipv4(10, 77, 1, 2)) == "10.77.1.2");
    CHECK(gid_text(ipv6(0xfe, 0x80, 1)) == "fe80:0:0:0:0:0:0:1");
}

TEST(rails_are_paired_by_subnet_and_each_is_used_once) {
    const std::vector<GidBytes> ours = {ipv4(10, 0, 1, 1), ipv4(10, 0, 2, 1), ipv4(10, 0, 3, 1)};
    const std::vector<GidBytes> theirs = {ipv4(10, 0, 3, 9), ipv4(10, 0, 2, 9)};
    using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;
    CHECK((pair_rails(ours, theirs) == Pairs{{1, 1}, {2, 0}}));
    const std::vector<GidBytes> same(3, ipv4(1, 2, 3, 4));
    CHECK((pair_rails(same, same) == Pairs{{0, 0}, {1, 1}, {2, 2}}));
    CHECK(pair_rails({}, theirs).empty());
    // Twice as many queue pairs there: not two to one port and none to the other.
    const GidBytes a = ipv4(10, 0, 0, 1), b = ipv4(10, 0, 0, 2);
    const GidBytes c = ipv4(10, 0, 0, 3), d = ipv4(10, 0, 0, 8);
    CHECK((pair_rails({a, b}, {c, d, c, d}) == Pairs{{0, 1}, {1, 0}}));
    CHECK((pair_rails({c, d, c, d}, {a, b}) == Pairs{{0, 1}, {1, 0}}));
    CHECK((pair_rails({a, a, a, a}, {c, d, c, d}) == Pairs{{0, 0}, {1, 1}, {2, 2}, {3, 3}}));
    CHECK(pair_rails(std::vector<GidBytes>(2), {c, d, c, d}).size() == 2);  // both are down
}

TEST(path_states_run_in_a_circle) {
    PathMachine m(1000 * kMs);
    CHECK(m.state() == PathState::init && m.may_dial(0));
    const uint32_t first = m.dial();
    CHECK(m.state() == PathState::connecting && !m.carries() && !m.may_dial(0));
    m.connected(first, 10 * kMs);
    CHECK(m.carries());
    m.suspected(first, true);
    CHECK(m.state() == PathState::suspect && !m.carries());
    m.suspected(first, false);
    CHECK(m.carries());
    m.lost(first, 20 * kMs);
    CHECK(m.state() == PathState::fencing && !m.may_dial(10'000 * kMs));
    m.fence_answered(first + 1);
    CHECK(m.state() == PathState::fencing);  // another epoch's
    m.fence_answered(first);
    CHECK(m.state() == PathState::down);
    CHECK(!m.may_dial(21 * kMs) && m.state() == PathState::cooldown);
    CHECK(m.may_dial(41 * kMs));
    CHECK(m.dial() == first + 1);
    // Late news of the old epoch changes nothing.
    m.connected(first, 0);
    m.lost(first, 0);
    CHECK(m.state() == PathState::connecting);
}

TEST(path_pauses_grow_and_start_over_after_a_good_time) {
    PathMachine m(100 * kMs);
    int64_t now = 0;
    const auto fail_at_once = [&] {
        const uint32_t e = m.dial();
        m.connected(e, now);
        m.lost(e, now);
        m.fence_answered(e);
    };
    for (const int64_t pause : {20, 40, 80, 100, 100}) {
        CHECK(m.may_dial(now));
        fail_at_once();
        CHECK(!m.may_dial(now + (pause - 1) * kMs));
        now += pause * kMs;
    }
    CHECK(m.may_dial(now));
    const uint32_t e = m.dial();
    m.connected(e, now);
    now += 5000 * kMs;
    m.lost(e, now);
    m.fence_answered(e);
    CHECK(m.may_dial(now));
}

TEST(path_takes_no_epoch_that_its_peer_gave_up) {
    PathMachine m;
    m.fenced_by_peer(3);
    CHECK(!m.may_take(3) && m.may_take(4));
    m.take(4);
    CHECK(!m.may_take(4) && m.may_take(5) && m.live());
}

TEST(path_a_slow_rail_leaves_short_queues_to_fast_ones) {
    CHECK(should_defer_to_others(1e6, 10e6, 4));
    CHECK(!should_defer_to_others(1e6, 10e6, 10));
    CHECK(!should_defer_to_others(5e6, 5e6, 1));
    CHECK(!should_defer_to_others(0, 10e6, 1));  // not measured yet
}

TEST(frames_of_rails_round_trip_and_are_checked) {
    OfferFrame offer{2, 9, 1, 3, {0x123456, 0xabcdef, ipv4(10, 0, 0, 1), 7, 5}};
    const auto body = encode_frame(offer);
    const auto back = decode_frame(body.type, body.body);
    CHECK(back && std::get<OfferFrame>(*back).qp.gid == offer.qp.gid);
    CHECK(std::get<OfferFrame>(*back).qp.first_packet == 0xabcdef);
    CHECK(std::get<OfferFrame>(*back).to_rail == 3);
    offer.qp.number = 1U << 24;
    CHECK(!decode_frame(body.type, encode_frame(offer).body));
    offer.qp.number = 1;
    offer.qp.mtu = 6;
    CHECK(!decode_frame(body.type, encode_frame(offer).body));

    const AnswerFrame refusal{1, 2, "no", {}};
    const auto said = encode_frame(refusal);
    CHECK(std::get<AnswerFrame>(*decode_frame(said.type, said.body)).error == "no");
    CHECK(!decode_frame(said.type, encode_frame(AnswerFrame{1, 2, "", {}}).body));

    const auto region = encode_frame(RegionFrame{1, 2, 3, 4, 5});
    CHECK(std::get<RegionFrame>(*decode_frame(region.type, region.body)).key == 5);
}

TEST(handshake_carries_rails) {
    HelloReply reply;
    reply.transport = Transport::rdma;
    reply.rails = {ipv4(10, 0, 0, 1), ipv4(10, 0, 1, 1)};
    CHECK(decode_reply(encode_reply(reply))->rails == reply.rails);
    reply.rails.resize(kMaxRails + 1);
    CHECK(!decode_reply(encode_reply(reply)));
    Hello hello;
    hello.rails = 2;
    hello.require_rdma = true;
    const auto back = decode_hello(encode_hello(hello));
    CHECK(back->rails == 2 && back->require_rdma);
}
