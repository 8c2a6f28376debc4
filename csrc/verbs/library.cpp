#include "verbs/library.hpp"

#include <dlfcn.h>

namespace pipemorph {
namespace {

struct Loaded {
    Verbs verbs{};
    std::string last_error;

    Loaded() {
        void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            last_error = std::string("libibverbs cannot be loaded (") + dlerror() +
                         "): install rdma-core's libibverbs1 and ibverbs-providers";
            return;
        }
        const auto find = [&](auto& function, const char* name) {
            // POSIX guarantees that a symbol's address fits a function pointer.
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr && last_error.empty())
                last_error = std::string("libibverbs has no ") + name +
                             ": it is older than rdma-core 32, which is needed";
        };
        find(verbs.get_device_list, "ibv_get_device_list");
        find(verbs.free_device_list, "ibv_free_device_list");
        find(verbs.open_device, "ibv_open_device");
        find(verbs.close_device, "ibv_close_device");
        find(verbs.query_port, "ibv_query_port");
        find(verbs.query_gid_table, "_ibv_query_gid_table");
        find(verbs.alloc_pd, "ibv_alloc_pd");
        find(verbs.dealloc_pd, "ibv_dealloc_pd");
        find(verbs.reg_mr, "ibv_reg_mr");
        find(verbs.dereg_mr, "ibv_dereg_mr");
        find(verbs.create_comp_channel, "ibv_create_comp_channel");
        find(verbs.destroy_comp_channel, "ibv_destroy_comp_channel");
        find(verbs.create_cq, "ibv_create_cq");
        find(verbs.destroy_cq, "ibv_destroy_cq");
        find(verbs.get_cq_event, "ibv_get_cq_event");
        find(verbs.ack_cq_events, "ibv_ack_cq_events");
        find(verbs.create_qp, "ibv_create_qp");
        find(verbs.modify_qp, "ibv_modify_qp");
        find(verbs.destroy_qp, "ibv_destroy_qp");
        find(verbs.get_async_event, "ibv_get_async_event");
        find(verbs.ack_async_event, "ibv_ack_async_event");
        find(verbs.wc_status_str, "ibv_wc_status_str");
        find(verbs.event_type_str, "ibv_event_type_str");
        find(verbs.fork_init, "ibv_fork_init");
        if (!last_error.empty()) return;
        // A process that forks (data loaders do) must not move registered pages away from the
        // device. A no-op on kernels that copy them on fork. It fails only after another
        // registration in this process, whose owner has made that choice.
        (void)verbs.fork_init();
    }
};

}  // namespace

const Verbs* load_verbs(std::string& why) {
    static const Loaded loaded;
    why = loaded.last_error;
    return why.empty() ? &loaded.verbs : nullptr;
}

}  // namespace pipemorph
