// libibverbs, found at run time.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <string>

#include "verbs/abi.hpp"

namespace pipemorph {

struct Verbs {
    abi::Device** (*get_device_list)(int* count);
    void (*free_device_list)(abi::Device** list);
    abi::Context* (*open_device)(abi::Device* device);
    int (*close_device)(abi::Context* context);
    int (*query_port)(abi::Context* context, uint8_t port, abi::PortAttr* out);
    ssize_t (*query_gid_table)(abi::Context* context, abi::GidEntry* out, size_t count,
                               uint32_t flags, size_t entry_size);
    abi::Pd* (*alloc_pd)(abi::Context* context);
    int (*dealloc_pd)(abi::Pd* pd);
    abi::Mr* (*reg_mr)(abi::Pd* pd, void* address, size_t length, int access);
    int (*dereg_mr)(abi::Mr* mr);
    abi::CompChannel* (*create_comp_channel)(abi::Context* context);
    int (*destroy_comp_channel)(abi::CompChannel* channel);
    abi::Cq* (*create_cq)(abi::Context* context, int entries, void* user, abi::CompChannel* channel,
                          int vector);
    int (*destroy_cq)(abi::Cq* cq);
    int (*get_cq_event)(abi::CompChannel* channel, abi::Cq** cq, void** user);
    void (*ack_cq_events)(abi::Cq* cq, unsigned int count);
    abi::Qp* (*create_qp)(abi::Pd* pd, abi::QpInitAttr* attr);
    int (*modify_qp)(abi::Qp* qp, abi::QpAttr* attr, int mask);
    int (*destroy_qp)(abi::Qp* qp);
    int (*get_async_event)(abi::Context* context, abi::AsyncEvent* out);
    void (*ack_async_event)(abi::AsyncEvent* event);
    const char* (*wc_status_str)(uint32_t status);
    const char* (*event_type_str)(uint32_t event);
    int (*fork_init)();
};

// Loads the library once; it is never unloaded. Null if it is unusable, with the reason in `why`.
const Verbs* load_verbs(std::string& why);

}  // namespace pipemorph
