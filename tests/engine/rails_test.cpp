// Which ports become rails, on devices and a sysfs of our own in place of libibverbs.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <list>

#include "check.hpp"
#include "tree.hpp"
#include "verbs/rail.hpp"

using namespace pipemorph;

namespace {

struct FakeDevice {
    abi::Device device{};
    std::vector<bool> ports;  // whether each is active
    bool registers = true;
};

std::list<FakeDevice> devices;
std::vector<abi::Device*> listed;
int open_objects = 0;  // contexts, protection domains and regions that are not given back

const FakeDevice& described(const abi::Context* context) {
    for (const FakeDevice& d : devices)
        if (&d.device == context->device) return d;
    check::fail(__FILE__, __LINE__, "no such device");
}

Verbs fake_verbs() {
    Verbs v{};
    v.get_device_list = [](int* count) {
        *count = static_cast<int>(listed.size());
        return listed.data();
    };
    v.free_device_list = [](abi::Device**) {};
    v.open_device = [](abi::Device* device) {
        auto* context = new abi::Context{};
        context->device = device;
        context->async_fd = ::eventfd(0, EFD_CLOEXEC);  // no event ever comes
        ++open_objects;
        return context;
    };
    v.close_device = [](abi::Context* context) {
        ::close(context->async_fd);
        delete context;
        --open_objects;
        return 0;
    };
    v.alloc_pd = [](abi::Context* context) {
        ++open_objects;
        return reinterpret_cast<abi::Pd*>(context);
    };
    v.dealloc_pd = [](abi::Pd*) {
        --open_objects;
        return 0;
    };
    v.query_port = [](abi::Context* context, uint8_t port, abi::PortAttr* out) {
        const FakeDevice& device = described(context);
        if (port < 1 || port > device.ports.size()) return EINVAL;
        out->state = device.ports[port - 1] ? abi::kPortActive : abi::kPortDown;
        return 0;
    };
    v.reg_mr = [](abi::Pd* pd, void*, size_t, int) -> abi::Mr* {
        errno = ENOMEM;
        if (!described(reinterpret_cast<const abi::Context*>(pd)).registers) return nullptr;
        ++open_objects;
        return new abi::Mr{};
    };
    v.dereg_mr = [](abi::Mr* mr) {
        delete mr;
        --open_objects;
        return 0;
    };
    return v;
}

// A host with two ports of one device, two devices of one card, and two that are on no bus.
struct Host {
    Tree sys;
    const Verbs verbs = fake_verbs();
    std::string trouble;

    Host() {
        devices.clear();
        listed.clear();
        add("rxe1", {true}).put("class/infiniband/rxe1/parent", "lo");
        add("mlx5_2", {false, true}).link("class/infiniband/mlx5_2/device", bus + "0000:5e:00.0");
        add("mlx5_1", {true}).link("class/infiniband/mlx5_1/device", bus + "0000:3b:00.1");
        add("mlx5_0", {true, true}).link("class/infiniband/mlx5_0/device", bus + "0000:3b:00.0");
        add("rxe0", {true}).put("class/infiniband/rxe0/parent", "lo");
    }
    ~Host() {
        devices.clear();
        listed.clear();
    }

    Tree& add(const char* name, std::vector<bool> ports) {
        devices.push_back({{}, std::move(ports), true});
        std::strcpy(devices.back().device.name, name);
        listed.push_back(&devices.back().device);
        return sys;
    }

    std::vector<std::string> rails(std::vector<std::string> wanted = {}) {
        RailOptions options;
        options.devices = std::move(wanted);
        trouble.clear();
        std::vector<std::string> out;
        for (const auto& rail : Rail::open_all(verbs, options, trouble, sys.root))
            out.push_back(rail->describe());
        CHECK(open_objects == 0);
        return out;
    }

    bool said(const std::string& what) const { return trouble.find(what) != std::string::npos; }

    static inline const std::string bus = "devices/pci0000:3a/0000:3a:02.0/";
};

using Names = std::vector<std::string>;

}  // namespace

TEST(rail_cards_are_pci_devices) {
    const Host host;
    const auto card = [&](const char* device) { return card_of(device, host.sys.root); };
    CHECK(card("mlx5_0") == "0000:3b:00" && card("mlx5_1") == "0000:3b:00");
    CHECK(card("mlx5_2") == "0000:5e:00");
    CHECK(card("rxe0").empty() && card("mlx5_9").empty());
    // A software device is of the card whose interface it is on.
    host.sys.link("class/net/eth1/device", "devices/pci0000:00/0000:00:05.0/virtio1");
    host.sys.put("class/infiniband/rxe2/parent", "eth1");
    CHECK(card("rxe2") == "0000:00:05");
}

TEST(rails_are_one_active_port_of_every_card) {
    Host host;
    CHECK((host.rails() == Names{"mlx5_0 port 1", "mlx5_2 port 2", "rxe0 port 1", "rxe1 port 1"}));
    CHECK(host.said("mlx5_0 port 2 is left out: another port of card 0000:3b:00 is used"));
    CHECK(host.said("mlx5_1 port 1 is left out: another port of card 0000:3b:00 is used"));
    CHECK(host.said("mlx5_2 port 1 is not active"));
    CHECK(!host.said("rxe"));
}

TEST(rails_of_a_card_are_had_from_the_port_that_works) {
    Host host;
    for (FakeDevice& d : devices) d.registers = std::strcmp(d.device.name, "mlx5_0") != 0;
    CHECK((host.rails() == Names{"mlx5_1 port 1", "mlx5_2 port 2", "rxe0 port 1", "rxe1 port 1"}));
    CHECK(host.said("with mlx5_0 failed: Cannot allocate memory; the memlock limit is "));
    CHECK(!host.said("left out"));
}

TEST(rails_that_are_named_may_be_of_one_card) {
    Host host;
    CHECK((host.rails({"mlx5_1", "mlx5_0:2"}) == Names{"mlx5_1 port 1", "mlx5_0 port 2"}));
    CHECK(host.trouble.empty());
    CHECK((host.rails({"mlx5_9", "rxe0"}) == Names{"rxe0 port 1"}));
    CHECK(host.trouble == "there is no RDMA device mlx5_9");
}
