// The rails of a link: queue pairs offered and answered over the control connection, what they
// report, and when TCP carries in their place.
#include <algorithm>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

// For the peer's answer to an offer. It may have to wait for its kernel, too.
constexpr int64_t kConnectLimit = 3 * kSecond;
// How long TCP leaves a new link to its rails, which take a moment to connect.
constexpr int64_t kHeadStart = 2 * kSecond;
constexpr int64_t kRateAge = kSecond;
constexpr size_t kMaxError = 1000;

}  // namespace

RdmaPath::Settings Link::rdma_settings() const {
    return {runtime_->config.chunk_bytes, runtime_->peer_deadline_ns / 4,
            runtime_->peer_deadline_ns};
}

void Link::offer_rail(uint32_t index, uint32_t epoch) {
    const Lock lock(mu_);
    const uint32_t rail = paths_[index].our_rail;
    runtime_->rails[rail]->setup().post(
        [self = shared_from_this(), rail, index, epoch] { self->make_offer(rail, index, epoch); });
}

void Link::make_offer(uint32_t rail, uint32_t index, uint32_t epoch) {
    std::shared_ptr<RdmaPath> made;
    std::string trouble;
    try {
        made = std::make_shared<RdmaPath>(runtime_->rails[rail], shared_from_this(), index, epoch,
                                          rdma_settings());
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    const Lock lock(mu_);
    Path& p = paths_[index];
    if (over() || p.machine.epoch() != epoch) return;
    if (trouble.empty()) trouble = why_barred(p);
    if (!trouble.empty()) {
        p.trouble = trouble;
        p.machine.dial_failed(epoch, steady_ns());
        return;
    }
    p.offered = made;
    p.offered_ns = steady_ns();
    send_frame(OfferFrame{index, epoch, p.our_rail, p.peer_rail, made->local()});
}

void Link::withdraw_offer(Path& p) {
    std::exchange(p.offered, nullptr)->close();
}

void Link::take_offer(const OfferFrame& offer) {
    if (identity_.dials || offer.path >= rails_ || offer.to_rail >= runtime_->rails.size()) {
        protocol_error("an offer for a rail that does not exist");
        return;
    }
    const Lock lock(mu_);
    Path& p = paths_[offer.path];
    if (over() || !p.machine.may_take(offer.epoch)) return;  // given up before it was read
    replace(p);
    p.machine.take(offer.epoch);
    p.our_rail = offer.to_rail;
    p.peer_rail = offer.from_rail;
    runtime_->rails[offer.to_rail]->setup().post(
        [self = shared_from_this(), offer] { self->answer_offer(offer); });
}

void Link::answer_offer(const OfferFrame& offer) {
    AnswerFrame answer{offer.path, offer.epoch, {}, {}};
    std::shared_ptr<RdmaPath> made;
    try {
        made = std::make_shared<RdmaPath>(runtime_->rails[offer.to_rail], shared_from_this(),
                                          offer.path, offer.epoch, rdma_settings());
        made->connect(offer.qp, false);
        answer.qp = made->local();
    } catch (const std::exception& e) {
        answer.error = e.what();
    }
    const Lock lock(mu_);
    Path& p = paths_[offer.path];
    if (over() || p.machine.epoch() != offer.epoch) return;
    // What has happened since the offer was taken finds no queue pair to end.
    if (answer.error.empty()) answer.error = why_barred(p);
    if (answer.error.empty() && p.machine.is_fenced(offer.epoch))
        answer.error = "given up by the peer";
    if (answer.error.empty()) {
        p.live = made;
        made->start();
    } else {
        answer.qp = {};
        p.trouble = answer.error;
        p.machine.dial_failed(offer.epoch, steady_ns());
        answer.error.resize(std::min(answer.error.size(), kMaxError));
    }
    send_frame(answer);
}

void Link::take_answer(const AnswerFrame& answer) {
    const Lock lock(mu_);
    if (over() || answer.path >= rails_) return;
    Path& p = paths_[answer.path];
    if (p.machine.epoch() != answer.epoch || !p.offered) return;  // too late
    if (!answer.error.empty()) {
        withdraw_offer(p);
        p.trouble = rank_text(identity_.peer_rank) + ": " + answer.error;
        p.machine.dial_failed(answer.epoch, steady_ns());
        return;
    }
    runtime_->rails[p.our_rail]->setup().post([self = shared_from_this(),
                                               made = std::exchange(p.offered, nullptr),
                                               answer] { self->connect_offered(made, answer); });
}

void Link::connect_offered(const std::shared_ptr<RdmaPath>& made, const AnswerFrame& answer) {
    std::string trouble;
    try {
        made->connect(answer.qp, true);
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    const Lock lock(mu_);
    Path& p = paths_[answer.path];
    if (over() || p.machine.epoch() != answer.epoch) return;
    // What has happened since the answer was taken finds no queue pair to end.
    if (trouble.empty()) trouble = why_barred(p);
    if (trouble.empty() && p.machine.is_fenced(answer.epoch)) trouble = "given up by the peer";
    if (!trouble.empty()) {
        lose_path(p, trouble);
        send_fence(answer.path, answer.epoch);
        return;
    }
    p.live = made;
    made->start();
}

void Link::region_received(const RegionFrame& region) {
    const Lock lock(mu_);
    if (region.bytes == 0)
        bar_rail(false, region.rail,
                 rank_text(identity_.peer_rank) + " cannot register its memory with it");
    else
        peer_regions_[{region.rail, region.segment}] = region;
}

// A rail that may not write to every slot carries nothing any more: which slot a message gets is
// not known when a rail is chosen for it.
void Link::bar_rail(bool ours, uint32_t rail, const std::string& why) {
    (ours ? barred_ours_ : barred_peers_).emplace(rail, why);
    for (uint32_t i = 0; i < rails_; ++i) {
        Path& p = paths_[i];
        if (!barred(p)) continue;
        p.trouble = why;
        if (p.offered) {
            withdraw_offer(p);
            lose_path(p, why);
            send_fence(i, p.machine.epoch());
        } else if (const auto live = std::static_pointer_cast<RdmaPath>(p.live)) {
            live->rail_failed(why);
            // Others carry from now on, and not only when its thread has heard of it.
            note_carrier();
            kick_paths();
        }
    }
}

std::string Link::why_barred(const Path& path) const {
    if (const auto it = barred_ours_.find(path.our_rail); it != barred_ours_.end())
        return it->second;
    const auto it = barred_peers_.find(path.peer_rail);
    return it == barred_peers_.end() ? "" : it->second;
}

std::optional<PathHost::RemoteSlot> Link::remote_slot(uint32_t path, const SlotGrant& slot) {
    const Lock lock(mu_);
    const auto it = peer_regions_.find({paths_[path].peer_rail, slot.segment});
    if (it == peer_regions_.end()) return std::nullopt;
    const RegionFrame& r = it->second;
    if (slot.offset > r.bytes || slot.bytes > r.bytes - slot.offset) return std::nullopt;
    return RemoteSlot{r.address + slot.offset, slot.bytes, r.key};
}

void Link::path_up(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    Path& p = paths_[path];
    if (over() || p.machine.epoch() != epoch) return;
    if (p.machine.times_up() > 0) ++reconnects_;
    p.machine.connected(epoch, steady_ns());
    p.trouble.clear();
    p.bytes_per_second = 0;
    note_carrier();
    kick_paths();
    changed();
}

void Link::path_suspect(uint32_t path, uint32_t epoch, bool suspicious) {
    const Lock lock(mu_);
    if (over()) return;
    paths_[path].machine.suspected(epoch, suspicious);
    note_carrier();
    kick_paths();
}

void Link::path_measured(uint32_t path, uint32_t epoch, double bytes_per_second,
                         std::optional<int64_t> rtt_ns) {
    const Lock lock(mu_);
    Path& p = paths_[path];
    if (p.machine.epoch() != epoch) return;
    if (bytes_per_second > 0 && bytes_per_second != p.bytes_per_second) {
        p.bytes_per_second = bytes_per_second;
        p.measured_ns = steady_ns();
    }
    if (rtt_ns) p.rtt.add(*rtt_ns, 0);
}

void Link::path_stuck(const std::string& why) {
    die(describe() + " is dead: " + why);
}

// Whether faster rails should have the next chunk. A rate that is out of date says nothing, so
// that a rail which was slow once gets to show that it is not any more.
bool Link::leave_to_other_rails(uint32_t index, int64_t now) const {
    const Path& p = paths_[index];
    if (p.bytes_per_second <= 0 || now - p.measured_ns > kRateAge) return false;
    double others = 0.0;
    for (uint32_t i = 0; i < rails_; ++i)
        if (i != index && rail_carries(paths_[i])) others += paths_[i].bytes_per_second;
    return others > 0 && leave_to_others(p.bytes_per_second, others, out_.ready_chunks());
}

bool Link::rails_carry() const {
    return std::any_of(paths_.begin(), paths_.begin() + rails_,
                       [this](const Path& p) { return rail_carries(p); });
}

bool Link::sockets_may_carry(int64_t now) const {
    if (rails_ == 0) return true;
    if (without_rail_since_ns_ == 0) return false;
    return fell_back_ || now - without_rail_since_ns_ > kHeadStart;
}

// Who carries has changed, perhaps. Losing the last rail hands over to TCP at once; only a new
// link gives its rails a head start.
void Link::note_carrier() {
    if (rails_ == 0) return;
    const bool carry = rails_carry();
    if (carry && without_rail_since_ns_ != 0) {
        without_rail_since_ns_ = 0;
        if (std::exchange(fell_back_, false)) ++failbacks_;
    } else if (!carry && without_rail_since_ns_ == 0) {
        without_rail_since_ns_ = steady_ns();
        if (paths_.size() > rails_) {
            fell_back_ = true;
            ++fallbacks_;
        }
        changed();
    }
}

void Link::look_after_rails(int64_t now) {
    std::string dead;
    {
        const Lock lock(mu_);
        if (rails_ == 0 || over()) return;
        uint64_t recoveries = 0;
        for (const auto& rail : runtime_->rails) recoveries += rail->recoveries();
        if (std::exchange(recoveries_seen_, recoveries) != recoveries)
            for (uint32_t i = 0; i < rails_; ++i) paths_[i].machine.hurry();
        for (uint32_t i = 0; i < rails_; ++i) {
            Path& p = paths_[i];
            if (!p.offered || now - p.offered_ns < kConnectLimit) continue;
            withdraw_offer(p);
            lose_path(p, "rank " + std::to_string(identity_.peer_rank) +
                             " did not answer the offer of a queue pair within " +
                             seconds_text(to_seconds(kConnectLimit)));
            send_fence(i, p.machine.epoch());
        }
        if (without_rail_since_ns_ != 0) {
            const int64_t without = now - without_rail_since_ns_;
            if (paths_.size() == rails_ && without > runtime_->peer_deadline_ns)
                dead = describe() + " is dead: " + missing_rail(now);
            else if (!fell_back_ && without > kHeadStart && paths_.size() > rails_) {
                fell_back_ = true;
                ++fallbacks_;
                kick_paths();
            }
        }
    }
    if (!dead.empty()) finish(State::dead, dead);
}

// What is missing where nothing but rails may carry; empty where something may.
std::string Link::missing_rail(int64_t now) const {
    if (rails_ == 0 || paths_.size() != rails_ || without_rail_since_ns_ == 0) return {};
    return "rdma is required, and no rail to " + rank_text(identity_.peer_rank) +
           " has been up for " + seconds_text(to_seconds(now - without_rail_since_ns_)) + ": " +
           paths_text();
}

}  // namespace pipemorph
