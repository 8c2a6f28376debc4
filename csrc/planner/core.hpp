// Event core, which executes every schedule, with a chooser that selects the ops.
//
// A rank runs one op at a time. At the end of an op its message goes to the link; the rank goes on
// once the link has accepted it. A chooser selects the next op of an idle rank: the next op of a
// given order (in_order.hpp), the first op that is ready (online.hpp) or the most urgent one
// (list_scheduler.hpp). The oracle of its tests is tests/support/event_core.py.
#pragma once

#include <array>
#include <set>

#include "planner/costs.hpp"

namespace pipemorph::planner {

struct Op {
    int stage, kind, microbatch;
};

// Next action of a rank. Without an op it waits until `until`, or until a message wakes it.
struct Choice {
    bool found = false;
    Op op{};
    double until = kNever;
    bool give_up = false;  // ends the execution
};

// Microbatches whose activations are on a stage's device, by the rules of
// pipemorph/planning/offload.py. Limit 0: no offload.
class DeviceResidency {
  public:
    explicit DeviceResidency(int limit) : limit_(limit) {}

    bool fits(int kind, int m) const {
        return !limit_ || resident_ < limit_ || (kind != kForward && !on_host_.count(m));
    }

    // Records an op. True if activations leave or return in it.
    bool run(int kind, int m) {
        if (!limit_) return false;
        if (kind == kForward) {
            if (++resident_ < limit_) return false;
            --resident_;
            on_host_.insert(m);
            return true;
        }
        const bool back = kind != kWeight && on_host_.erase(m);
        resident_ += back;
        resident_ -= kind != kBackward;
        return back;
    }

    void clear() {
        resident_ = 0;
        on_host_.clear();
    }

  private:
    int limit_, resident_ = 0;
    std::set<int> on_host_;
};

// Time of each rank's next action: a tournament that the earliest wins. At equal times the end of
// an op comes first, since others may wait for its message, then the lower rank.
class Agenda {
  public:
    explicit Agenda(int ranks) : ranks_(ranks) {
        while (leaves_ < ranks) leaves_ *= 2;
        at_.resize(leaves_);
        ends_.resize(leaves_);
        winner_.resize(2 * static_cast<size_t>(leaves_));
    }

    // Sets every rank to 0.
    void reset() {
        std::fill(at_.begin(), at_.end(), kNever);
        std::fill(at_.begin(), at_.begin() + ranks_, 0.0);
        std::fill(ends_.begin(), ends_.end(), false);
        for (int i = 0; i < leaves_; ++i) winner_[leaves_ + i] = i;
        for (int node = leaves_ - 1; node; --node) winner_[node] = winner_[2 * node];
    }

    int first() const { return winner_[1]; }
    double at(int rank) const { return at_[rank]; }
    bool ends(int rank) const { return ends_[rank]; }

    // `kEnds`: the agenda has ends of ops at all.
    template <bool kEnds = true>
    void set(int rank, double at, bool ends) {
        at_[rank] = at;
        if (kEnds) ends_[rank] = ends;
        for (unsigned node = (leaves_ + rank) / 2u; node; node /= 2) {
            const int a = winner_[2 * node], b = winner_[2 * node + 1];
            const bool tie = kEnds && at_[b] == at_[a];
            winner_[node] = (tie ? ends_[b] > ends_[a] : at_[b] < at_[a]) ? b : a;
        }
    }

  private:
    int ranks_, leaves_ = 1;
    std::vector<double> at_;
    std::vector<unsigned char> ends_;
    std::vector<int> winner_;
};

// Execution of an iteration. Reuses its memory between runs.
class EventCore {
  public:
    explicit EventCore(const Costs& costs);
    EventCore(const EventCore&) = delete;
    EventCore& operator=(const EventCore&) = delete;

    // To be called before a run: `delay` in place of the problem's, owned by the caller until the
    // run ends, or delays that change.
    void set_delay(const std::vector<double>& delay) { delay_ = &delay; }
    void set_delay_at(DelayAt delay_at, DelayAt transfer_at = nullptr) {
        delay_at_ = std::move(delay_at);
        transfer_at_ = std::move(transfer_at);
    }

    const Costs& costs() const { return costs_; }
    int ranks() const { return costs_.ranks(); }
    int last_stage() const { return costs_.stages - 1; }
    int done(int kind, int stage) const { return *op_class(kind, stage).done; }
    // Arrival of the forward from above or of the gradient from below; kNever until it is sent.
    double arrival(int kind, int stage, int m) const { return op_class(kind, stage).input[m]; }
    bool fits(int stage, int kind, int m) const {
        return residency_.empty() || residency_[stage].fits(kind, m);
    }
    // True if the rank of a stage has memory for one more F of it, and one more on each of its
    // other stages that hold none. Ranks can thus always finish the oldest microbatch, and do not
    // deadlock: a pending W can run.
    bool has_room(int stage) const {
        if (costs_.memory == kNever) return true;
        double held = 0.0, reserved = 0.0;
        for (const int i : costs_.stages_of[costs_.rank_of[stage]]) {
            const int f = done(kForward, i) + (i == stage), least = f < costs_.microbatches;
            held += costs_.sizes[i] * (f - done(kWeight, i));
            reserved += costs_.sizes[i] * std::max(f - done(kBackward, i), least);
        }
        return std::max(held, reserved) <= costs_.memory;
    }
    // Op that `code` of an order now means.
    Op decode(int rank, unsigned char code) const {
        const OpClass& its = op_class(code & 3, costs_.stages_of[rank][code >> 2]);
        return {its.stage, its.kind, *its.done};
    }
    unsigned char code(const Op& op) const {
        return static_cast<unsigned char>(4 * costs_.chunk_of[op.stage] + op.kind);
    }
    // Time at which the link accepts the op's message; 0 without a limit or a message.
    double clear(const Op& op) const { return clear(op_class(op.kind, op.stage), op.microbatch); }
    // True if arrivals follow from the sender alone, and so are known once an op has begun.
    bool knows_arrivals() const { return !delay_at_ && !costs_.shares_queues(); }

    // Executes in order of time. `selector` has choose(core, rank, now), and the callbacks
    // began(core, rank, op, now, end) and ended(rank, free) for each op. With `kKnowsArrivals`,
    // arrivals of messages are known when their op begins, and the directions of all links count as
    // independent: half as many events, and an equal result for choosers that ignore later
    // arrivals. False if the chooser gave up.
    template <bool kKnowsArrivals, class OpSelector>
    bool run_event_driven(OpSelector& selector) {
        constexpr bool kEnds = !kKnowsArrivals;
        reset();
        agenda_.reset();
        for (int rank = 0; rank < ranks(); ++rank)
            if (const double at = begins(rank); at > 0.0) agenda_.set<kEnds>(rank, at, false);
        for (auto& history : shared_) history.clear();
        while (true) {
            const int rank = agenda_.first();
            const double now = agenda_.at(rank);
            if (now == kNever) return true;
            if (kEnds && agenda_.ends(rank)) {
                const Op& op = running_[rank];
                const OpClass& its = op_class(op.kind, op.stage);
                if (const double free = clear(its, op.microbatch); free > now) {
                    agenda_.set<kEnds>(rank, free, true);
                    continue;
                }
                selector.ended(rank, now);
                if (const double arrival = send(its, op.microbatch, now); its.to >= 0)
                    wake<kEnds>(its.to, arrival);
                agenda_.set<kEnds>(rank, now, false);
                continue;
            }
            const Choice choice = selector.choose(*this, rank, now);
            if (choice.give_up) return false;
            if (!choice.found) {
                idle_[rank] = true;
                agenda_.set<kEnds>(rank, choice.until, false);
                continue;
            }
            idle_[rank] = false;
            const Op& op = choice.op;
            const OpClass& its = op_class(op.kind, op.stage);
            const double end = now + begin(its, op.microbatch);
            selector.began(*this, rank, op, now, end);
            if constexpr (!kEnds) {
                const double free = std::max(end, clear(its, op.microbatch));
                selector.ended(rank, free);
                if (const double arrival = compute_arrival(its, op.microbatch, free); its.to >= 0)
                    wake<kEnds>(its.to, arrival);
                agenda_.set<kEnds>(rank, free, false);
            } else {
                running_[rank] = op;
                agenda_.set<kEnds>(rank, end, true);
            }
        }
    }

    // Executes a given order with independent directions, faster: a rank runs on while its next
    // message's arrival is known. Arrivals follow from the sender alone, so ranks can be visited in
    // any order. `row_of(rank)`: the rank's position in its order, a Row as in in_order.hpp. False
    // as soon as an op starts at which its `tail` reaches `limit`.
    template <class RowOf>
    bool run_known_arrivals(RowOf row_of, const Times* tail = nullptr, double limit = kNever) {
        reset();
        set_tail(tail);
        ranks_to_visit_.clear();
        for (int rank = ranks() - 1; rank >= 0; --rank) ranks_to_visit_.push_back(rank);
        for (int rank = 0; rank < ranks(); ++rank) now_[rank] = begins(rank);
        while (!ranks_to_visit_.empty()) {
            const int rank = ranks_to_visit_.back();
            ranks_to_visit_.pop_back();
            idle_[rank] = true;  // here: not in `ranks_to_visit_`
            const std::vector<int>& stages = costs_.stages_of[rank];
            double now = now_[rank];
            auto& row = row_of(rank);
            const unsigned char* codes = row.codes;
            const int size = row.size;
            int position = row.position;
            bool sent_up = false, sent_down = false;
            for (; position < size; ++position) {
                const unsigned char code = codes[position];
                const OpClass& its = op_class(code & 3, stages[code >> 2]);
                const int m = *its.done;
                if (its.input) {
                    const double input = its.input[m];
                    if (input == kNever) break;
                    if (input > now) now = input;
                }
                if (its.tail && now + its.tail[m] >= limit) {
                    row.position = position;
                    return false;
                }
                const double end = now + begin(its, m);
                double free = end;
                // Branches, not std::max: usually it is `end`, and the next op need not wait.
                if (its.outstanding)
                    if (const double taken = clear(its, m); taken > free) free = taken;
                compute_arrival(its, m, free);
                row.record(position, its.kind, its.stage, m, now, end, free);
                now = free;
                (its.kind == kForward ? sent_down : sent_up) |= its.to >= 0;
            }
            row.position = position;
            now_[rank] = now;
            for (const int stage : stages) {
                if (sent_up && stage > 0) queue(stage - 1);
                if (sent_down && stage < last_stage()) queue(stage + 1);
            }
        }
        return true;
    }

  private:
    // Data of the ops of one kind of a stage, in one place for the inner loops.
    struct OpClass {
        int stage, kind;
        int to = -1, link = 0;  // stage that receives the messages, -1 for none
        int outstanding = 0, queues = 0;
        bool half_duplex = false, is_within_rank = false;
        double took = 0.0, transfer = 0.0;
        const double* times = nullptr;  // by microbatch, if they differ; else all take `took`
        int* done = nullptr;
        // Arrivals by microbatch of the ops' inputs and outputs. The last stage has its gradient at
        // the end of its F.
        double *input = nullptr, *output = nullptr;
        double* wire = nullptr;        // time at which the link has sent all its messages
        const double* tail = nullptr;  // least time from the start of each op to the end
    };

    const OpClass& op_class(int kind, int stage) const { return op_classes_[4 * stage + kind]; }
    double begins(int rank) const { return costs_.before.empty() ? 0.0 : costs_.before[rank]; }
    void reset();
    void set_tail(const Times* tail);

    // Wakes the rank of a stage at `at`, if it waits for longer.
    template <bool kEnds>
    void wake(int stage, double at) {
        const int rank = costs_.rank_of[stage];
        if (idle_[rank] && at < agenda_.at(rank)) agenda_.set<kEnds>(rank, at, false);
    }

    // Queues the rank of a stage, once, for a visit by `run_known_arrivals()`.
    void queue(int stage) {
        const int rank = costs_.rank_of[stage];
        if (!idle_[rank]) return;
        idle_[rank] = false;
        ranks_to_visit_.push_back(rank);
    }

    double clear(const OpClass& its, int m) const {
        return its.outstanding && m >= its.outstanding ? its.output[m - its.outstanding] : 0.0;
    }

    // Counts the op as run, and returns its duration.
    double begin(const OpClass& its, int m) {
        ++*its.done;
        if (its.kind == kFused) ++done_[kWeight][its.stage];
        const double took = its.times ? its.times[m] : its.took;
        if (residency_.empty() || !residency_[its.stage].run(its.kind, m)) return took;
        const double extra = (its.kind == kForward ? costs_.leaving : costs_.returning)[its.stage];
        if (!its.times) return took + extra;
        const double factor =
            costs_.factors[static_cast<size_t>(its.stage) * costs_.microbatches + m];
        return took + extra * factor;
    }

    // Sends a message at `now`, and returns its arrival. A direction sends in microbatch order;
    // with half duplex both directions share the queues, first come, first served.
    double send(const OpClass& its, int m, double now) {
        if (its.to < 0 || its.is_within_rank || !(its.half_duplex || delay_at_))
            return compute_arrival(its, m, now);
        const double delay = delay_at_ ? delay_at_(its.link, now) : (*delay_)[its.link];
        const double transfer = transfer_at_ ? transfer_at_(its.link, now) : its.transfer;
        if (!its.half_duplex)
            return its.output[m] = sent(its, leaves(its, m, now), transfer) + delay;
        auto& history = shared_[its.link];
        const size_t queues = its.queues;
        double busy = now;
        if (queues && history.size() >= queues) busy = history[history.size() - queues];
        history.push_back(sent(its, std::max(now, busy), transfer) + delay);
        return its.output[m] = history.back();
    }
    // Arrival of a message that is sent at `free`, ahead of time, for links with independent
    // directions: arrivals follow from the sender alone.
    double compute_arrival(const OpClass& its, int m, double free) {
        if (its.to >= 0)
            return its.output[m] =
                       sent(its, leaves(its, m, free), its.transfer) + (*delay_)[its.link];
        if (its.output) its.output[m] = free;
        return kNever;
    }
    // Time at which the last byte of a message is sent: one message at a time, for `transfer`. A
    // message that takes no time waits for no other.
    double sent(const OpClass& its, double at, double transfer) const {
        if (transfer == 0.0) return at;
        return *its.wire = std::max(at, *its.wire) + transfer;
    }
    double leaves(const OpClass& its, int m, double now) const {
        return its.queues && m >= its.queues ? std::max(now, its.output[m - its.queues]) : now;
    }

    const Costs& costs_;
    const std::vector<double>* delay_;
    DelayAt delay_at_, transfer_at_;
    Times arrivals_;
    std::vector<int> done_[kKinds];
    std::vector<OpClass> op_classes_;            // into arrivals_, done_ and wires_
    std::vector<DeviceResidency> residency_;     // empty: no stage offloads
    std::vector<std::vector<double>> shared_;    // arrivals over each half-duplex link
    std::vector<double> wires_;                  // forward and backward of each link
    std::array<const double*, kKinds> tails_{};  // as in `op_classes_`
    Agenda agenda_;
    std::vector<Op> running_;
    std::vector<unsigned char> idle_;
    std::vector<double> now_;
    std::vector<int> ranks_to_visit_;
};

}  // namespace pipemorph::planner
