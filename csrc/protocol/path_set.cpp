#include "protocol/path_set.hpp"

#include <algorithm>
#include <utility>

#include "os/clock.hpp"

namespace pipemorph {
namespace {

// Head start of the rails of a new link before TCP, since they connect slowly.
constexpr int64_t kHeadStart = 2 * kSecond;
constexpr int64_t kRateAge = kSecond;
constexpr int64_t kLongestPause = kSecond;
constexpr int64_t kLongestPauseOfRail = 2 * kSecond;

}  // namespace

void PathSet::assign(const std::vector<std::pair<uint32_t, uint32_t>>& rails, Transport others,
                     size_t count) {
    paths_.clear();
    rails_ = static_cast<uint32_t>(rails.size());
    for (const auto& [ours, theirs] : rails) {
        Path& p = paths_.emplace_back();
        p.kind = Transport::rdma;
        p.machine = PathMachine(kLongestPauseOfRail);
        p.our_rail = ours;
        p.peer_rail = theirs;
    }
    for (size_t i = 0; i < count; ++i) {
        Path& p = paths_.emplace_back();
        p.kind = others;
        p.machine = PathMachine(kLongestPause);
    }
}

void PathSet::start(int64_t now) {
    without_rail_since_ns_ = rails_ > 0 ? now : 0;
}

std::vector<PathSet::Call> PathSet::due(int64_t now) {
    std::vector<Call> calls;
    for (uint32_t i = 0; i < paths_.size(); ++i) {
        Path& p = paths_[i];
        if (quarantined(p) || !p.machine.may_dial(now)) continue;
        p.segment_step = segment_step_;
        calls.push_back({i, p.machine.dial()});
    }
    return calls;
}

void PathSet::dial_failed(uint32_t path, uint32_t epoch, const std::string& why, int64_t now) {
    paths_[path].machine.dial_failed(epoch, now);
    paths_[path].last_error = why;
}

void PathSet::attach(uint32_t path, uint32_t epoch, std::optional<uint32_t> local_thread,
                     int64_t now) {
    Path& p = paths_[path];
    if (p.machine.epoch() != epoch) p.machine.take(epoch);
    p.current = true;
    p.local_thread = local_thread;
    begin(p);
    p.machine.connected(epoch, now);
}

// Resets the measurements, which belong to the previous connection.
void PathSet::begin(Path& p) {
    p.flow = Flow(chunk_bytes_, share_of_rail());
    p.paced = false;
    p.proved_ns = -1;
    p.giving_up = false;
}

std::optional<uint32_t> PathSet::replace(uint32_t path) {
    Path& p = paths_[path];
    if (!std::exchange(p.current, false)) return std::nullopt;
    p.replaced.push_back(p.machine.epoch());
    return p.replaced.back();
}

void PathSet::lose(uint32_t path, const std::string& why, int64_t now) {
    Path& p = paths_[path];
    p.current = false;
    p.last_error = why;
    p.machine.lost(p.machine.epoch(), now);
}

bool PathSet::forget_replaced(uint32_t path, uint32_t epoch) {
    return std::erase(paths_[path].replaced, epoch) > 0;
}

void PathSet::fenced_by_peer(const FenceFrame& fence) {
    paths_[fence.path].machine.fenced_by_peer(fence.epoch);
    paths_[fence.path].fences.push_back(fence);
}

std::vector<FenceFrame> PathSet::answerable(uint32_t path) {
    Path& p = paths_[path];
    const auto waits = [&p](const FenceFrame& fence) {
        // A replaced connection can still write into slots.
        return (p.current && p.machine.epoch() <= fence.epoch) ||
               std::any_of(p.replaced.begin(), p.replaced.end(),
                           [&fence](uint32_t epoch) { return epoch <= fence.epoch; });
    };
    const auto first = std::stable_partition(p.fences.begin(), p.fences.end(), waits);
    std::vector<FenceFrame> answers(std::make_move_iterator(first),
                                    std::make_move_iterator(p.fences.end()));
    p.fences.erase(first, p.fences.end());
    return answers;
}

bool PathSet::may_carry(uint32_t path, uint32_t epoch, const Outbox& out, int64_t now) const {
    const Path& p = paths_[path];
    if (!is_current(path, epoch) || !carries(p)) return false;
    if (rails_ > 0) {
        // A quarantined rail is up until its own thread has ended it.
        if (path < rails_ ? quarantined(p) || defers_to_faster_rails(path, out, now)
                          : !sockets_may_carry(now))
            return false;
    }
    return !is_standby(path);
}

bool PathSet::has_room(uint32_t path, int64_t now) {
    Path& p = paths_[path];
    return !p.paced || (!defers_to_emptier_rails(p) && p.flow.has_room(now));
}

// True if the next chunk would only queue on this rail, while another one is idle.
bool PathSet::defers_to_emptier_rails(const Path& path) const {
    if (!path.flow.is_half_full()) return false;
    return std::any_of(paths_.begin(), paths_.begin() + rails_, [this](const Path& p) {
        return p.paced && !p.flow.is_half_full() && carries(p) && !quarantined(p);
    });
}

void PathSet::chunk_assigned(uint32_t path, size_t bytes, int64_t now) {
    Path& p = paths_[path];
    ++p.chunks;
    p.bytes += bytes;
    if (p.paced) p.flow.sent(bytes, now);
}

void PathSet::pace(uint32_t path, uint32_t epoch) {
    if (is_current(path, epoch)) paths_[path].paced = true;
}

void PathSet::delivered(uint32_t path, uint32_t epoch, int64_t now) {
    if (!is_current(path, epoch)) return;
    Path& p = paths_[path];
    p.flow.delivered(now);
    if (p.flow.wire_rate() <= 0) return;
    p.bytes_per_second = p.flow.wire_rate();
    p.measured_ns = p.flow.wire_rate_ns();
}

void PathSet::proved(const OutMessage::Carrier& carrier) {
    Path& p = paths_[carrier.path];
    if (carrier.epoch != p.machine.epoch()) return;
    p.proved_ns = std::max(p.proved_ns, carrier.assigned_ns);
    p.last_error.clear();
}

std::vector<uint32_t> PathSet::reduce_segments(uint32_t path, uint32_t epoch) {
    const Path& lost = paths_[path];
    // Several are lost at once; sockets with the smaller segments must be tried first.
    if (lost.kind != Transport::tcp || lost.local_thread || lost.machine.epoch() != epoch ||
        lost.segment_step != segment_step_ || segment_step_ + 1 == kSegments.size())
        return {};
    ++segment_step_;
    std::vector<uint32_t> others;
    for (uint32_t i = 0; i < paths_.size(); ++i) {
        Path& p = paths_[i];
        if (i == path || p.kind != Transport::tcp || !p.current || p.giving_up) continue;
        p.giving_up = true;
        others.push_back(i);
    }
    return others;
}

// Within a host, one socket per thread keeps the thread busy, and bytes queued in a second one
// would only evict payloads from the cache. The others carry when it is lost.
bool PathSet::is_standby(uint32_t path) const {
    const std::optional<uint32_t> own = paths_[path].local_thread;
    if (!own) return false;
    return std::any_of(paths_.begin(), paths_.begin() + path, [&own](const Path& p) {
        return p.local_thread == own && p.current && carries(p);
    });
}

void PathSet::connected(uint32_t path, uint32_t epoch, int64_t now) {
    Path& p = paths_[path];
    p.machine.connected(epoch, now);
    p.last_error.clear();
    p.bytes_per_second = 0;
    begin(p);
}

void PathSet::measured(uint32_t path, uint32_t epoch, double bytes_per_second, int64_t now) {
    Path& p = paths_[path];
    if (p.machine.epoch() != epoch || bytes_per_second <= 0 ||
        bytes_per_second == p.bytes_per_second)
        return;
    p.bytes_per_second = bytes_per_second;
    p.measured_ns = now;
}

// True if faster rails should have the next chunk. An outdated rate does not count, so that a rail
// which was slow can prove otherwise.
bool PathSet::defers_to_faster_rails(uint32_t path, const Outbox& out, int64_t now) const {
    const Path& p = paths_[path];
    if (p.bytes_per_second <= 0 || now - p.measured_ns > kRateAge) return false;
    // Only faster ones count: equal ones would defer to each other.
    double others = 0.0;
    for (uint32_t i = 0; i < rails_; ++i)
        if (paths_[i].bytes_per_second > p.bytes_per_second && carries(paths_[i]) &&
            !quarantined(paths_[i]))
            others += paths_[i].bytes_per_second;
    return others > 0 && should_defer_to_others(p.bytes_per_second, others, out.ready_chunks());
}

bool PathSet::rails_carry() const {
    return std::any_of(paths_.begin(), paths_.begin() + rails_,
                       [this](const Path& p) { return carries(p) && !quarantined(p); });
}

bool PathSet::sockets_may_carry(int64_t now) const {
    if (rails_ == 0) return true;
    if (without_rail_since_ns_ == 0) return false;
    return fell_back_ || now - without_rail_since_ns_ > kHeadStart;
}

// Losing the last rail hands over to TCP at once; only a new link gives its rails a head start.
bool PathSet::note_carrier(int64_t now) {
    if (rails_ == 0) return false;
    const bool carry = rails_carry();
    if (carry == (without_rail_since_ns_ == 0)) return false;
    if (carry) {
        without_rail_since_ns_ = 0;
        if (std::exchange(fell_back_, false)) ++failbacks_;
    } else {
        without_rail_since_ns_ = now;
        if (paths_.size() > rails_) {
            fell_back_ = true;
            ++fallbacks_;
        }
    }
    return true;
}

bool PathSet::head_start_over(int64_t now) {
    if (fell_back_ || paths_.size() == rails_ || without_rail_since_ns_ == 0 ||
        now - without_rail_since_ns_ <= kHeadStart)
        return false;
    fell_back_ = true;
    ++fallbacks_;
    return true;
}

void PathSet::reset_backoff() {
    for (uint32_t i = 0; i < rails_; ++i) paths_[i].machine.reset_backoff();
}

void PathSet::take(const OfferFrame& offer) {
    Path& p = paths_[offer.path];
    p.machine.take(offer.epoch);
    p.our_rail = offer.to_rail;
    p.peer_rail = offer.from_rail;
}

void PathSet::offered(uint32_t path, int64_t now) {
    paths_[path].offered = true;
    paths_[path].offered_ns = now;
}

bool PathSet::withdraw(uint32_t path) {
    return std::exchange(paths_[path].offered, false);
}

std::vector<uint32_t> PathSet::unanswered(int64_t now) const {
    std::vector<uint32_t> late;
    for (uint32_t i = 0; i < rails_; ++i)
        if (paths_[i].offered && now - paths_[i].offered_ns >= kConnectLimitNs) late.push_back(i);
    return late;
}

void PathSet::quarantine(bool ours, uint32_t rail, const std::string& why) {
    (ours ? quarantined_ours_ : quarantined_peers_).emplace(rail, why);
}

std::string PathSet::quarantine_reason(const Path& path) const {
    if (path.kind != Transport::rdma) return {};
    if (const auto it = quarantined_ours_.find(path.our_rail); it != quarantined_ours_.end())
        return it->second;
    const auto it = quarantined_peers_.find(path.peer_rail);
    return it == quarantined_peers_.end() ? "" : it->second;
}

bool PathSet::quarantined(const Path& path) const {
    return path.kind == Transport::rdma && (quarantined_ours_.contains(path.our_rail) ||
                                            quarantined_peers_.contains(path.peer_rail));
}

void PathSet::add_region(const RegionFrame& region) {
    peer_regions_[{region.rail, region.segment}] = region;
}

const RegionFrame* PathSet::region(uint32_t path, const SlotGrant& slot) const {
    const auto it = peer_regions_.find({paths_[path].peer_rail, slot.segment});
    if (it == peer_regions_.end()) return nullptr;
    const RegionFrame& r = it->second;
    return slot.offset > r.bytes || slot.bytes > r.bytes - slot.offset ? nullptr : &r;
}

std::optional<int64_t> PathSet::only_rails_since() const {
    if (rails_ == 0 || paths_.size() != rails_ || without_rail_since_ns_ == 0) return std::nullopt;
    return without_rail_since_ns_;
}

void PathSet::discount_pause(int64_t passed, int64_t now) {
    if (without_rail_since_ns_ != 0)
        without_rail_since_ns_ = std::min(without_rail_since_ns_ + passed, now);
}

}  // namespace pipemorph
