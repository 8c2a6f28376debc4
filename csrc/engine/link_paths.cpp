#include "engine/link_paths.hpp"

#include <algorithm>
#include <set>

#include "base/text.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/numa.hpp"
#include "os/socket.hpp"
#include "path/shm_path.hpp"
#include "path/tcp_path.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kRetireAgain = 20 * kMillisecond;

}  // namespace

LinkPaths::LinkPaths(Link& link)
    : link_(link),
      mu_(link.mu_),
      core_(link.core_),
      runtime_(*link.runtime_),
      lease_pool_(std::make_shared<LeasePool>(runtime_.config.flight_bytes)) {}

std::shared_ptr<PathHost> LinkPaths::host() {
    return {link_.shared_from_this(), this};
}

void LinkPaths::assign() {
    // With shared memory a path is a copying thread, not a socket.
    const bool shm = link_.terms_.transport == Transport::shm;
    const size_t others = shm ? std::min<size_t>(link_.terms_.sockets, runtime_.data_threads())
                              : link_.terms_.sockets;
    core_.assign_paths(link_.terms_.transport == Transport::rdma ? link_.terms_.rails
                                                                 : decltype(link_.terms_.rails){},
                       shm ? Transport::shm : Transport::tcp, others);
    connections_by_path_ = std::vector<PathConnections>(core_.paths().size());
}

void LinkPaths::protocol_error(const std::string& why) {
    link_.die(link_.describe() + " is dead: rank " + std::to_string(link_.identity_.peer_rank) +
              " broke the protocol: " + why);
}

std::optional<LinkPaths::Lease> LinkPaths::lease(int direction, uint64_t bytes) {
    const Lock lock(mu_);
    if (link_.ended()) link_.throw_over();
    if (bytes == 0) return std::nullopt;
    if (link_.terms_.transport == Transport::rdma) {
        if (auto piece = lease_pool_->take(bytes))
            return Lease{piece->data, bytes, std::move(piece->hold), std::nullopt};
        if (const uint64_t more = lease_pool_->to_add(bytes))
            setup_reactor().post(
                [this, self = link_.shared_from_this(), more] { grow_leases(more); });
        return std::nullopt;
    }
    // An authenticated payload must be in private memory: a slot could be changed by its receiver,
    // and a resent chunk would get a valid MAC for the changed payload.
    if (link_.terms_.transport != Transport::shm || runtime_.config.integrity != Integrity::crc)
        return std::nullopt;
    const auto slot = core_.lease(direction, bytes);
    if (!slot) return std::nullopt;
    const auto segment = peer_segments_.find(slot->segment);
    const uint64_t size = segment != peer_segments_.end() ? segment->second->size() : 0;
    if (slot->offset < size && slot->bytes <= size - slot->offset)
        return Lease{segment->second->data() + slot->offset, bytes, segment->second, slot};
    // A send into the slot reports the peer's violation.
    link_.or_die([&] {
        core_.end_lease(*slot);
        link_.run_actions();
    });
    return std::nullopt;
}

void LinkPaths::end_lease(const Lease& lease) {
    const Lock lock(mu_);
    if (!lease.slot || link_.over()) return;
    link_.or_die([&] {
        core_.end_lease(*lease.slot);
        link_.run_actions();
    });
}

// Adds memory for leases. Until then, messages are sent without it.
void LinkPaths::grow_leases(uint64_t bytes) {
    std::shared_ptr<Memory> memory;
    std::vector<std::shared_ptr<Registration>> registered;
    try {
        const numa::OnNode here(runtime_.memory_node);
        auto made = Memory::anonymous(bytes);
        for (const auto& rail : runtime_.rails) {
            try {
                registered.push_back(
                    std::make_shared<Registration>(rail->device(), made, abi::kLocalWrite));
            } catch (const EngineError&) {  // this rail's paths stage such payloads
            }
        }
        if (!registered.empty()) memory = std::move(made);
    } catch (const std::exception&) {  // no memory
    }
    lease_pool_->add(std::move(memory), std::move(registered));
}

std::vector<std::shared_ptr<Memory>> LinkPaths::lease_memory() const {
    std::vector<std::shared_ptr<Memory>> out = lease_pool_->memory();
    const Lock lock(mu_);
    for (const auto& [_, memory] : peer_segments_) out.push_back(memory);
    return out;
}

Reactor& LinkPaths::setup_reactor() {
    return runtime_.rails.empty() ? runtime_.control : runtime_.rails.front()->setup();
}

void LinkPaths::start_to_grow(const Actions::Grow& what) {
    setup_reactor().post([this, self = link_.shared_from_this(), what] { grow(what); });
}

void LinkPaths::grow(const Actions::Grow& what) {
    bool there = false;
    try {
        there = make_room(what.direction, what.room, false);
    } catch (const std::exception&) {  // no memory, or the link has ended: fewer slots suffice
    }
    const Lock lock(mu_);
    core_.grown(what.direction, there);
}

bool LinkPaths::make_room(int direction, const Inbox::Room& room, bool needed) {
    const Transport carries = link_.transport();
    const bool shared = carries == Transport::shm;
    const bool rdma = carries == Transport::rdma;
    // Slots are page-aligned: two never share a page, and so their copies do not either.
    const uint64_t bytes = (room.bytes + 4095) / 4096 * 4096 * room.slots;
    const numa::OnNode here(runtime_.memory_node);
    // Prefaulting is slow, so it runs without the lock.
    auto memory = shared ? Memory::shareable(bytes) : Memory::anonymous(bytes);
    // Registering is slow, too: it is done once per rail, for the lifetime of the link.
    std::vector<std::shared_ptr<Registration>> registered(rdma ? runtime_.rails.size() : 0);
    std::vector<std::string> error(registered.size());
    for (size_t rail = 0; rail < registered.size(); ++rail) {
        try {
            registered[rail] = std::make_shared<Registration>(
                runtime_.rails[rail]->device(), memory, abi::kLocalWrite | abi::kRemoteWrite);
        } catch (const EngineError& e) {
            if (!needed) return false;
            error[rail] = e.what();
        }
    }
    const Lock lock(mu_);
    if (link_.ended()) link_.throw_over();
    // An ending link grants nothing; the application gets the error at its end.
    if (link_.over()) return false;
    const bool all_unregistered =
        std::all_of(registered.begin(), registered.end(), [](const auto& r) { return !r; });
    if (rdma && all_unregistered && core_.paths().size() == core_.paths().rails())
        throw EngineError(link_.describe() + ": rdma is required, and " + error.front());
    const uint32_t segment = core_.add_room(direction, room, std::move(memory), shared);
    const int64_t now = steady_ns();
    for (uint32_t number = 0; rdma && number < runtime_.rail_numbers(); ++number) {
        const size_t rail = number % registered.size();
        if (!registered[rail]) {
            core_.add_region({number, segment, 0, 0, 0}, error[rail], now);
            continue;
        }
        const Registration& r = *registered[rail];
        core_.add_region(
            {number, segment, reinterpret_cast<uint64_t>(r.data()), r.size(), r.rkey()}, {}, now);
    }
    for (auto& r : registered)
        if (r) registrations_.push_back(std::move(r));
    if (!shared) core_.grant_room(segment);
    link_.run_actions();
    return true;
}

void LinkPaths::start_to_drop_memory() {
    setup_reactor().post([this, self = link_.shared_from_this()] { drop_memory(); });
}

void LinkPaths::drop_memory() {
    Inbox inbox;
    decltype(registrations_) registrations;
    decltype(peer_segments_) peer_segments;
    {
        const Lock lock(mu_);
        inbox = core_.drop_inbox();
        registrations.swap(registrations_);
        peer_segments.swap(peer_segments_);
    }
    // Another holder may have a lease, which returns to the pool.
    if (lease_pool_.use_count() == 1) lease_pool_->drop();
}

void LinkPaths::sever(uint32_t index) {
    const Lock lock(mu_);
    if (link_.ended()) link_.throw_over();
    if (index >= connections_by_path_.size())
        throw EngineError(link_.describe() + " has " + std::to_string(connections_by_path_.size()) +
                          " data paths, not " + std::to_string(index + 1));
    if (const auto path = current(index)) path->sever();
}

std::string LinkPaths::may_attach(uint32_t path, uint32_t epoch) const {
    const Lock lock(mu_);
    if (link_.over()) return link_.error_;
    // The dialler's confirmation may still change the transport, and with it the paths.
    if (link_.state_ == Link::State::connecting) return link_.describe() + " is not confirmed yet";
    const PathSet& paths = core_.paths();
    if (path >= paths.size()) return link_.describe() + " has no data path " + std::to_string(path);
    if (paths[path].kind == Transport::rdma)
        return link_.describe() + ": data path " + std::to_string(path) + " is a rail";
    if (epoch <= paths[path].machine.epoch())
        return link_.describe() + ": data path " + std::to_string(path) + " is past epoch " +
               std::to_string(epoch);
    return {};
}

void LinkPaths::attach(uint32_t path, uint32_t epoch, Fd fd, const ConnectionKeys& keys) {
    link_.or_die_without_lock([&] {
        std::shared_ptr<DataPath> now;
        {
            const Lock lock(mu_);
            if (link_.over()) return;
            const Transport kind = core_.paths()[path].kind;
            std::optional<uint32_t> local_thread;
            if (kind == Transport::tcp && is_local(fd))
                local_thread = path % static_cast<uint32_t>(runtime_.data_threads());
            try {
                now = make_path(path, epoch, std::move(fd), keys);
            } catch (const std::exception& e) {  // a later one may succeed
                core_.dial_failed(path, epoch, e.what(), steady_ns());
                return;
            }
            if (!core_.attach(path, epoch, local_thread, steady_ns())) return;
            connections_by_path_[path].connections.push_back(now);
            link_.run_actions();
        }
        now->start();
    });
}

std::shared_ptr<DataPath> LinkPaths::make_path(uint32_t path, uint32_t epoch, Fd fd,
                                               const ConnectionKeys& keys) {
    const Transport kind = core_.paths()[path].kind;
    Reactor& reactor = runtime_.data(path);
    if (kind == Transport::shm)
        return std::make_shared<ShmPath>(reactor, host(), path, epoch, std::move(fd), keys,
                                         runtime_.config.integrity);
    set_unacked_limit(fd, runtime_.peer_deadline_ns / 2);
    return std::make_shared<TcpPath>(reactor, host(), path, epoch, std::move(fd), keys,
                                     runtime_.config.integrity);
}

void LinkPaths::notify() {
    for (const auto& path : live()) path->notify();
}

std::vector<std::shared_ptr<DataPath>> LinkPaths::live() const {
    std::vector<std::shared_ptr<DataPath>> live;
    live.reserve(connections_by_path_.size());
    for (uint32_t i = 0; i < connections_by_path_.size(); ++i)
        if (!core_.paths().is_standby(i))
            if (auto path = current(i)) live.push_back(std::move(path));
    return live;
}

std::shared_ptr<DataPath> LinkPaths::current(uint32_t index) const {
    for (const auto& path : connections_by_path_[index].connections)
        if (core_.paths().is_current(index, path->epoch)) return path;
    return nullptr;
}

std::shared_ptr<DataPath> LinkPaths::first_live() const {
    for (uint32_t i = 0; i < connections_by_path_.size(); ++i)
        if (!core_.paths().is_standby(i))
            if (auto path = current(i)) return path;
    return nullptr;
}

void LinkPaths::withdraw(uint32_t path) {
    if (const auto offered = std::exchange(connections_by_path_[path].offered, nullptr))
        offered->close();
}

std::vector<std::shared_ptr<DataPath>> LinkPaths::start_to_close(
    const std::shared_ptr<void>& ending) {
    std::vector<std::shared_ptr<DataPath>> paths;
    for (const PathConnections& each : connections_by_path_) {
        paths.insert(paths.end(), each.connections.begin(), each.connections.end());
        if (each.offered) paths.push_back(each.offered);
    }
    for (const auto& path : paths) path->close(ending);
    return paths;
}

void LinkPaths::drop_connections() {
    for (PathConnections& each : connections_by_path_) {
        each.connections.clear();
        each.offered.reset();
    }
}

Reactor& LinkPaths::reactor_of(uint32_t index) {
    const PathSet::Path& p = core_.paths()[index];
    return p.kind == Transport::rdma ? runtime_.rail(p.our_rail)->reactor() : runtime_.data(index);
}

void LinkPaths::path_lost(uint32_t index, uint32_t epoch, const std::string& why) {
    const Lock lock(mu_);
    if (link_.over() || !core_.path_lost(index, epoch, why, steady_ns())) return;
    link_.last_error_ = "data path " + std::to_string(index) + ": " + why;
    std::erase_if(connections_by_path_[index].connections,
                  [epoch](const auto& path) { return path->epoch == epoch; });
    link_.run_actions();
    link_.wake_reader();
}

void LinkPaths::start_to_retire(const Actions::Retire& what) {
    // Each connection is retired on its own thread: a later offer may have moved the path to
    // another rail.
    std::set<Reactor*> threads;
    for (const auto& path : connections_by_path_[what.path].connections)
        if (path->epoch <= what.epoch) threads.insert(&path->reactor());
    // Without a connection, a fence still waits for its answer.
    if (threads.empty()) threads.insert(&reactor_of(what.path));
    for (Reactor* thread : threads)
        thread->post(
            [this, self = link_.shared_from_this(), thread, what] { retire(*thread, what); });
}

void LinkPaths::retire(Reactor& reactor, const Actions::Retire& what) {
    std::vector<std::shared_ptr<DataPath>> old;
    {
        const Lock lock(mu_);
        for (const auto& path : connections_by_path_[what.path].connections)
            if (path->epoch <= what.epoch && &path->reactor() == &reactor) old.push_back(path);
    }
    const auto stuck = std::stable_partition(old.begin(), old.end(),
                                             [](const auto& path) { return path->retire(); });
    std::vector<uint32_t> retired;
    for (auto it = old.begin(); it != stuck; ++it) retired.push_back((*it)->epoch);
    const Lock lock(mu_);
    if (link_.over()) return;
    std::erase_if(connections_by_path_[what.path].connections, [&retired](const auto& path) {
        return std::find(retired.begin(), retired.end(), path->epoch) != retired.end();
    });
    core_.retired(what.path, retired, steady_ns());
    link_.run_actions();
    link_.wake_reader();
    if (stuck != old.end())
        reactor.after(kRetireAgain, [this, self = link_.shared_from_this(), &reactor, what] {
            retire(reactor, what);
        });
}

void LinkPaths::dial_paths() {
    struct Call {
        uint32_t index;
        uint32_t epoch;
        Hello hello;
    };
    std::vector<Call> calls;
    std::vector<std::pair<uint32_t, uint32_t>> offers;
    Address address;
    uint32_t segment_bytes = 0;
    {
        const Lock lock(mu_);
        if (link_.state_ != Link::State::up || link_.goodbye_sent_) return;
        address = link_.terms_.transport == Transport::shm ? abstract_unix(link_.terms_.unix_name)
                                                           : link_.terms_.address;
        segment_bytes = core_.paths().segment_bytes();
        for (const auto& [index, epoch] : core_.due(steady_ns())) {
            if (core_.paths()[index].kind == Transport::rdma) {
                offers.emplace_back(index, epoch);
                continue;
            }
            Hello h = link_.control_.hello(Purpose::data);
            h.path = index;
            h.epoch = epoch;
            calls.push_back({index, epoch, std::move(h)});
        }
    }
    for (const auto& [index, epoch] : offers) offer_rail(index, epoch);
    for (Call& call : calls) {
        pipemorph::dial(
            runtime_, address, std::move(call.hello), 2 * kSecond,
            [this, weak = link_.weak_from_this(), index = call.index,
             epoch = call.epoch](DialResult r) {
                const auto self = weak.lock();
                if (!self) return;
                if (r.fd) {
                    attach(index, epoch, std::move(r.fd), r.keys);
                    return;
                }
                const Lock lock(mu_);
                link_.or_die([&] { core_.dial_failed(index, epoch, r.error, steady_ns()); });
            },
            segment_bytes);
    }
}

std::optional<ChunkTask> LinkPaths::next_chunk(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    if (link_.over()) return std::nullopt;
    return core_.next_chunk(path, epoch, wall_ns(), steady_ns());
}

// A failure here ends the link and not only the path: no fence would find a half-entered chunk, or
// a complete message without acknowledgement.
ChunkSink LinkPaths::begin_chunk(const ChunkHeader& header) {
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    const Lock lock(mu_);
    if (link_.over() || !link_.fatal_error_.empty())
        core_.stale_chunk();
    else
        link_.or_die([&] { sink = core_.begin_chunk(header); });
    return sink;
}

void LinkPaths::finish_chunk(const ChunkSink& sink, bool intact) {
    const Lock lock(mu_);
    if (link_.over() || !link_.fatal_error_.empty()) return;
    link_.or_die([&] {
        const uint64_t whole = core_.finish_chunk(sink, intact, wall_ns());
        link_.run_actions_for_message(whole);
    });
}

void LinkPaths::refused() {
    const Lock lock(mu_);
    link_.control_.refused();
}

void LinkPaths::stale_chunk() {
    const Lock lock(mu_);
    core_.stale_chunk();
}

std::optional<PathHost::Segment> LinkPaths::next_segment_to_offer() {
    const Lock lock(mu_);
    const auto number = core_.next_segment_to_offer();
    if (!number) return std::nullopt;
    return Segment{*number, core_.in().segment(*number)};
}

void LinkPaths::segment_offered(uint32_t number, uint64_t bytes, Fd fd) {
    MappedFrame answer;
    answer.segment = number;
    if (!peer_segment(number)) {
        try {
            auto memory = Memory::map_peer(fd, bytes);
            const Lock lock(mu_);
            peer_segments_[number] = std::move(memory);
        } catch (const EngineError& e) {
            answer.error = e.what();
        }
    }
    const Lock lock(mu_);
    if (!link_.over()) link_.control_.send_frame(answer);
}

std::shared_ptr<Memory> LinkPaths::peer_segment(uint32_t number) {
    const Lock lock(mu_);
    const auto it = peer_segments_.find(number);
    return it == peer_segments_.end() ? nullptr : it->second;
}

RdmaPath::Settings LinkPaths::rdma_settings() const {
    return {runtime_.config.chunk_bytes, runtime_.peer_deadline_ns / 4, runtime_.peer_deadline_ns,
            core_.paths().share_of_rail()};
}

void LinkPaths::offer_rail(uint32_t index, uint32_t epoch) {
    const Lock lock(mu_);
    const uint32_t rail = core_.paths()[index].our_rail;
    runtime_.rail(rail)->setup().post([this, self = link_.shared_from_this(), rail, index, epoch] {
        make_offer(rail, index, epoch);
    });
}

void LinkPaths::make_offer(uint32_t rail, uint32_t index, uint32_t epoch) {
    std::shared_ptr<RdmaPath> made;
    std::string error;
    try {
        made =
            std::make_shared<RdmaPath>(runtime_.rail(rail), host(), index, epoch, rdma_settings());
    } catch (const std::exception& e) {
        error = e.what();
    }
    const Lock lock(mu_);
    if (link_.over()) return;
    if (core_.offer(index, epoch, made ? made->local() : QpAddress{}, error, steady_ns()))
        connections_by_path_[index].offered = made;
    link_.run_actions();
}

void LinkPaths::take_offer(const OfferFrame& offer) {
    if (link_.identity_.dials || offer.path >= core_.paths().rails() ||
        offer.to_rail >= runtime_.rail_numbers()) {
        protocol_error("an offer for a rail that does not exist");
        return;
    }
    const Lock lock(mu_);
    if (link_.over() || !core_.take_offer(offer)) return;
    link_.run_actions();
    runtime_.rail(offer.to_rail)->setup().post([this, self = link_.shared_from_this(), offer] {
        answer_offer(offer);
    });
}

void LinkPaths::answer_offer(const OfferFrame& offer) {
    QpAddress qp;
    std::string error;
    std::shared_ptr<RdmaPath> made;
    try {
        made = std::make_shared<RdmaPath>(runtime_.rail(offer.to_rail), host(), offer.path,
                                          offer.epoch, rdma_settings());
        made->connect(offer.qp, false);
        qp = made->local();
    } catch (const std::exception& e) {
        error = e.what();
    }
    const Lock lock(mu_);
    if (link_.over()) return;
    if (core_.answer(offer, qp, error, steady_ns())) {
        connections_by_path_[offer.path].connections.push_back(made);
        made->start();
    }
    link_.run_actions();
}

void LinkPaths::take_answer(const AnswerFrame& answer) {
    const Lock lock(mu_);
    if (link_.over()) return;
    if (core_.take_answer(answer, steady_ns()))
        runtime_.rail(core_.paths()[answer.path].our_rail)
            ->setup()
            .post([this, self = link_.shared_from_this(),
                   made = std::exchange(connections_by_path_[answer.path].offered, nullptr),
                   answer] { connect_offered(made, answer); });
    link_.run_actions();
}

void LinkPaths::connect_offered(const std::shared_ptr<RdmaPath>& made, const AnswerFrame& answer) {
    // A fence may be answered meanwhile: neither end carries before the dialler's probe has
    // arrived, and `start` posts that after the check for the fence.
    std::string error;
    try {
        made->connect(answer.qp, true);
    } catch (const std::exception& e) {
        error = e.what();
    }
    const Lock lock(mu_);
    if (link_.over()) return;
    if (core_.connected(answer.path, answer.epoch, error, steady_ns())) {
        connections_by_path_[answer.path].connections.push_back(made);
        made->start();
    }
    link_.run_actions();
}

std::optional<PathHost::RemoteSlot> LinkPaths::remote_slot(uint32_t path, const SlotGrant& slot) {
    const Lock lock(mu_);
    const RegionFrame* r = core_.paths().region(path, slot);
    if (r == nullptr) return std::nullopt;
    return RemoteSlot{r->address + slot.offset, slot.bytes, r->key};
}

void LinkPaths::path_up(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    if (link_.over() || !core_.path_up(path, epoch, steady_ns())) return;
    link_.run_actions();
}

void LinkPaths::path_suspect(uint32_t path, uint32_t epoch, bool suspicious) {
    const Lock lock(mu_);
    if (link_.over()) return;
    core_.path_suspect(path, epoch, suspicious, steady_ns());
    link_.run_actions();
}

void LinkPaths::path_measured(uint32_t path, uint32_t epoch, double bytes_per_second,
                              std::optional<int64_t> rtt_ns) {
    const Lock lock(mu_);
    if (core_.paths()[path].machine.epoch() != epoch) return;
    core_.path_measured(path, epoch, bytes_per_second, steady_ns());
    if (rtt_ns) connections_by_path_[path].rtt.add(*rtt_ns, 0);
}

PathHost::Pace LinkPaths::pace(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    core_.pace(path, epoch);
    const PathSet::Path& p = core_.paths()[path];
    return {p.flow.busy_rate(), p.flow.window()};
}

void LinkPaths::path_limited(uint32_t path, uint32_t epoch, uint64_t most) {
    const Lock lock(mu_);
    core_.limit(path, epoch, most);
}

PathHost::Pace LinkPaths::chunk_delivered(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    core_.delivered(path, epoch, steady_ns());
    const PathSet::Path& p = core_.paths()[path];
    return {p.flow.busy_rate(), p.flow.window()};
}

void LinkPaths::path_stuck(const std::string& why) {
    link_.die(link_.describe() + " is dead: " + why);
}

void LinkPaths::check_rails(int64_t now) {
    std::string dead;
    {
        const Lock lock(mu_);
        if (core_.paths().rails() == 0 || link_.over()) return;
        uint64_t recoveries = 0;
        for (const auto& rail : runtime_.rails) recoveries += rail->recoveries();
        core_.check_rails(std::exchange(recoveries_seen_, recoveries) != recoveries, now);
        link_.run_actions();
        const auto since = core_.paths().only_rails_since();
        if (since && now - *since > runtime_.peer_deadline_ns)
            dead = link_.describe() + " is dead: " + missing_rail(now);
    }
    if (!dead.empty()) link_.finish(Link::State::dead, dead);
}

std::string LinkPaths::missing_rail(int64_t now) const {
    const auto since = core_.paths().only_rails_since();
    if (!since) return {};
    return "rdma is required, and no rail to " + format_rank(link_.identity_.peer_rank) +
           " has been up for " + format_seconds(to_seconds(now - *since)) + ": " + text();
}

PathStats LinkPaths::describe(uint32_t index) const {
    const PathSet::Path& p = core_.paths()[index];
    PathStats s;
    s.kind = name_of(p.kind);
    if (p.kind == Transport::rdma) s.rail = runtime_.rail(p.our_rail)->describe();
    s.state = name_of(p.machine.state());
    s.last_error = p.last_error;
    s.epoch = p.machine.epoch();
    s.chunks = p.chunks;
    s.bytes = p.bytes;
    s.times_lost = p.machine.times_lost();
    if (const double rate = p.paced ? p.flow.busy_rate() : p.bytes_per_second; rate > 0)
        s.bytes_per_second = rate;
    s.window = p.paced ? p.flow.window() : 0;
    if (const auto rtt = connections_by_path_[index].rtt.summary()) {
        s.rtt_min = to_seconds(rtt->min_ns);
        s.rtt_mean = to_seconds(rtt->mean_ns);
        s.rtt_p99 = to_seconds(rtt->p99_ns);
    }
    return s;
}

void LinkPaths::count(LinkStats& s) const {
    for (uint32_t i = 0; i < connections_by_path_.size(); ++i) s.paths.push_back(describe(i));
    s.path_errors = text();
    s.bytes_copied_out = bytes_copied_out_.load(std::memory_order_relaxed);
    s.bytes_copied_in = bytes_copied_in_.load(std::memory_order_relaxed);
}

std::string LinkPaths::text() const {
    std::string down;
    size_t up = 0;
    for (uint32_t i = 0; i < connections_by_path_.size(); ++i) {
        if (core_.paths()[i].machine.carries()) {
            ++up;
            continue;
        }
        const PathStats s = describe(i);
        down += (down.empty() ? "" : "; ") + (s.rail.empty() ? s.kind : s.rail) + " " + s.state +
                (s.last_error.empty() ? "" : ": " + s.last_error);
    }
    std::string text = core_.path_errors(steady_ns());
    if (!down.empty())
        text = std::to_string(up) + " of " + std::to_string(connections_by_path_.size()) +
               " data paths up (" + down + ")" + (text.empty() ? "" : ", ") + text;
    return text;
}

}  // namespace pipemorph
