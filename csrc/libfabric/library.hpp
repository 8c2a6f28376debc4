// libfabric, found at run time.
#pragma once

#include <string>

#include "libfabric/abi.hpp"

namespace pipemorph {

struct Libfabric {
    uint32_t (*version)();
    int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                   const fabric_abi::Info* hints, fabric_abi::Info** out);
    void (*freeinfo)(fabric_abi::Info* info);
    fabric_abi::Info* (*dupinfo)(const fabric_abi::Info* info);
    int (*fabric)(fabric_abi::FabricAttr* attr, fabric_abi::Fabric** out, void* context);
    const char* (*strerror)(int error);
};

// The interface that is asked for: that of Debian 12, and older than what EFA's installer brings.
constexpr uint32_t kLibfabricVersion = fabric_abi::version(1, 17);

// Null where it cannot be used; `why` then says why. Loaded once and never unloaded.
const Libfabric* load_libfabric(std::string& why);

// "1.17"
std::string libfabric_version_text(uint32_t version);

}  // namespace pipemorph
