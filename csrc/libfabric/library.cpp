#include "libfabric/library.hpp"

#include <dlfcn.h>

namespace pipemorph {
namespace {

struct Loaded {
    Libfabric calls{};
    std::string trouble;

    Loaded() {
        void* library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) {
            trouble = std::string("libfabric cannot be loaded (") + dlerror() +
                      "): install libfabric1, or put the one of EFA's installer "
                      "(/opt/amazon/efa) on the library path";
            return;
        }
        const auto find = [&](auto& function, const char* name) {
            // POSIX guarantees that a symbol's address fits a function pointer.
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr && trouble.empty())
                trouble = std::string("libfabric has no ") + name;
        };
        find(calls.version, "fi_version");
        find(calls.getinfo, "fi_getinfo");
        find(calls.freeinfo, "fi_freeinfo");
        find(calls.dupinfo, "fi_dupinfo");
        find(calls.fabric, "fi_fabric");
        find(calls.strerror, "fi_strerror");
        if (!trouble.empty()) return;
        if (calls.version() < kLibfabricVersion)
            trouble = "libfabric is version " + libfabric_version_text(calls.version()) + ", and " +
                      libfabric_version_text(kLibfabricVersion) + " or newer is needed";
    }
};

}  // namespace

const Libfabric* load_libfabric(std::string& why) {
    static const Loaded loaded;
    why = loaded.trouble;
    return why.empty() ? &loaded.calls : nullptr;
}

std::string libfabric_version_text(uint32_t version) {
    return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

}  // namespace pipemorph
