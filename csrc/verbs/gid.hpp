// Choice of an RDMA port's address (GID), and pairing of ports with the peer's. Pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace pipemorph {

using GidBytes = std::array<uint8_t, 16>;

struct GidInfo {
    enum class Type { infiniband, roce_v1, roce_v2 };
    GidBytes gid{};
    uint32_t index = 0;
    Type type = Type::roce_v2;
    bool has_netdev = false;
};

std::string gid_text(const GidBytes& gid);
bool is_link_local(const GidBytes& gid);  // fe80::/10, 169.254.0.0/16
bool is_ipv4_mapped(const GidBytes& gid);

// Default GID: RoCE v2 before v1, with a network device before without, routable before link-local,
// IPv4 before IPv6 (as people configure), then the lowest index. `pipemorph doctor` sorts alike
// (Gid.sort_key of pipemorph/doctor/rdma.py).
std::optional<GidInfo> best_gid(const std::vector<GidInfo>& table);

// Pairs ours with theirs, up to the length of the shorter list: the longest common prefixes first,
// since two ports in one subnet reach each other; equals in order. A GID is listed once per queue
// pair of its port, and ports are used evenly.
std::vector<std::pair<uint32_t, uint32_t>> pair_rails(const std::vector<GidBytes>& ours,
                                                      const std::vector<GidBytes>& theirs);

}  // namespace pipemorph
