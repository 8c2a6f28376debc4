// What libfabric offers here, and endpoints of it that carry messages.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libfabric/library.hpp"
#include "os/memory.hpp"

namespace pipemorph {

// One device (libfabric: domain) that a provider offers with reliable datagrams.
class FabricDevice {
  public:
    // Takes over the description.
    FabricDevice(const Libfabric& library, fabric_abi::Info* info)
        : library_(library), info_(info) {}
    ~FabricDevice() { library_.freeinfo(info_); }
    FabricDevice(const FabricDevice&) = delete;
    FabricDevice& operator=(const FabricDevice&) = delete;

    std::string provider() const { return info_->fabric_attr->prov_name; }  // "efa"
    std::string name() const { return info_->domain_attr->name; }           // "rdmap0s6-rdm"
    std::string describe() const { return provider() + " " + name(); }
    const Libfabric& library() const { return library_; }
    fabric_abi::Info* info() const { return info_; }

    // Something of an endpoint could not be closed. `kept`: so its memory is kept, too.
    void lost(bool kept) { ++(kept ? kept_ : lost_); }
    // Why no more endpoints are made on it: those that cannot be closed must not add up for ever.
    // Empty: they are.
    std::string trouble() const;

  private:
    const Libfabric& library_;
    fabric_abi::Info* const info_;
    std::atomic<uint32_t> kept_{0};
    std::atomic<uint32_t> lost_{0};
};

// What was found, for people.
struct FabricOffer {
    std::string provider;
    std::string device;
    std::string unused;  // why links do not use it; empty: they may
};

struct FabricSearch {
    std::string version;  // of the library; empty: there is none
    std::string trouble;  // why there is no device to be used; empty if there is one
    std::vector<FabricOffer> offers;
    std::vector<std::shared_ptr<FabricDevice>> devices;  // to be used, of one provider
};

// Devices of EFA, or the first one of the provider that `provider` names, which is what FI_PROVIDER
// says.
FabricSearch find_fabric_devices(const std::string& provider);

// Whether the kernel shows a device of EFA.
bool has_efa(const std::string& sysfs);

// One endpoint with its domain, its queue of completions and memory for messages, all on one
// thread. The fabric reaches no memory but that.
class FabricEndpoint {
  public:
    enum class Wake { descriptor, none };

    // `sends` and `receives` blocks of `block_bytes` each. `wake`: none makes it one that has to be
    // polled, whatever the provider could do. Throws EngineError, also where too many before it
    // could not be closed.
    FabricEndpoint(std::shared_ptr<FabricDevice> device, uint32_t sends, uint32_t receives,
                   size_t block_bytes, Wake wake = Wake::descriptor);
    // Closes it. Memory that the provider does not let go of is kept mapped, so that nothing that
    // still moves finds a new owner there.
    ~FabricEndpoint();
    FabricEndpoint(const FabricEndpoint&) = delete;
    FabricEndpoint& operator=(const FabricEndpoint&) = delete;

    static constexpr size_t kMaxAddress = 256;
    const std::vector<uint8_t>& address() const { return address_; }
    // Whom it sends to, and is sent to by.
    void connect(const std::vector<uint8_t>& address);

    // Becomes readable when there is something to poll for; -1 if the provider has no such thing.
    int descriptor() const { return descriptor_; }
    // Whether the descriptor can be relied on from now on. If not, there is something to poll for.
    bool may_sleep();

    uint8_t* send_block(uint32_t block) const { return memory_->data() + block * block_bytes_; }
    uint8_t* receive_block(uint32_t block) const { return send_block(sends_ + block); }
    // False: not now, poll first. Both throw EngineError.
    bool send(uint32_t block, size_t bytes);
    bool receive(uint32_t block);

    struct Done {
        bool sent = false;  // else received
        uint32_t block = 0;
        size_t bytes = 0;      // received
        bool damaged = false;  // received, and did not fit
    };
    // Also moves what is under way: many providers do nothing by themselves. At most `most`. Throws
    // EngineError with what the provider says.
    std::vector<Done> poll(size_t most);

  private:
    struct Operation {
        fabric_abi::Context context{};  // comes first: completions bring its address
        bool sends = false;
        uint32_t block = 0;
        bool under_way = false;
    };

    void settle();
    void open(Wake wake);
    void close();
    void check(int result, const char* what) const;
    std::optional<Done> failed();
    Done done(void* context, size_t bytes, bool damaged);

    const std::shared_ptr<FabricDevice> device_;
    const uint32_t sends_;
    const uint32_t receives_;
    const size_t block_bytes_;
    std::shared_ptr<Memory> memory_;
    std::vector<Operation> operations_;
    fabric_abi::Fabric* fabric_ = nullptr;
    fabric_abi::Domain* domain_ = nullptr;
    fabric_abi::Mr* registered_ = nullptr;
    fabric_abi::Av* av_ = nullptr;
    fabric_abi::Cq* cq_ = nullptr;
    fabric_abi::Ep* ep_ = nullptr;
    void* memory_descriptor_ = nullptr;
    uint64_t peer_ = fabric_abi::kAddressUnspecified;
    std::vector<uint8_t> address_;
    int descriptor_ = -1;
};

}  // namespace pipemorph
