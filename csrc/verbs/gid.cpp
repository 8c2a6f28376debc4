#include "verbs/gid.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <tuple>

namespace pipemorph {
namespace {

int common_prefix_bits(const GidBytes& a, const GidBytes& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (const auto differ = static_cast<uint8_t>(a[i] ^ b[i]); differ != 0)
            return static_cast<int>(i * 8) + std::countl_zero(differ);
    return 128;
}

// Sort key of a GID, best first.
auto key_of(const GidInfo& g) {
    const int type = g.type == GidInfo::Type::roce_v2   ? 0
                     : g.type == GidInfo::Type::roce_v1 ? 2
                                                        : 1;
    return std::tuple(type, !g.has_netdev, is_link_local(g.gid), !is_ipv4_mapped(g.gid), g.index);
}

// First index of each entry's port: a port is listed once per queue pair. A port that is down has
// no GID, and its entries count as separate ports.
std::vector<uint32_t> find_ports(const std::vector<GidBytes>& gids) {
    std::vector<uint32_t> ports;
    for (uint32_t i = 0; i < gids.size(); ++i) {
        const auto same = std::find(gids.begin(), gids.begin() + i, gids[i]);
        ports.push_back(gids[i] == GidBytes{} ? i : static_cast<uint32_t>(same - gids.begin()));
    }
    return ports;
}

}  // namespace

std::string gid_text(const GidBytes& gid) {
    std::string text;
    char part[8];
    if (is_ipv4_mapped(gid)) {
        for (size_t i = 12; i < 16; ++i) {
            std::snprintf(part, sizeof part, i < 15 ? "%u." : "%u", gid[i]);
            text += part;
        }
        return text;
    }
    for (size_t i = 0; i < 16; i += 2) {
        std::snprintf(part, sizeof part, i < 14 ? "%x:" : "%x", gid[i] << 8 | gid[i + 1]);
        text += part;
    }
    return text;
}

bool is_link_local(const GidBytes& gid) {
    if (is_ipv4_mapped(gid)) return gid[12] == 169 && gid[13] == 254;
    return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

bool is_ipv4_mapped(const GidBytes& gid) {
    return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t b) { return b == 0; }) &&
           gid[10] == 0xff && gid[11] == 0xff;
}

std::optional<GidInfo> best_gid(const std::vector<GidInfo>& table) {
    const auto best =
        std::min_element(table.begin(), table.end(),
                         [](const GidInfo& a, const GidInfo& b) { return key_of(a) < key_of(b); });
    return best == table.end() ? std::nullopt : std::optional(*best);
}

std::vector<std::pair<uint32_t, uint32_t>> pair_rails(const std::vector<GidBytes>& ours,
                                                      const std::vector<GidBytes>& theirs) {
    const std::vector<uint32_t> our_ports = find_ports(ours);
    const std::vector<uint32_t> their_ports = find_ports(theirs);
    std::vector<uint32_t> our_pairs(ours.size());  // by port
    std::vector<uint32_t> their_pairs(theirs.size());
    std::vector<bool> our_taken(ours.size());
    std::vector<bool> their_taken(theirs.size());
    std::vector<std::pair<uint32_t, uint32_t>> pairs;
    while (pairs.size() < std::min(ours.size(), theirs.size())) {
        std::optional<std::tuple<uint32_t, int, uint32_t, uint32_t>> best;
        for (uint32_t i = 0; i < ours.size(); ++i) {
            for (uint32_t j = 0; j < theirs.size(); ++j) {
                if (our_taken[i] || their_taken[j]) continue;
                const std::tuple candidate(our_pairs[our_ports[i]] + their_pairs[their_ports[j]],
                                           -common_prefix_bits(ours[i], theirs[j]), i, j);
                if (!best || candidate < *best) best = candidate;
            }
        }
        const auto [_, prefix, i, j] = *best;
        our_taken[i] = their_taken[j] = true;
        ++our_pairs[our_ports[i]];
        ++their_pairs[their_ports[j]];
        pairs.emplace_back(i, j);
    }
    std::sort(pairs.begin(), pairs.end());
    return pairs;
}

}  // namespace pipemorph
