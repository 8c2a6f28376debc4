// What the engine uses of libfabric's binary interface, as it has been since version 1.3.
//
// libfabric is found at run time, and most of its calls go through tables of functions that its
// objects carry, so its headers are needed for neither. tests/engine/libfabric_abi_test.cpp
// compares every declaration with the system's header, where it has one. Newer versions only append
// to these structures.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pipemorph::fabric_abi {

constexpr uint32_t version(uint32_t major, uint32_t minor) {
    return major << 16 | minor;
}

// Capabilities, modes, flags.
constexpr uint64_t kMsg = 1ULL << 1;
constexpr uint64_t kReceive = 1ULL << 10;
constexpr uint64_t kSend = 1ULL << 11;
constexpr uint64_t kTransmit = kSend;
constexpr uint64_t kModeContext = 1ULL << 59;
constexpr uint64_t kModeContext2 = 1ULL << 52;
constexpr int kMrLocal = 1 << 2;
constexpr int kMrVirtualAddress = 1 << 4;
constexpr int kMrAllocated = 1 << 5;
constexpr int kMrProviderKey = 1 << 6;
constexpr uint64_t kAddressUnspecified = UINT64_MAX;

enum EpType : int { kReliableDatagram = 3 };
enum Threading : int { kThreadDomain = 3 };
enum ResourceManagement : int { kResourcesManaged = 2 };
enum AvType : int { kAvTable = 2 };
enum CqFormat : int { kCqMessages = 2 };
enum WaitObject : int { kWaitNone = 0, kWaitDescriptor = 3 };
enum Command : int { kGetWait = 5, kEnable = 6 };

// Errors are negative. These are libfabric's own; others are errno's.
constexpr int kAgain = 11;  // EAGAIN
constexpr int kTruncated = 265;
constexpr int kErrorAvailable = 259;

struct Fid;
struct Ops {
    size_t size;
    int (*close)(Fid* fid);
    int (*bind)(Fid* fid, Fid* to, uint64_t flags);
    int (*control)(Fid* fid, int command, void* argument);
    // More follows.
};
struct Fid {
    size_t kind;
    void* context;
    Ops* ops;
};

// The library's own memory for one operation, until that has completed.
struct Context {
    void* internal[8];
};

struct TxAttr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t inject_size, size, iov_limit, rma_iov_limit;
    uint32_t tclass;
};
struct RxAttr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t total_buffered_recv, size, iov_limit;
};
struct EpAttr {
    int type;
    uint32_t protocol, protocol_version;
    size_t max_msg_size;
    // More follows.
};
struct DomainAttr {
    void* domain;
    char* name;
    int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
    // More follows.
};
struct FabricAttr {
    void* fabric;
    char* name;
    char* prov_name;
    uint32_t prov_version, api_version;
};
struct Info {
    Info* next;
    uint64_t caps, mode;
    uint32_t addr_format;
    size_t src_addrlen, dest_addrlen;
    void* src_addr;
    void* dest_addr;
    Fid* handle;
    TxAttr* tx_attr;
    RxAttr* rx_attr;
    EpAttr* ep_attr;
    DomainAttr* domain_attr;
    FabricAttr* fabric_attr;
    // More follows.
};

struct Domain;
struct Fabric;
struct OpsFabric {
    size_t size;
    int (*domain)(Fabric* fabric, Info* info, Domain** out, void* context);
    void (*passive_ep)();
    void (*eq_open)();
    void (*wait_open)();
    int (*trywait)(Fabric* fabric, Fid** fids, int count);
    // More follows.
};
struct Fabric {
    Fid fid;
    OpsFabric* ops;
    uint32_t api_version;
};

struct AvAttr {
    int type;
    int rx_ctx_bits;
    size_t count;
    size_t ep_per_node;
    const char* name;
    void* map_addr;
    uint64_t flags;
};
struct Av;
struct OpsAv {
    size_t size;
    int (*insert)(Av* av, const void* address, size_t count, uint64_t* out, uint64_t flags,
                  void* context);
    // More follows.
};
struct Av {
    Fid fid;
    OpsAv* ops;
};

struct CqAttr {
    size_t size;
    uint64_t flags;
    int format;
    int wait_obj;
    int signaling_vector;
    int wait_cond;
    void* wait_set;
};
struct CqEntry {
    void* context;
    uint64_t flags;
    size_t bytes;
};
struct CqError {
    void* context;
    uint64_t flags;
    size_t len;
    void* buf;
    uint64_t data;
    uint64_t tag;
    size_t olen;
    int err;
    int prov_errno;
    void* err_data;
    size_t err_data_size;
    uint64_t room[4];  // for what newer versions append
};
struct Cq;
struct OpsCq {
    size_t size;
    ssize_t (*read)(Cq* cq, void* entries, size_t count);
    void (*readfrom)();
    ssize_t (*readerr)(Cq* cq, CqError* out, uint64_t flags);
    void (*sread)();
    void (*sreadfrom)();
    int (*signal)(Cq* cq);
    const char* (*strerror)(Cq* cq, int provider_error, const void* data, char* out, size_t bytes);
};
struct Cq {
    Fid fid;
    OpsCq* ops;
};

struct Mr {
    Fid fid;
    void* descriptor;
    uint64_t key;
};
struct OpsMr {
    size_t size;
    int (*reg)(Fid* domain, const void* memory, size_t bytes, uint64_t access, uint64_t offset,
               uint64_t requested_key, uint64_t flags, Mr** out, void* context);
    // More follows.
};
struct Ep;
struct OpsDomain {
    size_t size;
    int (*av_open)(Domain* domain, AvAttr* attr, Av** out, void* context);
    int (*cq_open)(Domain* domain, CqAttr* attr, Cq** out, void* context);
    int (*endpoint)(Domain* domain, Info* info, Ep** out, void* context);
    // More follows.
};
struct Domain {
    Fid fid;
    OpsDomain* ops;
    OpsMr* mr;
};

struct OpsEp {
    size_t size;
    ssize_t (*cancel)(Fid* ep, void* context);
    // More follows.
};
struct OpsCm {
    size_t size;
    void (*setname)();
    int (*getname)(Fid* ep, void* address, size_t* bytes);
    // More follows.
};
struct OpsMsg {
    size_t size;
    ssize_t (*recv)(Ep* ep, void* memory, size_t bytes, void* descriptor, uint64_t from,
                    void* context);
    void (*recvv)();
    void (*recvmsg)();
    ssize_t (*send)(Ep* ep, const void* memory, size_t bytes, void* descriptor, uint64_t to,
                    void* context);
    // More follows.
};
struct Ep {
    Fid fid;
    OpsEp* ops;
    OpsCm* cm;
    OpsMsg* msg;
    // More follows.
};

}  // namespace pipemorph::fabric_abi
