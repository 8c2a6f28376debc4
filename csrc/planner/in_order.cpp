#include "planner/in_order.hpp"

namespace pipemorph::planner {

OrderExecutor::OrderExecutor(const Costs& costs) : core_(costs), rows_(costs.stages_of.size()) {
    size_t stride = 0;  // ops of a rank, at most
    for (const auto& stages : costs.stages_of)
        stride = std::max(stride, kKinds * costs.microbatches * stages.size());
    for (auto* times : {&start_, &end_, &free_}) times->resize(stride * rows_.size());
    microbatch_.resize(start_.size());
    for (auto& positions : position_of_)
        positions.resize(static_cast<size_t>(costs.stages) * costs.microbatches);
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
        Row& row = rows_[rank];
        row.microbatches = costs.microbatches;
        row.start = start_.data() + rank * stride;
        row.end = end_.data() + rank * stride;
        row.free = free_.data() + rank * stride;
        row.microbatch = microbatch_.data() + rank * stride;
        for (int kind = 0; kind < kKinds; ++kind) row.position_of[kind] = position_of_[kind].data();
    }
}

double OrderExecutor::run(const Order& order, const std::vector<double>& delay, const Times* tail,
                          double limit) {
    begin(order);
    core_.set_delay(delay);
    if (core_.costs().shares_queues()) return finish(core_.run_event_driven<false>(*this));
    const auto row_of = [&](int rank) -> Row& { return rows_[rank]; };
    return finish(core_.run_known_arrivals(row_of, tail, limit));
}

double OrderExecutor::run(const Order& order, DelayAt delay_at, DelayAt transfer_at) {
    begin(order);
    core_.set_delay_at(std::move(delay_at), std::move(transfer_at));
    const double makespan = finish(core_.run_event_driven<false>(*this));
    core_.set_delay_at(nullptr);
    return makespan;
}

void OrderExecutor::begin(const Order& order) {
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
        rows_[rank].codes = order[rank].data();
        rows_[rank].size = static_cast<int>(order[rank].size());
        rows_[rank].position = 0;
    }
}

double OrderExecutor::finish(bool finished) const {
    double makespan = 0.0;
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
        const Row& row = rows_[rank];
        if (!finished || !row.finished()) return kNever;
        if (row.size)
            makespan = std::max(makespan, row.end[row.size - 1] + core_.costs().after[rank]);
    }
    return makespan;
}

}  // namespace pipemorph::planner
