#include "libfabric/device.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace pipemorph {
namespace {

namespace abi = fabric_abi;

constexpr size_t kLeastMessage = size_t{64} << 10;
// What may stay for ever of the endpoints on one device: with the memory of their messages, some
// 20 MiB each; and without, which ofi_rxm (1.17) leaves of many that were broken off.
constexpr uint32_t kMostKept = 3;
constexpr uint32_t kMostLost = 16;

struct InfoList {
    const Libfabric& library;
    abi::Info* first = nullptr;
    ~InfoList() {
        if (first != nullptr) library.freeinfo(first);
    }
};

// What the endpoints below can do without: each mode bit is a duty of the caller's.
int look_up(const Libfabric& library, const std::string& provider, InfoList& found) {
    InfoList hints{library, library.dupinfo(nullptr)};
    if (hints.first == nullptr) throw EngineError("libfabric: out of memory");
    hints.first->caps = abi::kMsg;
    hints.first->mode = abi::kModeContext | abi::kModeContext2;
    hints.first->ep_attr->type = abi::kReliableDatagram;
    hints.first->domain_attr->threading = abi::kThreadDomain;
    hints.first->domain_attr->resource_mgmt = abi::kResourcesManaged;
    hints.first->domain_attr->mr_mode =
        abi::kMrLocal | abi::kMrVirtualAddress | abi::kMrAllocated | abi::kMrProviderKey;
    // What is freed with the hints. FI_PROVIDER may also be a list, which libfabric itself reads.
    if (!provider.empty() && provider.find_first_of(",^") == std::string::npos)
        hints.first->fabric_attr->prov_name = ::strdup(provider.c_str());
    return library.getinfo(kLibfabricVersion, nullptr, nullptr, 0, hints.first, &found.first);
}

// Before memory is taken for an endpoint of it.
std::shared_ptr<FabricDevice> usable(std::shared_ptr<FabricDevice> device) {
    if (const std::string trouble = device->trouble(); !trouble.empty()) throw EngineError(trouble);
    return device;
}

}  // namespace

FabricSearch find_fabric_devices(const std::string& named) {
    FabricSearch search;
    const Libfabric* library = load_libfabric(search.trouble);
    if (library == nullptr) return search;
    search.version = libfabric_version_text(library->version());
    const bool is_named = !named.empty();
    const std::string instead = is_named ? "FI_PROVIDER is " + named
                                         : "links use it only if FI_PROVIDER names its provider";
    InfoList found{*library};
    if (const int error = look_up(*library, named, found); error != 0) {
        search.trouble = std::string("libfabric has no provider of reliable datagrams here") +
                         (is_named ? " (" + instead + ")" : "") + ": " + library->strerror(-error);
        return search;
    }
    for (const abi::Info* info = found.first; info != nullptr; info = info->next) {
        FabricOffer offer{info->fabric_attr->prov_name, info->domain_attr->name, {}};
        const auto same = [&offer](const FabricOffer& other) {
            return other.provider == offer.provider && other.device == offer.device;
        };
        // A device comes once for each kind of address, and the best kind first.
        if (std::any_of(search.offers.begin(), search.offers.end(), same)) continue;
        const bool efa = offer.provider == "efa";
        if (!efa && !is_named)
            offer.unused = instead;
        else if (info->ep_attr->max_msg_size < kLeastMessage)
            offer.unused = "its messages have at most " +
                           std::to_string(info->ep_attr->max_msg_size) + " bytes";
        else if (!search.devices.empty() &&
                 (!efa || search.devices.front()->provider() != offer.provider))
            offer.unused = search.devices.front()->describe() + " is used";
        if (offer.unused.empty()) {
            abi::Info* const copy = library->dupinfo(info);
            if (copy == nullptr) throw EngineError("libfabric: out of memory");
            search.devices.push_back(std::make_shared<FabricDevice>(*library, copy));
        }
        search.offers.push_back(std::move(offer));
    }
    if (search.devices.empty()) {
        std::string providers;
        for (const FabricOffer& offer : search.offers)
            if (providers.find(offer.provider) == std::string::npos)
                providers += (providers.empty() ? "" : ", ") + offer.provider;
        search.trouble = "libfabric " + search.version + " has no EFA device here (found " +
                         providers + "; " + instead + ")";
    }
    return search;
}

bool has_efa(const std::string& sysfs) {
    std::error_code none;
    for (const auto& entry :
         std::filesystem::directory_iterator(sysfs + "/class/infiniband", none)) {
        const auto driver = std::filesystem::read_symlink(entry.path() / "device/driver", none);
        if (!none && driver.filename() == "efa") return true;
    }
    return false;
}

std::string FabricDevice::trouble() const {
    if (kept_ < kMostKept && lost_ < kMostLost) return {};
    return "libfabric " + describe() + ": its provider could not close " +
           std::to_string(kept_ + lost_) + " endpoints, so this process makes no more of them";
}

FabricEndpoint::FabricEndpoint(std::shared_ptr<FabricDevice> device, uint32_t sends,
                               uint32_t receives, size_t block_bytes, Wake wake)
    : device_(usable(std::move(device))),
      sends_(sends),
      receives_(receives),
      block_bytes_(block_bytes),
      memory_(Memory::anonymous(block_bytes * (sends + receives))),
      operations_(sends + receives) {
    for (uint32_t i = 0; i < operations_.size(); ++i) {
        operations_[i].sends = i < sends;
        operations_[i].block = i < sends ? i : i - sends;
    }
    try {
        open(wake);
    } catch (...) {
        close();
        throw;
    }
}

FabricEndpoint::~FabricEndpoint() {
    close();
}

void FabricEndpoint::check(int result, const char* what) const {
    if (result != 0)
        throw EngineError("libfabric " + device_->describe() + ": " + what + ": " +
                          device_->library().strerror(-result));
}

void FabricEndpoint::open(Wake wake) {
    abi::Info* const info = device_->info();
    if (info->ep_attr->max_msg_size < block_bytes_)
        throw EngineError("libfabric " + device_->describe() + ": its messages have at most " +
                          std::to_string(info->ep_attr->max_msg_size) + " bytes, and a chunk has " +
                          std::to_string(block_bytes_) + ": use smaller chunk_bytes");
    check(device_->library().fabric(info->fabric_attr, &fabric_, nullptr), "no fabric");
    check(fabric_->ops->domain(fabric_, info, &domain_, nullptr), "no domain");
    if ((info->domain_attr->mr_mode & abi::kMrLocal) != 0) {
        check(domain_->mr->reg(&domain_->fid, memory_->data(), memory_->size(),
                               abi::kSend | abi::kReceive, 0, 0, 0, &registered_, nullptr),
              "its memory cannot be registered (is locked memory limited?)");
        memory_descriptor_ = registered_->descriptor;
    }
    abi::AvAttr addresses{};
    addresses.type = abi::kAvTable;
    addresses.count = 1;
    check(domain_->ops->av_open(domain_, &addresses, &av_, nullptr), "no address vector");
    abi::CqAttr completions{};
    completions.size = 2 * operations_.size();
    completions.format = abi::kCqMessages;
    if (wake == Wake::descriptor) {
        completions.wait_obj = abi::kWaitDescriptor;
        // Not every provider can wake somebody; what these do is found by polling.
        if (domain_->ops->cq_open(domain_, &completions, &cq_, nullptr) != 0) cq_ = nullptr;
    }
    if (cq_ == nullptr) {
        completions.wait_obj = abi::kWaitNone;
        check(domain_->ops->cq_open(domain_, &completions, &cq_, nullptr), "no completion queue");
    }
    check(domain_->ops->endpoint(domain_, info, &ep_, nullptr), "no endpoint");
    const auto bind = [this](abi::Fid& to, uint64_t flags) {
        check(ep_->fid.ops->bind(&ep_->fid, &to, flags), "its endpoint cannot be bound");
    };
    bind(av_->fid, 0);
    bind(cq_->fid, abi::kTransmit | abi::kReceive);
    check(ep_->fid.ops->control(&ep_->fid, abi::kEnable, nullptr), "its endpoint is not enabled");
    if (completions.wait_obj == abi::kWaitDescriptor)
        check(cq_->fid.ops->control(&cq_->fid, abi::kGetWait, &descriptor_), "no descriptor");
    address_.resize(kMaxAddress);
    size_t bytes = address_.size();
    check(ep_->cm->getname(&ep_->fid, address_.data(), &bytes), "its endpoint has no address");
    address_.resize(bytes);
}

// Nothing that this end still has to answer may be left when the endpoint is closed: ofi_rxm (1.17)
// answers from its list of completions after it has freed the connection. Without receives it
// begins no answer, and what has begun is over after a few looks, since the peer sends no more than
// a window without being told that it was taken.
void FabricEndpoint::settle() {
    for (Operation& op : operations_)
        if (op.under_way && !op.sends) (void)ep_->ops->cancel(&ep_->fid, &op.context);
    abi::CqEntry entry;
    abi::CqError error{};
    for (size_t i = 0; i < 8 * operations_.size(); ++i)
        if (cq_->ops->read(cq_, &entry, 1) == -abi::kErrorAvailable)
            (void)cq_->ops->readerr(cq_, &error, 0);
}

// What depends on another thing goes first. What cannot be closed keeps everything below it.
void FabricEndpoint::close() {
    bool gone = true;
    if (!address_.empty()) settle();  // it was enabled
    const auto shut = [&gone](auto*& object) {
        if (object == nullptr || !gone) return;
        gone = object->fid.ops->close(&object->fid) == 0;
        if (gone) object = nullptr;
    };
    shut(ep_);
    shut(cq_);
    shut(av_);
    shut(registered_);
    shut(domain_);
    shut(fabric_);
    // A domain that stays, as ofi_rxm's (1.17) does after messages that were broken off, is lost,
    // but it writes nowhere.
    const bool keeps = ep_ != nullptr || registered_ != nullptr;
    if (!gone) device_->lost(keeps);
    if (!keeps) return;
    // For ever: the provider may still write there.
    static std::mutex mu;
    static auto* const kept =
        new std::vector<std::pair<std::shared_ptr<Memory>, std::vector<Operation>>>;
    const std::lock_guard lock(mu);
    kept->emplace_back(std::move(memory_), std::move(operations_));
}

// libfabric is not told how long it is, and a provider reads a whole address of its kind, or as far
// as the zero that ends a text: the peer, which chose the length, must not choose what is read
// behind it.
void FabricEndpoint::connect(const std::vector<uint8_t>& address) {
    std::array<uint8_t, kMaxAddress + 1> padded{};
    if (address.size() >= padded.size())
        throw EngineError("libfabric " + device_->describe() + ": the peer's address has " +
                          std::to_string(address.size()) + " bytes, at most " +
                          std::to_string(kMaxAddress) + " are expected");
    std::copy(address.begin(), address.end(), padded.begin());
    if (av_->ops->insert(av_, padded.data(), 1, &peer_, 0, nullptr) != 1)
        throw EngineError("libfabric " + device_->describe() +
                          ": the peer's address is none of this provider's");
}

bool FabricEndpoint::may_sleep() {
    if (descriptor_ < 0) return true;
    abi::Fid* fid = &cq_->fid;
    return fabric_->ops->trywait(fabric_, &fid, 1) == 0;
}

bool FabricEndpoint::send(uint32_t block, size_t bytes) {
    const ssize_t result = ep_->msg->send(ep_, send_block(block), bytes, memory_descriptor_, peer_,
                                          &operations_[block].context);
    if (result == -abi::kAgain) return false;
    check(static_cast<int>(result), "sending");
    operations_[block].under_way = true;
    return true;
}

bool FabricEndpoint::receive(uint32_t block) {
    const ssize_t result =
        ep_->msg->recv(ep_, receive_block(block), block_bytes_, memory_descriptor_,
                       abi::kAddressUnspecified, &operations_[sends_ + block].context);
    if (result == -abi::kAgain) return false;
    check(static_cast<int>(result), "receiving");
    operations_[sends_ + block].under_way = true;
    return true;
}

std::vector<FabricEndpoint::Done> FabricEndpoint::poll(size_t most) {
    std::vector<abi::CqEntry> entries(most);
    std::vector<Done> out;
    while (out.size() < most) {
        const ssize_t n = cq_->ops->read(cq_, entries.data(), most - out.size());
        if (n == -abi::kAgain) break;
        if (n == -abi::kErrorAvailable) {
            if (const auto damaged = failed()) out.push_back(*damaged);
            continue;
        }
        if (n < 0) check(static_cast<int>(n), "its completion queue cannot be read");
        for (ssize_t i = 0; i < n; ++i)
            out.push_back(done(entries[size_t(i)].context, entries[size_t(i)].bytes, false));
    }
    return out;
}

FabricEndpoint::Done FabricEndpoint::done(void* context, size_t bytes, bool damaged) {
    auto* op = static_cast<Operation*>(context);
    op->under_way = false;
    return {op->sends, op->block, bytes, damaged};
}

// An operation that failed. A message that is too long for its block is a stranger's, and no end.
std::optional<FabricEndpoint::Done> FabricEndpoint::failed() {
    abi::CqError error{};
    const ssize_t n = cq_->ops->readerr(cq_, &error, 0);
    if (n == -abi::kAgain) return std::nullopt;
    if (n < 0) check(static_cast<int>(n), "its completion queue cannot be read");
    const auto* op = static_cast<const Operation*>(error.context);
    if (op != nullptr && !op->sends && error.err == abi::kTruncated)
        return done(error.context, 0, true);
    char text[200] = {};
    const char* detail =
        cq_->ops->strerror(cq_, error.prov_errno, error.err_data, text, sizeof text);
    throw EngineError(
        "libfabric " + device_->describe() + ": " +
        (op == nullptr ? "an operation"
         : op->sends   ? "sending"
                       : "receiving") +
        " failed: " + device_->library().strerror(error.err) +
        (detail != nullptr && *detail != '\0' ? " (" + std::string(detail) + ")" : ""));
}

}  // namespace pipemorph
