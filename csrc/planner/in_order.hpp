// Executes a given order, for the start and the cause of the wait of every op.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// Ops are addressed by position on their rank. Reuses its memory between runs.
class OrderExecutor {
  public:
    explicit OrderExecutor(const Costs& costs);
    OrderExecutor(const OrderExecutor&) = delete;
    OrderExecutor& operator=(const OrderExecutor&) = delete;

    // Makespan; kNever on a deadlock, or as soon as an op starts at which its tail reaches `limit`.
    // `delay` replaces the problem's.
    double run(const Order& order) { return run(order, core_.costs().delay); }
    double run(const Order& order, const std::vector<double>& delay, const Times* tail = nullptr,
               double limit = kNever);
    // Makespan with delays and, if given, transfers that change within the iteration.
    double run(const Order& order, DelayAt delay_at, DelayAt transfer_at = nullptr);

    // Results of the last run.
    const EventCore& core() const { return core_; }
    long ops_run() const {
        long ops = 0;
        for (const Row& row : rows_) ops += row.position;
        return ops;
    }
    int ran(int rank) const { return rows_[rank].position; }
    double start(int rank, int position) const { return rows_[rank].start[position]; }
    double end(int rank, int position) const { return rows_[rank].end[position]; }
    // Time at which the rank goes on: the end of the op, or later if its send was blocked.
    double free(int rank, int position) const { return rows_[rank].free[position]; }
    int microbatch(int rank, int position) const { return rows_[rank].microbatch[position]; }
    int position(int kind, int stage, int m) const {
        return position_of_[kind][static_cast<size_t>(stage) * core_.costs().microbatches + m];
    }

    // Position of a rank in its order, and the ops that it has run.
    struct Row {
        const unsigned char* codes = nullptr;
        int position = 0, size = 0, microbatches = 0;
        double *start = nullptr, *end = nullptr, *free = nullptr;
        int* microbatch = nullptr;
        int* position_of[kKinds] = {nullptr, nullptr, nullptr};

        bool finished() const { return position == size; }
        unsigned char code() const { return codes[position]; }
        void record(int at, int kind, int stage, int m, double began, double ended,
                    double went_on) {
            start[at] = began;
            end[at] = ended;
            free[at] = went_on;
            microbatch[at] = m;
            position_of[kind == kFused ? kBackward : kind]
                       [static_cast<size_t>(stage) * microbatches + m] = at;
        }
    };

    // Interface of the core's chooser.
    Choice choose(const EventCore& core, int rank, double now) const {
        Choice choice;
        const Row& row = rows_[rank];
        if (row.finished()) return choice;
        const Op& op = choice.op = core.decode(rank, row.code());
        const double input =
            op.kind == kWeight ? 0.0 : core.arrival(op.kind, op.stage, op.microbatch);
        choice.found = input <= now;
        choice.until = input;
        return choice;
    }
    void began(EventCore&, int rank, const Op& op, double now, double end) {
        Row& row = rows_[rank];
        row.record(row.position++, op.kind, op.stage, op.microbatch, now, end, end);
    }
    void ended(int rank, double free) { rows_[rank].free[rows_[rank].position - 1] = free; }

  private:
    double finish(bool finished) const;
    void begin(const Order& order);

    EventCore core_;
    std::vector<Row> rows_;
    std::vector<double> start_, end_, free_;
    std::vector<int> microbatch_, position_of_[kKinds];
};

}  // namespace pipemorph::planner
