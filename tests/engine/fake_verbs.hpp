// RDMA cards of a test's own, in place of libibverbs and what is behind it: reliable connections
// between queue pairs of one process, and the faults of real cards that no test can cause.
//
// No clock and no thread: what is posted is carried out by its caller, or, while the fabric
// is held, when the test says so. The cards' timers run by `elapse` alone.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "verbs/library.hpp"

namespace fake {

namespace abi = pipemorph::abi;

struct Device {
    abi::Device device{};
    std::vector<bool> ports;  // whether each is active
    bool registers = true;
};

// A call that may fail. `state`: what modify_qp asks for.
struct Call {
    std::string name;
    std::string device;
    uint32_t state = 0;
};

// At most one at a time. Any thread may call anything.
class Fabric {
  public:
    Fabric();
    ~Fabric();
    Fabric(const Fabric&) = delete;
    Fabric& operator=(const Fabric&) = delete;

    static const pipemorph::Verbs& verbs();
    // Before anything is opened. The devices are listed in this order.
    Device& add(const char* name, std::vector<bool> ports = {true});

    // Called before reg_mr, create_qp, modify_qp and destroy_qp, and may block. What it returns is
    // the error that the call fails with, having done nothing; 0: the call is carried out.
    void intercept(std::function<int(const Call&)> before);

    // Packets that are posted from now on are under way until the test lets them land.
    void hold();
    // Lands the oldest packet that can; false if there is none.
    bool land();
    // Lands all that can, and from now on whatever is posted.
    void flow();
    // What is on the wire, and would land or wait at its destination.
    size_t under_way();
    // Time for the cards: for waiting out a receiver that is not ready, or no answer.
    void elapse(int64_t ns);

    // Everything on one device: its completion queues break, as by an overrun, and say so.
    void break_completion_queues(const std::string& device);
    // An event of the first queue pair of a device's port, and whether there is one.
    bool raise(const std::string& device, uint8_t port, uint32_t type);
    // Receivers that were not ready, by packet and retry.
    uint64_t not_ready();
    size_t queue_pairs(const std::string& device);
    // Contexts, protection domains, regions, channels and queues that are not given back.
    int open_objects();

  private:
    friend struct Calls;
    struct Context;
    struct Domain;
    struct Channel;
    struct Queue;
    struct Pair;
    struct Packet {
        uint32_t from = 0;
        uint32_t to = 0;
        uint64_t number = 0;  // of its work request at the sender
        uint32_t opcode = 0;
        uint32_t immediate = 0;
        uint64_t address = 0;
        uint32_t rkey = 0;
        // A card reads as late as it can: when the packet lands, or when its queue pair ends.
        std::vector<abi::Sge> unread;
        std::vector<uint8_t> payload;
    };
    enum class Landing { done, waits, dropped };

    int ask(const char* name, const abi::Device* device, uint32_t state = 0);
    void run();
    bool land_one();
    Landing land(Packet& packet);
    void read(Packet& packet);
    void read_all_of(const Pair& pair);
    void complete(Pair& pair, abi::Wc wc);
    void acknowledge(Pair& pair, uint64_t number, uint32_t status);
    void to_error(Pair& pair);
    void raise(Context& context, const abi::AsyncEvent& event);
    Pair* find(uint32_t number);
    // The memory of a key, if these bytes are in it.
    uint8_t* memory(uint32_t key, uint64_t address, size_t bytes, int access);

    static Fabric* current_;

    std::recursive_mutex mu_;
    std::function<int(const Call&)> before_;
    std::list<Device> devices_;
    std::vector<abi::Device*> listed_;
    std::map<uint32_t, std::pair<abi::Mr*, int>> regions_;  // by key, with what they allow
    std::list<std::unique_ptr<Pair>> pairs_;
    std::set<Queue*> queues_;
    std::set<Context*> contexts_;
    std::deque<Packet> wire_;
    bool held_ = false;
    int64_t now_ns_ = 0;
    uint32_t next_key_ = 1000;
    uint32_t next_pair_ = 17;
    uint64_t not_ready_ = 0;
    int open_ = 0;
};

}  // namespace fake
