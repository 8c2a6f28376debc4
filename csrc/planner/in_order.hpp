// Executes a given order: when every op starts, and what it waited for.
#pragma once

#include "planner/core.hpp"

namespace pipemorph::planner {

// Ops are counted by position on their rank. Keeps its memory between runs.
class InOrder {
  public:
    explicit InOrder(const Costs& costs);
    InOrder(const InOrder&) = delete;
    InOrder& operator=(const InOrder&) = delete;

    // The makespan; kNever if ranks wait for each other, or as soon as an op starts at which its
    // tail reaches `limit`. `delay` in place of the problem's.
    double run(const Order& order) { return run(order, core_.costs().delay); }
    double run(const Order& order, const std::vector<double>& delay, const Times* tail = nullptr,
               double limit = kNever);
    // With delays and, if given, transfers that change within the iteration.
    double run(const Order& order, DelayAt delay_at, DelayAt transfer_at = nullptr);

    // About the last run.
    const Core& core() const { return core_; }
    long ops_run() const {
        long ops = 0;
        for (const Row& row : rows_) ops += row.position;
        return ops;
    }
    int ran(int rank) const { return rows_[rank].position; }
    double start(int rank, int position) const { return rows_[rank].start[position]; }
    double end(int rank, int position) const { return rows_[rank].end[position]; }
    // When the rank goes on: the end of the op, or later if its send was held up.
    double free(int rank, int position) const { return rows_[rank].free[position]; }
    int microbatch(int rank, int position) const { return rows_[rank].microbatch[position]; }
    int position(int kind, int stage, int m) const {
        return position_of_[kind][static_cast<size_t>(stage) * core_.costs().microbatches + m];
    }

    // Where a rank stands in its order, and what it has run.
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

    // As the core's chooser.
    Choice choose(const Core& core, int rank, double now) const {
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
    void began(Core&, int rank, const Op& op, double now, double end) {
        Row& row = rows_[rank];
        row.record(row.position++, op.kind, op.stage, op.microbatch, now, end, end);
    }
    void ended(int rank, double free) { rows_[rank].free[rows_[rank].position - 1] = free; }

  private:
    double finish(bool finished) const;
    void begin(const Order& order);

    Core core_;
    std::vector<Row> rows_;
    std::vector<double> start_, end_, free_;
    std::vector<int> microbatch_, position_of_[kKinds];
};

}  // namespace pipemorph::planner
