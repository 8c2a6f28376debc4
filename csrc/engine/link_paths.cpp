// The data paths of a link: making them, and what they may ask of it.
#include <algorithm>
#include <set>

#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/socket.hpp"
#include "path/shm_path.hpp"
#include "path/tcp_path.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kRetireAgain = 20 * kMillisecond;

}  // namespace

void Link::sever_data_path(uint32_t index) {
    const Lock lock(mu_);
    if (ended()) throw_over();
    if (index >= held_.size())
        throw EngineError(describe() + " has " + std::to_string(held_.size()) +
                          " data paths, not " + std::to_string(index + 1));
    if (const auto path = current(index)) path->sever();
}

std::string Link::may_attach_data(uint32_t path, uint32_t epoch) const {
    const Lock lock(mu_);
    if (over()) return error_;
    // The dialler's last word may still change the transport, and with it what the paths are.
    if (state_ == State::connecting) return describe() + " is not confirmed yet";
    const PathSet& paths = core_.paths();
    if (path >= paths.size()) return describe() + " has no data path " + std::to_string(path);
    if (paths[path].kind == Transport::rdma)
        return describe() + ": data path " + std::to_string(path) + " is a rail";
    if (epoch <= paths[path].machine.epoch())
        return describe() + ": data path " + std::to_string(path) + " is past epoch " +
               std::to_string(epoch);
    return {};
}

void Link::attach_data(uint32_t path, uint32_t epoch, Fd fd, const ConnectionKeys& keys) {
    or_die_without_lock([&] {
        std::shared_ptr<DataPath> now;
        {
            const Lock lock(mu_);
            if (over()) return;
            const Transport kind = core_.paths()[path].kind;
            std::optional<uint32_t> local_thread;
            if (kind == Transport::tcp && is_local(fd))
                local_thread = path % static_cast<uint32_t>(runtime_->data_threads());
            try {
                now = make_path(path, epoch, std::move(fd), keys);
            } catch (const std::exception& e) {  // another one may be had
                core_.dial_failed(path, epoch, e.what(), steady_ns());
                return;
            }
            if (!core_.attach(path, epoch, local_thread, steady_ns())) return;
            held_[path].connections.push_back(now);
            act();
        }
        now->start();
    });
}

std::shared_ptr<DataPath> Link::make_path(uint32_t path, uint32_t epoch, Fd fd,
                                          const ConnectionKeys& keys) {
    const Transport kind = core_.paths()[path].kind;
    Reactor& reactor = runtime_->data(path);
    if (kind == Transport::shm)
        return std::make_shared<ShmPath>(reactor, shared_from_this(), path, epoch, std::move(fd),
                                         keys, runtime_->config.integrity);
    set_unacked_limit(fd, runtime_->peer_deadline_ns / 2);
    return std::make_shared<TcpPath>(reactor, shared_from_this(), path, epoch, std::move(fd), keys,
                                     runtime_->config.integrity);
}

void Link::kick_paths() {
    for (const auto& path : live_paths()) path->kick();
}

// Not those that stand by: waking their threads would only show that there is nothing to do.
std::vector<std::shared_ptr<DataPath>> Link::live_paths() const {
    std::vector<std::shared_ptr<DataPath>> live;
    live.reserve(held_.size());
    for (uint32_t i = 0; i < held_.size(); ++i)
        if (!core_.paths().stands_by(i))
            if (auto path = current(i)) live.push_back(std::move(path));
    return live;
}

std::shared_ptr<DataPath> Link::current(uint32_t index) const {
    for (const auto& path : held_[index].connections)
        if (core_.paths().is_current(index, path->epoch)) return path;
    return nullptr;
}

Reactor& Link::reactor_of(uint32_t index) {
    const PathSet::Path& p = core_.paths()[index];
    return p.kind == Transport::rdma ? runtime_->rail(p.our_rail)->reactor()
                                     : runtime_->data(index);
}

void Link::path_lost(uint32_t index, uint32_t epoch, const std::string& why) {
    const Lock lock(mu_);
    if (over() || !core_.path_lost(index, epoch, why, steady_ns())) return;
    last_trouble_ = "data path " + std::to_string(index) + ": " + why;
    std::erase_if(held_[index].connections,
                  [epoch](const auto& path) { return path->epoch == epoch; });
    act();
    wake_reader();
}

void Link::start_to_retire(const Actions::Retire& what) {
    // Each on its own thread: a later offer may have put the path onto another rail.
    std::set<Reactor*> threads;
    for (const auto& path : held_[what.path].connections)
        if (path->epoch <= what.epoch) threads.insert(&path->reactor());
    // Where none is left, a fence still waits for its answer.
    if (threads.empty()) threads.insert(&reactor_of(what.path));
    for (Reactor* thread : threads)
        thread->post([self = shared_from_this(), thread, what] { self->retire(*thread, what); });
}

void Link::retire(Reactor& reactor, const Actions::Retire& what) {
    std::vector<std::shared_ptr<DataPath>> old;
    {
        const Lock lock(mu_);
        for (const auto& path : held_[what.path].connections)
            if (path->epoch <= what.epoch && &path->reactor() == &reactor) old.push_back(path);
    }
    const auto stuck = std::stable_partition(old.begin(), old.end(),
                                             [](const auto& path) { return path->retire(); });
    std::vector<uint32_t> retired;
    for (auto it = old.begin(); it != stuck; ++it) retired.push_back((*it)->epoch);
    const Lock lock(mu_);
    if (over()) return;
    std::erase_if(held_[what.path].connections, [&retired](const auto& path) {
        return std::find(retired.begin(), retired.end(), path->epoch) != retired.end();
    });
    core_.retired(what.path, retired, steady_ns());
    act();
    wake_reader();
    if (stuck != old.end())
        reactor.after(kRetireAgain,
                      [self = shared_from_this(), &reactor, what] { self->retire(reactor, what); });
}

void Link::dial_paths() {
    struct Call {
        uint32_t index;
        uint32_t epoch;
        Hello hello;
    };
    std::vector<Call> calls;
    std::vector<std::pair<uint32_t, uint32_t>> offers;
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::up || leaving_) return;
        address =
            terms_.transport == Transport::shm ? abstract_unix(terms_.unix_name) : terms_.address;
        for (const auto& [index, epoch] : core_.due(steady_ns())) {
            if (core_.paths()[index].kind == Transport::rdma) {
                offers.emplace_back(index, epoch);
                continue;
            }
            Hello h = hello(Purpose::data);
            h.path = index;
            h.epoch = epoch;
            calls.push_back({index, epoch, std::move(h)});
        }
    }
    for (const auto& [index, epoch] : offers) offer_rail(index, epoch);
    for (Call& call : calls) {
        dial(*runtime_, address, std::move(call.hello), 2 * kSecond,
             [weak = weak_from_this(), index = call.index, epoch = call.epoch](DialResult r) {
                 const auto self = weak.lock();
                 if (!self) return;
                 if (r.fd) {
                     self->attach_data(index, epoch, std::move(r.fd), r.keys);
                     return;
                 }
                 const Lock lock(self->mu_);
                 self->or_die([&] { self->core_.dial_failed(index, epoch, r.error, steady_ns()); });
             });
    }
}

std::optional<ChunkTask> Link::next_chunk(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    if (over()) return std::nullopt;
    return core_.next_chunk(path, epoch, wall_ns(), steady_ns());
}

// A chunk that is half entered, or a message that is here and not acknowledged, is more than the
// end of a path: no fence would find it.
ChunkSink Link::begin_chunk(const ChunkHeader& header) {
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    const Lock lock(mu_);
    if (over() || !doom_.empty())
        core_.stale_chunk();
    else
        or_die([&] { sink = core_.begin_chunk(header); });
    return sink;
}

void Link::finish_chunk(const ChunkSink& sink, bool intact) {
    const Lock lock(mu_);
    if (over() || !doom_.empty()) return;
    or_die([&] {
        const uint64_t whole = core_.finish_chunk(sink, intact, wall_ns());
        Actions actions = core_.take_actions();
        // What it waits for goes first, and what it releases goes along.
        if (reads_here() && whole <= DataPath::kSmall && std::exchange(actions.flush, false))
            flush_due_ = true;
        carry_out(actions);
    });
}

void Link::refused() {
    const Lock lock(mu_);
    ++frames_refused_;
}

void Link::stale_chunk() {
    const Lock lock(mu_);
    core_.stale_chunk();
}

std::optional<PathHost::Segment> Link::next_segment_to_offer() {
    const Lock lock(mu_);
    const auto number = core_.next_segment_to_offer();
    if (!number) return std::nullopt;
    return Segment{*number, core_.in().segment(*number)};
}

void Link::segment_offered(uint32_t number, uint64_t bytes, Fd fd) {
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
    if (!over()) send_frame(answer);
}

std::shared_ptr<Memory> Link::peer_segment(uint32_t number) {
    const Lock lock(mu_);
    const auto it = peer_segments_.find(number);
    return it == peer_segments_.end() ? nullptr : it->second;
}

}  // namespace pipemorph
