// Part of libibverbs' binary interface that the engine uses.
//
// libibverbs is loaded at run time, so that one build runs with and without it, and its headers are
// not needed to build. The layouts below have been fixed since IBVERBS_1.1 (2008); only the first
// fields of objects that the library itself allocates are declared. tests/engine/verbs_abi_test.cpp
// compares every size and offset with the system's header, if there is one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pipemorph::abi {

struct Context;
struct Cq;
struct Qp;
struct SendWr;
struct RecvWr;
struct Wc;

union Gid {
    uint8_t raw[16];
    struct {
        uint64_t subnet_prefix;  // big-endian, as all of it
        uint64_t interface_id;
    } global;
};

struct GidEntry {
    Gid gid;
    uint32_t index;
    uint32_t port;
    uint32_t type;
    uint32_t netdev_ifindex;
};
enum : uint32_t { kGidIb = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };

struct Device {
    void* unused_ops[2];
    int node_type;
    int transport_type;
    char name[64];
    char uverbs_name[64];
    char uverbs_path[256];
    char device_path[256];
};
enum : int { kTransportIb = 0, kTransportIwarp = 1 };  // RoCE counts as the first

struct ContextOps {
    void* unused_before[11];
    int (*poll_cq)(Cq* cq, int count, Wc* out);
    int (*req_notify_cq)(Cq* cq, int solicited_only);
    void* unused_between[12];
    int (*post_send)(Qp* qp, SendWr* first, SendWr** bad);
    int (*post_recv)(Qp* qp, RecvWr* first, RecvWr** bad);
    void* unused_after[5];
};

struct Context {
    Device* device;
    ContextOps ops;
    int cmd_fd;
    int async_fd;
};

struct PortAttr {
    uint32_t state;
    uint32_t max_mtu;
    uint32_t active_mtu;
    int gid_table_length;
    uint32_t capabilities;
    uint32_t max_message;
    uint32_t bad_pkeys;
    uint32_t qkey_violations;
    uint16_t pkey_table_length;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t lmc;
    uint8_t max_vl;
    uint8_t sm_sl;
    uint8_t subnet_timeout;
    uint8_t init_type_reply;
    uint8_t active_width;
    uint8_t active_speed;
    uint8_t physical_state;
    uint8_t link_layer;
    uint8_t flags;
    uint16_t capabilities2;
};
enum : uint32_t { kPortDown = 1, kPortActive = 4 };
enum : uint8_t { kLinkLayerInfiniband = 1, kLinkLayerEthernet = 2 };

struct CompChannel {
    Context* context;
    int fd;
};

struct Pd;  // opaque

struct Mr {
    Context* context;
    Pd* pd;
    void* address;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};

struct Cq {
    Context* context;
    CompChannel* channel;
    void* user_context;
};

struct Qp {
    Context* context;
    void* user_context;
    Pd* pd;
    Cq* send_cq;
    Cq* recv_cq;
    void* srq;
    uint32_t handle;
    uint32_t number;
};

struct QpCap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};

struct QpInitAttr {
    void* user_context;
    Cq* send_cq;
    Cq* recv_cq;
    void* srq;
    QpCap cap;
    uint32_t type;
    int signal_all;
};
enum : uint32_t { kQpReliable = 2 };

struct GlobalRoute {
    Gid destination;
    uint32_t flow_label;
    uint8_t source_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};

struct AddressVector {
    GlobalRoute route;
    uint16_t dlid;
    uint8_t service_level;
    uint8_t source_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port;
};

struct QpAttr {
    uint32_t state;
    uint32_t current_state;
    uint32_t path_mtu;
    uint32_t path_migration;
    uint32_t qkey;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t destination_qp;
    unsigned int access;
    QpCap cap;
    AddressVector address;
    AddressVector alternative;
    uint16_t pkey_index;
    uint16_t alternative_pkey_index;
    uint8_t sqd_notify;
    uint8_t sq_draining;
    uint8_t max_rd_atomic;
    uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer;
    uint8_t port;
    uint8_t timeout;
    uint8_t retry_count;
    uint8_t rnr_retry;
    uint8_t alternative_port;
    uint8_t alternative_timeout;
    uint32_t rate_limit;
};
enum : uint32_t { kQpInit = 1, kQpReadyToReceive = 2, kQpReadyToSend = 3, kQpError = 6 };
enum : int {
    kSetState = 1 << 0,
    kSetAccess = 1 << 3,
    kSetPkeyIndex = 1 << 4,
    kSetPort = 1 << 5,
    kSetAddress = 1 << 7,
    kSetMtu = 1 << 8,
    kSetTimeout = 1 << 9,
    kSetRetryCount = 1 << 10,
    kSetRnrRetry = 1 << 11,
    kSetRqPsn = 1 << 12,
    kSetMaxRdAtomic = 1 << 13,
    kSetMinRnrTimer = 1 << 15,
    kSetSqPsn = 1 << 16,
    kSetMaxDestRdAtomic = 1 << 17,
    kSetDestinationQp = 1 << 20,
};

enum : int { kLocalWrite = 1, kRemoteWrite = 2 };

struct Sge {
    uint64_t address;
    uint32_t length;
    uint32_t lkey;
};

struct SendWr {
    uint64_t id;
    SendWr* next;
    Sge* sges;
    int sge_count;
    uint32_t opcode;
    unsigned int flags;
    uint32_t immediate;  // big-endian
    union {
        struct {
            uint64_t address;
            uint32_t rkey;
        } rdma;
        uint64_t unused_operation[4];
    };
    uint64_t unused_xrc;
    uint64_t unused_tail[6];
};
enum : uint32_t { kWriteWithImmediate = 1, kSend = 2 };
enum : unsigned int { kSignaled = 2 };

struct RecvWr {
    uint64_t id;
    RecvWr* next;
    Sge* sges;
    int sge_count;
};

struct Wc {
    uint64_t id;
    uint32_t status;
    uint32_t opcode;
    uint32_t vendor_error;
    uint32_t bytes;
    uint32_t immediate;  // big-endian
    uint32_t qp_number;
    uint32_t source_qp;
    unsigned int flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t service_level;
    uint8_t dlid_path_bits;
};
enum : uint32_t { kWcSuccess = 0, kWcFlushed = 5, kWcRecv = 128, kWcRecvWriteWithImmediate = 129 };

struct AsyncEvent {
    union {
        Cq* cq;
        Qp* qp;
        int port;
    } element;
    uint32_t type;
};
enum : uint32_t {
    kEventCqError = 0,
    kEventQpFatal = 1,
    kEventQpRequestError = 2,
    kEventQpAccessError = 3,
    kEventDeviceFatal = 8,
    kEventPortActive = 9,
    kEventPortError = 10,
    kEventLidChange = 11,
    kEventGidChange = 18,
};

}  // namespace pipemorph::abi
