// Which ports become rails, on devices and a sysfs of our own in place of libibverbs.
#include <cerrno>

#include "check.hpp"
#include "fake_verbs.hpp"
#include "tree.hpp"
#include "verbs/rail.hpp"

using namespace pipemorph;

namespace {

// A host with two ports of one device, two devices of one card, and two that are on no bus.
struct Host {
    Tree sys;
    fake::Fabric fabric;
    std::map<std::string, fake::Device*> devices;
    std::string last_error;

    Host() {
        add("rxe1", {true}).put("class/infiniband/rxe1/parent", "lo");
        add("mlx5_2", {false, true}).link("class/infiniband/mlx5_2/device", bus + "0000:5e:00.0");
        add("mlx5_1", {true}).link("class/infiniband/mlx5_1/device", bus + "0000:3b:00.1");
        add("mlx5_0", {true, true}).link("class/infiniband/mlx5_0/device", bus + "0000:3b:00.0");
        add("rxe0", {true}).put("class/infiniband/rxe0/parent", "lo");
    }

    Tree& add(const char* name, std::vector<bool> ports) {
        devices[name] = &fabric.add(name, std::move(ports));
        return sys;
    }

    std::vector<std::string> rails(std::vector<std::string> wanted = {}) {
        RailOptions options;
        options.devices = std::move(wanted);
        last_error.clear();
        std::vector<std::string> out;
        for (const auto& rail : Rail::open_all(fabric.verbs(), options, last_error, sys.root))
            out.push_back(rail->describe());
        CHECK(fabric.open_objects() == 0);
        return out;
    }

    bool said(const std::string& what) const { return last_error.find(what) != std::string::npos; }

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
    CHECK(host.said("mlx5_0 port 2 is not used: another port of card 0000:3b:00 is"));
    CHECK(host.said("mlx5_1 port 1 is not used: another port of card 0000:3b:00 is"));
    CHECK(host.said("mlx5_2 port 1 is not active"));
    CHECK(!host.said("rxe"));
}

TEST(rails_of_a_card_are_had_from_the_port_that_works) {
    Host host;
    host.devices["mlx5_0"]->registers = false;
    CHECK((host.rails() == Names{"mlx5_1 port 1", "mlx5_2 port 2", "rxe0 port 1", "rxe1 port 1"}));
    CHECK(host.said("with mlx5_0 failed: Cannot allocate memory; the memlock limit is "));
    CHECK(!host.said("is not used"));
}

TEST(rails_that_are_named_may_be_of_one_card) {
    Host host;
    CHECK((host.rails({"mlx5_1", "mlx5_0:2"}) == Names{"mlx5_1 port 1", "mlx5_0 port 2"}));
    CHECK(host.last_error.empty());
    CHECK((host.rails({"mlx5_9", "rxe0"}) == Names{"rxe0 port 1"}));
    CHECK(host.last_error == "there is no RDMA device mlx5_9");
}

// Two readers of one context would take each other's events.
TEST(rails_of_one_device_hear_each_of_its_own_queue_pairs) {
    fake::Fabric fabric;
    fabric.add("soft0", {true, true});
    std::string last_error;
    const auto rails = Rail::open_all(fabric.verbs(), {}, last_error, "/nowhere");
    CHECK(rails.size() == 2 && last_error.empty());
    CHECK(rails[0]->device()->context != rails[1]->device()->context);
    for (const auto& rail : rails) rail->stop();
}

// Such a device would never carry anything, and every link would wait for it.
TEST(rails_need_reliable_connections) {
    Host host;
    host.devices["mlx5_2"]->device.transport_type = abi::kTransportIwarp;
    host.fabric.intercept([](const fake::Call& call) {
        return call.name == "create_qp" && call.device == "rxe0" ? EOPNOTSUPP : 0;
    });
    CHECK((host.rails({"mlx5_2:2", "rxe0", "rxe1"}) == Names{"rxe1 port 1"}));
    CHECK(
        host.said("mlx5_2 has no reliable connections as rails need them: it is an iWARP device"));
    CHECK(
        host.said("rxe0 has no reliable connections as rails need them: Operation not supported"));
}
