// Chunks over a reliable connection between two queue pairs.
//
// The sender writes a chunk directly into the granted slot, with an immediate value of lane and
// chunk number. The source is leased memory, which is registered, or staging memory, into which the
// chunk is copied. The first chunk of a message on a queue pair follows a SEND of the whole header,
// which opens a lane for it: RC preserves the order. The queue pair itself stands for the path's
// epoch. A new connection always gets a new one.
//
// The device never accesses the application's own memory, so a payload may be freed as soon as its
// message is acknowledged, whatever the queue pair does. A message in leased memory is held until
// its write has completed or the queue pair is gone.
#pragma once

#include <optional>
#include <unordered_map>

#include "path/data_path.hpp"
#include "protocol/telemetry.hpp"
#include "verbs/rail.hpp"
#include "wire/frames.hpp"

namespace pipemorph {

class RdmaPath final : public DataPath, public RailUser {
  public:
    struct Settings {
        uint32_t chunk_bytes = 0;
        // Time without a completion after which the path is given up; after half of it no new
        // chunks are assigned to it.
        int64_t dead_after_ns = 0;
        // Time after which a queue pair that cannot be destroyed ends the link.
        int64_t retire_within_ns = 0;
        // Limit of staging memory in bytes.
        uint64_t most_staged = 0;
    };

    // Makes the queue pair. Throws EngineError.
    RdmaPath(std::shared_ptr<Rail> rail, std::shared_ptr<PathHost> host, uint32_t index,
             uint32_t epoch, Settings settings);
    ~RdmaPath() override;

    QpAddress local() const { return local_; }
    // Called before `start`. One side sends the first probe (`speaks_first`), and the other answers
    // it with its own: each is up when its probe was acknowledged, so both directions are tested.
    void connect(const QpAddress& peer, bool speaks_first);

    bool retire() override;

    void rail_failed(const std::string& why) override;
    bool uses(const abi::Qp* qp) const override { return qp == qp_; }
    bool uses(const abi::Cq* cq) const override { return cq == cq_; }
    const GidBytes& local_gid() const override { return local_.gid; }

  private:
    void on_start() override { guarded(&RdmaPath::begin); }
    void on_notify() override { guarded(&RdmaPath::pump); }
    void on_sever() override { break_off("severed on request"); }
    void on_give_up(const std::string& why) override { break_off(rail_->describe() + ": " + why); }
    void on_close(const std::shared_ptr<void>& closed) override;

    void open();
    void guarded(void (RdmaPath::*what)());
    void begin();
    void on_completions();
    bool drain();
    void drain_later();
    void handle(const abi::Wc& wc);
    void received(const abi::Wc& wc);
    void process_header(const abi::Wc& wc, uint32_t buffer);
    void process_chunk(uint32_t immediate, uint32_t bytes);
    void write_completed(uint32_t number);
    void probe_completed();
    void pump();
    bool send_chunk();
    void post_probe();
    bool post_receive(uint32_t buffer);
    bool post(abi::SendWr& first);
    void check_progress();
    void record_error(const std::string& why);
    void break_off(const std::string& why);
    void end(const std::string& why);
    int destroy();
    bool make_queues();
    void add_blocks(uint32_t count);
    bool stage_more();

    const Settings settings_;
    const std::shared_ptr<Rail> rail_;
    const std::shared_ptr<VerbsDevice> device_;
    const Verbs& verbs_;
    // Pieces of staging memory, with a block for each chunk.
    std::vector<std::shared_ptr<Registration>> staging_;
    uint64_t claimed_ = 0;  // bytes of it that were reserved
    // Memory for headers: the receives' buffers, then one per write.
    std::shared_ptr<Registration> headers_;
    abi::CompChannel* channel_ = nullptr;
    abi::Cq* cq_ = nullptr;
    abi::Qp* qp_ = nullptr;
    QpAddress local_;
    uint32_t gid_index_ = 0;
    bool infiniband_ = false;
    bool speaks_first_ = false;
    bool watched_ = false;
    bool up_ = false;
    bool suspect_ = false;
    bool breaking_ = false;
    bool drains_later_ = false;
    int64_t retiring_since_ns_ = 0;
    std::string first_error_;

    // Sending.
    struct Block {
        uint8_t* data = nullptr;
        uint32_t lkey = 0;
    };
    // Write, posted or free. A posted one needs either the block or the message.
    struct Write {
        std::optional<uint32_t> block;
        std::shared_ptr<OutMessage> message;
    };
    uint32_t most_writes_;
    std::vector<Write> writes_;
    std::vector<uint32_t> free_writes_;
    std::vector<Block> blocks_;
    std::vector<uint32_t> free_blocks_;
    bool staged_all_ = false;  // there is no more memory
    PathHost::Pace pace_;
    uint32_t writes_out_ = 0;
    bool probe_out_ = false;
    uint64_t next_lane_ = 0;
    std::unordered_map<uint64_t, uint64_t> lane_of_;  // message → its lane
    std::vector<uint64_t> lane_message_;
    int64_t progress_ns_ = 0;  // time of the last completion, or of the first post after a pause
    int64_t checked_ns_ = 0;   // time of the last progress check
    int64_t probe_ns_ = 0;
    int64_t last_proof_ns_ = 0;  // time of the last completion that proved the path to be good

    // Receiving.
    std::unordered_map<uint32_t, ChunkHeader> lanes_;
};

}  // namespace pipemorph
