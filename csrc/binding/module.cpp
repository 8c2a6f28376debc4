// Python module `pipemorph_trainer._engine`. Its contract is `_engine.pyi`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "binding/calls.hpp"
#include "binding/messages.hpp"
#include "crypto/library.hpp"
#include "engine/engine.hpp"
#include "os/clock.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace pipemorph {
namespace {

using KeyTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

// Interval at which blocking calls let Python handle signals.
constexpr int64_t kSlice = 100 * kMillisecond;

Key to_key(const KeyTuple& t) {
    const Key key{std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t)};
    if (key.direction != 0 && key.direction != 1)
        throw nb::value_error("direction must be 0 (forward) or 1 (backward)");
    return key;
}

KeyTuple to_tuple(const Key& k) {
    return {k.generation, k.iteration, k.microbatch, k.direction, k.tensor};
}

int64_t deadline_after(double timeout) {
    if (std::isnan(timeout)) throw nb::value_error("timeout must be a number");
    return steady_ns() + to_ns(std::max(timeout, 0.0));
}

nb::object lease(const PyLink& self, const KeyTuple& key, int64_t bytes) {
    Link& link = self.use();
    if (bytes < 0 || bytes > (int64_t{1} << 40))
        throw nb::value_error("nbytes must be between 0 and 2**40");
    const Key k = to_key(key);
    auto found = link.lease(static_cast<int>(k.direction), static_cast<uint64_t>(bytes));
    if (!found) return nb::none();
    return nb::cast(new PyLease(self, k, std::move(*found)), nb::rv_policy::take_ownership);
}

nb::object wrap(const PyLink& link, std::optional<Arrived> arrived) {
    if (!arrived) return nb::none();
    return nb::cast(new PyMessage(link, std::move(*arrived)), nb::rv_policy::take_ownership);
}

uint64_t post(const PyLink& self, const KeyTuple& key, Buffer buffer, const nb::bytes& note) {
    Link& link = self.use();
    MessageInfo info;
    info.key = to_key(key);
    info.note = checked(note);
    info.bytes = buffer.size();
    const uint8_t* data = buffer.data();
    return link.send(std::move(info), data, hold(self.release_queue, buffer.take()));
}

uint64_t send(const PyLink& self, const KeyTuple& key, nb::handle payload, const nb::bytes& note) {
    return post(self, key, Buffer(payload, PyBUF_SIMPLE), note);
}

uint64_t send_memory(const PyLink& self, const KeyTuple& key, uintptr_t address, size_t bytes,
                     nb::handle owner, const nb::bytes& note) {
    if (address == 0 && bytes > 0) throw nb::value_error("the payload has no memory: address is 0");
    return post(self, key, Buffer(owner, reinterpret_cast<void*>(address), bytes), note);
}

void wait_sent(const PyLink& self, uint64_t ticket, double timeout) {
    Link& link = self.use();
    const int64_t deadline = deadline_after(timeout);
    {
        const Calls::WithoutGil no_gil;
        while (!link.wait_sent(ticket, deadline, kSlice, timeout)) Calls::check_signals();
    }
    self.use();  // the payload is free now
}

nb::object receive(const PyLink& self, const KeyTuple& key, double timeout) {
    Link& link = self.use();
    const Key k = to_key(key);
    const int64_t deadline = deadline_after(timeout);
    std::optional<Arrived> arrived;
    {
        const Calls::WithoutGil no_gil;
        while (!(arrived = link.receive(k, deadline, kSlice, timeout))) Calls::check_signals();
    }
    return wrap(self, std::move(arrived));
}

nb::object try_receive(const PyLink& self, const KeyTuple& key) {
    Link& link = self.use();
    const Key k = to_key(key);
    return wrap(self, link.try_receive(k));
}

void reserve(const PyLink& self, int direction, int64_t slots, int64_t slot_bytes) {
    Link& link = self.use();
    if (direction != 0 && direction != 1)
        throw nb::value_error("direction must be 0 (forward) or 1 (backward)");
    if (slots < 0 || slots > 65536) throw nb::value_error("slots must be between 0 and 65536");
    if (slot_bytes < 1 || slot_bytes > (int64_t{1} << 40))
        throw nb::value_error("slot_bytes must be between 1 and 2**40");
    const Calls::WithoutGil no_gil;
    link.reserve(direction, static_cast<uint32_t>(slots), static_cast<uint64_t>(slot_bytes));
}

std::vector<std::tuple<uintptr_t, size_t>> places(
    const std::vector<std::shared_ptr<Memory>>& memories) {
    std::vector<std::tuple<uintptr_t, size_t>> out;
    for (const auto& memory : memories)
        out.emplace_back(reinterpret_cast<uintptr_t>(memory->data()), memory->size());
    return out;
}

Transport to_transport(const std::string& name) {
    if (name == "auto") return Transport::any;
    if (name == "tcp") return Transport::tcp;
    if (name == "shm") return Transport::shm;
    if (name == "rdma") return Transport::rdma;
    throw nb::value_error(("transport must be auto, tcp, shm or rdma, not '" + name + "'").c_str());
}

uint32_t bounded(int64_t value, const char* name, int64_t least, int64_t most) {
    if (value < least || value > most)
        throw nb::value_error((std::string(name) + " must be between " + std::to_string(least) +
                               " and " + std::to_string(most) + ", not " + std::to_string(value))
                                  .c_str());
    return static_cast<uint32_t>(value);
}

uint32_t to_rank(int64_t value, const char* name) {
    return bounded(value, name, 0, std::numeric_limits<int32_t>::max());
}

Integrity to_integrity(const std::string& name) {
    for (const Integrity each : {Integrity::crc, Integrity::mac, Integrity::aead})
        if (name == name_of(each)) return each;
    throw nb::value_error(("integrity must be crc, mac or aead, not '" + name + "'").c_str());
}

class PyEngine {
  public:
    PyEngine(std::string job, int64_t rank, const nb::bytes& secret, std::string host, int64_t port,
             int64_t queues, int64_t sockets, int64_t chunk_bytes, const std::string& transport,
             double peer_deadline, const std::optional<std::string>& require,
             std::vector<std::string> rdma_devices, int64_t gid_index, int64_t traffic_class,
             int64_t service_level, int64_t numa_node, const std::string& integrity,
             int64_t queue_pairs, int64_t flight_bytes)
        : release_queue_(std::make_shared<ReleaseQueue>()) {
        Config c;
        c.job = std::move(job);
        c.rank = to_rank(rank, "rank");
        c.secret.assign(secret.c_str(), secret.c_str() + secret.size());
        c.host = std::move(host);
        c.port = static_cast<uint16_t>(bounded(port, "port", 0, 65535));
        c.queues = bounded(queues, "queues", 1, 1024);
        c.sockets = bounded(sockets, "sockets", 1, 64);
        c.chunk_bytes = bounded(chunk_bytes, "chunk_bytes", 4096, 1 << 30);
        c.transport = to_transport(transport);
        c.integrity = to_integrity(integrity);
        c.peer_deadline = peer_deadline;
        if (require && *require != "rdma")
            throw nb::value_error(("require must be rdma or None, not '" + *require + "'").c_str());
        c.require_rdma = require.has_value();
        if (c.require_rdma && c.transport == Transport::any) c.transport = Transport::rdma;
        c.rdma.devices = std::move(rdma_devices);
        c.rdma.gid_index =
            gid_index < 0 ? -1 : static_cast<int>(bounded(gid_index, "gid_index", 0, 255));
        c.rdma.traffic_class =
            static_cast<uint8_t>(bounded(traffic_class, "traffic_class", 0, 255));
        c.rdma.service_level = static_cast<uint8_t>(bounded(service_level, "service_level", 0, 15));
        c.rdma.queue_pairs = bounded(queue_pairs, "queue_pairs", 1, kMaxRails);
        if (flight_bytes < 0) throw nb::value_error("flight_bytes must not be negative");
        c.flight_bytes = static_cast<uint64_t>(flight_bytes);
        c.numa_node =
            numa_node < 0 ? -1 : static_cast<int>(bounded(numa_node, "numa_node", 0, 1023));
        const Calls::WithoutGil no_gil;
        engine_ = std::make_unique<Engine>(std::move(c));
    }
    ~PyEngine() {
        if (release_queue_->inherited()) {
            static_cast<void>(engine_.release());  // its threads are not in this process
            return;
        }
        const Calls::WithoutGil no_gil(false);
        engine_.reset();
    }
    PyEngine(const PyEngine&) = delete;
    PyEngine& operator=(const PyEngine&) = delete;

    Engine& use() const {
        release_queue_->release_queued();
        return *engine_;
    }

    PyLink connect(int64_t peer_rank, int64_t link_id, const std::string& host, int64_t port,
                   double timeout) const {
        use();
        const uint32_t peer = to_rank(peer_rank, "peer_rank");
        const uint32_t link = to_rank(link_id, "link_id");
        const auto to_port = static_cast<uint16_t>(bounded(port, "port", 1, 65535));
        deadline_after(timeout);
        const Calls::WithoutGil no_gil;
        return {engine_->connect(peer, link, host, to_port, timeout, Calls::check_signals),
                release_queue_};
    }

    PyLink accept(int64_t peer_rank, int64_t link_id, double timeout) const {
        use();
        const uint32_t peer = to_rank(peer_rank, "peer_rank");
        const uint32_t link = to_rank(link_id, "link_id");
        deadline_after(timeout);
        const Calls::WithoutGil no_gil;
        return {engine_->accept(peer, link, timeout, Calls::check_signals), release_queue_};
    }

    void close(double timeout) const {
        if (release_queue_->inherited()) return;
        deadline_after(timeout);
        {
            const Calls::WithoutGil no_gil;
            engine_->close(timeout, Calls::must_return);
        }
        release_queue_->release_all();
    }

  private:
    std::shared_ptr<ReleaseQueue> release_queue_;
    std::unique_ptr<Engine> engine_;
};

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "Binding of the C++ transfer engine";
    nb::set_leak_warnings(false);

    nb::exception<EngineError> engine_error(m, "EngineError", PyExc_RuntimeError);
    nb::exception<EngineTimeout>(m, "EngineTimeout", engine_error.ptr());

    // Copying or registering memory may take long.
    Calls::register_atexit(10 * kSecond);

    m.attr("version") = PIPEMORPH_VERSION;
    // The build of the images checks by it that OpenSSL is there.
    m.def("crypto_library", [] { return crypto().version; });

    nb::class_<SlotView>(m, "_SlotView", nb::type_slots(slot_view_slots));

    nb::class_<PyMessage>(m, "Message", nb::is_final(), nb::type_slots(message_slots),
                          nb::is_weak_referenceable())
        .def_prop_ro("key", [](const PyMessage& self) { return to_tuple(self.info().key); })
        .def_prop_ro("note",
                     [](const PyMessage& self) {
                         return nb::bytes(self.info().note.data(), self.info().note.size());
                     })
        .def_prop_ro("nbytes", [](const PyMessage& self) { return self.info().bytes; })
        .def_prop_ro("posted_at",
                     [](const PyMessage& self) { return to_seconds(self.info().posted_ns); })
        .def_prop_ro("started_at",
                     [](const PyMessage& self) { return to_seconds(self.info().started_ns); })
        .def_prop_ro("arrived_at",
                     [](const PyMessage& self) { return to_seconds(self.arrived_ns()); })
        .def("view", &PyMessage::view)
        .def("copy_into", &PyMessage::copy_into, "destination"_a)
        .def("move_to", &PyMessage::move_to, "address"_a, "nbytes"_a, "at_once"_a)
        .def("release", [](PyMessage& self) { self.release(); });

    nb::class_<PathStats>(m, "PathStats", nb::is_final())
        .def_ro("kind", &PathStats::kind)
        .def_ro("rail", &PathStats::rail)
        .def_ro("state", &PathStats::state)
        .def_ro("last_error", &PathStats::last_error)
        .def_ro("epoch", &PathStats::epoch)
        .def_ro("chunks", &PathStats::chunks)
        .def_ro("bytes", &PathStats::bytes)
        .def_ro("times_lost", &PathStats::times_lost)
        .def_ro("bytes_per_second", &PathStats::bytes_per_second)
        .def_ro("window", &PathStats::window)
        .def_ro("rtt_min", &PathStats::rtt_min)
        .def_ro("rtt_mean", &PathStats::rtt_mean)
        .def_ro("rtt_p99", &PathStats::rtt_p99);

    nb::class_<PyLease>(m, "Lease", nb::is_final(), nb::type_slots(lease_slots))
        .def_prop_ro("nbytes", &PyLease::bytes)
        .def("send", &PyLease::send, "note"_a = nb::bytes("", 0))
        .def("release", &PyLease::release);

    nb::class_<LinkStats>(m, "LinkStats", nb::is_final())
        .def_ro("state", &LinkStats::state)
        .def_ro("transport", &LinkStats::transport)
        .def_ro("paths", &LinkStats::paths)
        .def_ro("fallbacks", &LinkStats::fallbacks)
        .def_ro("failbacks", &LinkStats::failbacks)
        .def_ro("messages_sent", &LinkStats::messages_sent)
        .def_ro("messages_received", &LinkStats::messages_received)
        .def_ro("bytes_sent", &LinkStats::bytes_sent)
        .def_ro("bytes_received", &LinkStats::bytes_received)
        .def_ro("bytes_copied_out", &LinkStats::bytes_copied_out)
        .def_ro("bytes_copied_in", &LinkStats::bytes_copied_in)
        .def_ro("chunks_resent", &LinkStats::chunks_resent)
        .def_ro("duplicate_chunks", &LinkStats::duplicate_chunks)
        .def_ro("stale_chunks", &LinkStats::stale_chunks)
        .def_ro("reconnects", &LinkStats::reconnects)
        .def_ro("frames_refused", &LinkStats::frames_refused)
        .def_ro("last_error", &LinkStats::last_error)
        .def_ro("path_errors", &LinkStats::path_errors)
        .def_ro("rtt_min", &LinkStats::rtt_min)
        .def_ro("rtt_mean", &LinkStats::rtt_mean)
        .def_ro("rtt_p99", &LinkStats::rtt_p99)
        .def_ro("clock_offset", &LinkStats::clock_offset)
        .def_ro("sends_in_flight", &LinkStats::sends_in_flight)
        .def_ro("slots_granted", &LinkStats::slots_granted)
        .def_ro("slots_in_use", &LinkStats::slots_in_use);

    nb::class_<PyLink>(m, "Link", nb::is_final())
        .def_prop_ro("peer_rank",
                     [](const PyLink& self) { return self.link->identity().peer_rank; })
        .def_prop_ro("link_id", [](const PyLink& self) { return self.link->identity().link; })
        .def_prop_ro("transport",
                     [](const PyLink& self) { return name_of(self.use().transport()); })
        .def_prop_ro("alive", [](const PyLink& self) { return self.use().alive(); })
        .def_prop_ro("error",
                     [](const PyLink& self) -> std::optional<std::string> {
                         std::string error = self.use().error();
                         if (error.empty()) return std::nullopt;
                         return error;
                     })
        .def("reserve", &reserve, "direction"_a, "slots"_a, "slot_bytes"_a)
        .def("send", &send, "key"_a, "payload"_a, "note"_a = nb::bytes("", 0))
        .def("lease", &lease, "key"_a, "nbytes"_a)
        .def("send_memory", &send_memory, "key"_a, "address"_a, "nbytes"_a, "owner"_a, "note"_a)
        .def(
            "sent", [](const PyLink& self, uint64_t ticket) { return self.use().sent(ticket); },
            "ticket"_a)
        .def("wait_sent", &wait_sent, "ticket"_a, "timeout"_a)
        .def("try_receive", &try_receive, "key"_a)
        .def("receive", &receive, "key"_a, "timeout"_a)
        .def(
            "arrived",
            [](const PyLink& self, const KeyTuple& key) { return self.use().arrived(to_key(key)); },
            "key"_a)
        .def(
            "send_slots",
            [](const PyLink& self, int direction) {
                return self.use().send_slots(
                    static_cast<int>(bounded(direction, "direction", 0, 1)));
            },
            "direction"_a)
        .def("slot_memory", [](const PyLink& self) { return places(self.use().slot_memory()); })
        .def("lease_memory", [](const PyLink& self) { return places(self.use().lease_memory()); })
        .def("stats", [](const PyLink& self) { return self.use().stats(); })
        .def(
            "sever_data_path",
            [](const PyLink& self, uint32_t index) { self.use().sever_data_path(index); },
            "index"_a = 0)
        .def("sever_control", [](const PyLink& self) { self.use().sever_control(); })
        .def("close", [](const PyLink& self) {
            if (self.release_queue->inherited()) return;
            Link& link = self.use();
            {
                const Calls::WithoutGil no_gil;
                link.close(steady_ns() + 5 * kSecond, Calls::must_return);
            }
            self.use();
        });

    nb::class_<PyEngine>(m, "Engine", nb::is_final())
        .def(nb::init<std::string, int64_t, const nb::bytes&, std::string, int64_t, int64_t,
                      int64_t, int64_t, const std::string&, double,
                      const std::optional<std::string>&, std::vector<std::string>, int64_t, int64_t,
                      int64_t, int64_t, const std::string&, int64_t, int64_t>(),
             nb::kw_only(), "job"_a, "rank"_a, "secret"_a, "host"_a = "0.0.0.0", "port"_a = 0,
             "queues"_a = 8, "sockets"_a = 4, "chunk_bytes"_a = 1 << 20, "transport"_a = "auto",
             "peer_deadline"_a = 10.0, "require"_a = nb::none(),
             "rdma_devices"_a = std::vector<std::string>(), "gid_index"_a = -1,
             "traffic_class"_a = 0, "service_level"_a = 0, "numa_node"_a = -1,
             "integrity"_a = "crc", "queue_pairs"_a = 1,
             "flight_bytes"_a = static_cast<int64_t>(Config().flight_bytes))
        .def_prop_ro("rails", [](const PyEngine& self) { return self.use().rails(); })
        .def_prop_ro("rails_error",
                     [](const PyEngine& self) -> std::optional<std::string> {
                         std::string last_error = self.use().rails_error();
                         if (last_error.empty()) return std::nullopt;
                         return last_error;
                     })
        .def_prop_ro("memory_node",
                     [](const PyEngine& self) -> std::optional<int> {
                         const int node = self.use().memory_node();
                         if (node < 0) return std::nullopt;
                         return node;
                     })
        .def_prop_ro("port", [](const PyEngine& self) { return self.use().port(); })
        .def_prop_ro("notifier_fd", [](const PyEngine& self) { return self.use().notifier(); })
        .def("connect", &PyEngine::connect, nb::kw_only(), "peer_rank"_a, "link_id"_a, "host"_a,
             "port"_a, "timeout"_a, nb::keep_alive<0, 1>())
        .def("accept", &PyEngine::accept, nb::kw_only(), "peer_rank"_a, "link_id"_a, "timeout"_a,
             nb::keep_alive<0, 1>())
        .def("refused", [](const PyEngine& self) { return self.use().refused(); })
        .def("close", &PyEngine::close, "timeout"_a = 5.0);
}

}  // namespace pipemorph
