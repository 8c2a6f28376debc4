// The rails of a link: queue pairs offered and answered over the control connection, what they
// report, and when TCP carries in their place.
#include <algorithm>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {
RdmaPath::Settings Link::rdma_settings() const {
    return {runtime_->config.chunk_bytes, runtime_->peer_deadline_ns / 4,
            runtime_->peer_deadline_ns, core_.paths().share_of_rail()};
}

void Link::offer_rail(uint32_t index, uint32_t epoch) {
    const Lock lock(mu_);
    const uint32_t rail = core_.paths()[index].our_rail;
    runtime_->rail(rail)->setup().post(
        [self = shared_from_this(), rail, index, epoch] { self->make_offer(rail, index, epoch); });
}

void Link::make_offer(uint32_t rail, uint32_t index, uint32_t epoch) {
    std::shared_ptr<RdmaPath> made;
    std::string trouble;
    try {
        made = std::make_shared<RdmaPath>(runtime_->rail(rail), shared_from_this(), index, epoch,
                                          rdma_settings());
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    const Lock lock(mu_);
    if (over()) return;
    if (core_.offer(index, epoch, made ? made->local() : QpAddress{}, trouble, steady_ns()))
        held_[index].offered = made;
    act();
}

void Link::take_offer(const OfferFrame& offer) {
    if (identity_.dials || offer.path >= core_.paths().rails() ||
        offer.to_rail >= runtime_->rail_numbers()) {
        protocol_error("an offer for a rail that does not exist");
        return;
    }
    const Lock lock(mu_);
    if (over() || !core_.take_offer(offer)) return;
    act();
    runtime_->rail(offer.to_rail)->setup().post([self = shared_from_this(), offer] {
        self->answer_offer(offer);
    });
}

void Link::answer_offer(const OfferFrame& offer) {
    QpAddress qp;
    std::string trouble;
    std::shared_ptr<RdmaPath> made;
    try {
        made = std::make_shared<RdmaPath>(runtime_->rail(offer.to_rail), shared_from_this(),
                                          offer.path, offer.epoch, rdma_settings());
        made->connect(offer.qp, false);
        qp = made->local();
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    const Lock lock(mu_);
    if (over()) return;
    if (core_.answer(offer, qp, trouble, steady_ns())) {
        held_[offer.path].connections.push_back(made);
        made->start();
    }
    act();
}

void Link::take_answer(const AnswerFrame& answer) {
    const Lock lock(mu_);
    if (over()) return;
    if (core_.take_answer(answer, steady_ns()))
        runtime_->rail(core_.paths()[answer.path].our_rail)
            ->setup()
            .post([self = shared_from_this(),
                   made = std::exchange(held_[answer.path].offered, nullptr),
                   answer] { self->connect_offered(made, answer); });
    act();
}

void Link::connect_offered(const std::shared_ptr<RdmaPath>& made, const AnswerFrame& answer) {
    // A fence may be answered while this is done: neither end carries before the other has heard
    // the dialler's probe, and that is posted by `start`, after the fence was looked for.
    std::string trouble;
    try {
        made->connect(answer.qp, true);
    } catch (const std::exception& e) {
        trouble = e.what();
    }
    const Lock lock(mu_);
    if (over()) return;
    if (core_.connected(answer.path, answer.epoch, trouble, steady_ns())) {
        held_[answer.path].connections.push_back(made);
        made->start();
    }
    act();
}

std::optional<PathHost::RemoteSlot> Link::remote_slot(uint32_t path, const SlotGrant& slot) {
    const Lock lock(mu_);
    const RegionFrame* r = core_.paths().region(path, slot);
    if (r == nullptr) return std::nullopt;
    return RemoteSlot{r->address + slot.offset, slot.bytes, r->key};
}

void Link::path_up(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    if (over() || !core_.path_up(path, epoch, steady_ns())) return;
    act();
}

void Link::path_suspect(uint32_t path, uint32_t epoch, bool suspicious) {
    const Lock lock(mu_);
    if (over()) return;
    core_.path_suspect(path, epoch, suspicious, steady_ns());
    act();
}

void Link::path_measured(uint32_t path, uint32_t epoch, double bytes_per_second,
                         std::optional<int64_t> rtt_ns) {
    const Lock lock(mu_);
    if (core_.paths()[path].machine.epoch() != epoch) return;
    core_.path_measured(path, epoch, bytes_per_second, steady_ns());
    if (rtt_ns) held_[path].rtt.add(*rtt_ns, 0);
}

PathHost::Pace Link::pace(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    core_.pace(path, epoch);
    const PathSet::Path& p = core_.paths()[path];
    return {p.flow.busy_rate(), p.flow.window()};
}

void Link::path_limited(uint32_t path, uint32_t epoch, uint64_t most) {
    const Lock lock(mu_);
    core_.limit(path, epoch, most);
}

PathHost::Pace Link::chunk_delivered(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    core_.delivered(path, epoch, steady_ns());
    const PathSet::Path& p = core_.paths()[path];
    return {p.flow.busy_rate(), p.flow.window()};
}

void Link::path_stuck(const std::string& why) {
    die(describe() + " is dead: " + why);
}

void Link::look_after_rails(int64_t now) {
    std::string dead;
    {
        const Lock lock(mu_);
        if (core_.paths().rails() == 0 || over()) return;
        uint64_t recoveries = 0;
        for (const auto& rail : runtime_->rails) recoveries += rail->recoveries();
        core_.look_after_rails(std::exchange(recoveries_seen_, recoveries) != recoveries, now);
        act();
        const auto since = core_.paths().only_rails_since();
        if (since && now - *since > runtime_->peer_deadline_ns)
            dead = describe() + " is dead: " + missing_rail(now);
    }
    if (!dead.empty()) finish(State::dead, dead);
}

// What is missing where nothing but rails may carry; empty where something may.
std::string Link::missing_rail(int64_t now) const {
    const auto since = core_.paths().only_rails_since();
    if (!since) return {};
    return "rdma is required, and no rail to " + rank_text(identity_.peer_rank) +
           " has been up for " + seconds_text(to_seconds(now - *since)) + ": " + paths_text();
}

}  // namespace pipemorph
