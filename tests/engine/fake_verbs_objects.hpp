// What the fake cards' objects are made of. For their own two sources only.
#pragma once

#include "fake_verbs.hpp"

namespace fake {

struct Fabric::Context : abi::Context {
    std::deque<abi::AsyncEvent> events;
};

struct Fabric::Domain {
    Fabric::Context* context;
};

struct Fabric::Channel : abi::CompChannel {
    std::deque<abi::Cq*> events;
    int queues = 0;
};

struct Fabric::Queue : abi::Cq {
    size_t capacity = 0;
    bool armed = false;
    bool broken = false;
    unsigned int unacknowledged = 0;
    int pairs = 0;
    std::deque<abi::Wc> entries;
};

struct Fabric::Pair : abi::Qp {
    struct Sent {
        uint64_t id;
        uint64_t number;
        bool signaled;
        uint32_t opcode;
    };
    struct Posted {
        uint64_t id;
        abi::Sge sge;
    };
    std::string device;
    uint32_t state = 0;
    abi::QpAttr attr{};  // as far as it was set
    abi::QpCap cap{};
    std::deque<Sent> sent;
    std::deque<Posted> receives;
    uint64_t next_send = 0;
    int64_t blocked_since_ns = -1;  // no answer, or the receiver is not ready
    uint32_t blocked_status = 0;

    Fabric::Queue& queue() { return *static_cast<Fabric::Queue*>(recv_cq); }
};

}  // namespace fake
