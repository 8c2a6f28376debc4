// The data paths of a link: making them, and what they may ask of it.
#include <algorithm>

#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/socket.hpp"
#include "path/shm_path.hpp"
#include "path/tcp_path.hpp"

namespace pipemorph {

void Link::sever_data_path(uint32_t index) {
    const Lock lock(mu_);
    if (ended()) throw_over();
    if (index >= paths_.size())
        throw EngineError(describe() + " has " + std::to_string(paths_.size()) +
                          " data paths, not " + std::to_string(index + 1));
    if (paths_[index].live) paths_[index].live->sever();
}

std::string Link::may_attach_data(uint32_t path, uint32_t epoch) const {
    const Lock lock(mu_);
    if (over()) return error_;
    // The dialler's last word may still change the transport, and with it what the paths are.
    if (state_ == State::connecting) return describe() + " is not confirmed yet";
    if (path >= paths_.size()) return describe() + " has no data path " + std::to_string(path);
    if (paths_[path].kind == Transport::rdma)
        return describe() + ": data path " + std::to_string(path) + " is a rail";
    if (epoch <= paths_[path].machine.epoch())
        return describe() + ": data path " + std::to_string(path) + " is past epoch " +
               std::to_string(epoch);
    return {};
}

void Link::attach_data(uint32_t path, uint32_t epoch, Fd fd, const ConnectionKeys& keys) {
    std::shared_ptr<DataPath> now;
    {
        const Lock lock(mu_);
        if (over()) return;
        Path& p = paths_[path];
        if (p.machine.is_fenced(epoch) || epoch < p.machine.epoch()) {
            // Given up by the peer before we had it: who dialled it has to dial another.
            p.machine.dial_failed(epoch, steady_ns());
            p.trouble = "the peer gave the connection up at once";
            return;
        }
        Reactor& reactor = runtime_->data(path);
        if (p.kind == Transport::shm)
            now = std::make_shared<ShmPath>(reactor, shared_from_this(), path, epoch, std::move(fd),
                                            keys, runtime_->config.integrity);
        else {
            set_unacked_limit(fd, runtime_->peer_deadline_ns / 2);
            p.local = is_local(fd);
            now = std::make_shared<TcpPath>(reactor, shared_from_this(), path, epoch, std::move(fd),
                                            keys, runtime_->config.integrity);
        }
        replace(p);
        p.live = now;
        if (p.machine.epoch() != epoch) p.machine.take(epoch);
        if (p.machine.times_up() > 0) ++reconnects_;
        p.machine.connected(epoch, steady_ns());
        if (path == 0)
            segments_to_offer_.assign(unmapped_segments_.begin(), unmapped_segments_.end());
    }
    now->start();
}

void Link::kick_paths() {
    for (const auto& path : live_paths()) path->kick();
}

// Not those that stand by: waking their threads would only show that there is nothing to do.
std::vector<std::shared_ptr<DataPath>> Link::live_paths() const {
    std::vector<std::shared_ptr<DataPath>> live;
    live.reserve(paths_.size());
    for (uint32_t i = 0; i < paths_.size(); ++i)
        if (paths_[i].live && !stands_by(i)) live.push_back(paths_[i].live);
    return live;
}

Reactor& Link::reactor_of(uint32_t index) {
    const Path& p = paths_[index];
    return p.kind == Transport::rdma ? runtime_->rails[p.our_rail]->reactor()
                                     : runtime_->data(index);
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
        const int64_t now = steady_ns();
        for (uint32_t i = 0; i < paths_.size(); ++i) {
            Path& p = paths_[i];
            if (p.kind == Transport::rdma && barred(p)) continue;
            if (!p.machine.may_dial(now)) continue;
            // Every attempt has an epoch of its own: the peer may have taken one that we gave up.
            const uint32_t epoch = p.machine.dial();
            if (p.kind == Transport::rdma) {
                offers.emplace_back(i, epoch);
                continue;
            }
            Hello h = hello(Purpose::data);
            h.path = i;
            h.epoch = epoch;
            calls.push_back({i, epoch, std::move(h)});
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
                 Path& p = self->paths_[index];
                 p.machine.dial_failed(epoch, steady_ns());
                 p.trouble = r.error;
             });
    }
}

// Within a host one socket per thread keeps the thread busy, and what would wait in a second one
// only pushes payloads out of the cache. The others carry when it is lost.
bool Link::stands_by(uint32_t index) const {
    if (!paths_[index].local) return false;
    const Reactor& own = paths_[index].live->reactor();
    return std::any_of(paths_.begin(), paths_.begin() + index, [&](const Path& p) {
        return p.local && p.live && p.machine.carries() && &p.live->reactor() == &own;
    });
}

std::optional<ChunkTask> Link::next_chunk(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    Path& p = paths_[path];
    if (over() || !p.live || p.machine.epoch() != epoch || !p.machine.carries())
        return std::nullopt;
    const int64_t now = steady_ns();
    if (rails_ > 0) {
        // A barred one is up until its own thread has heard of it.
        if (p.kind == Transport::rdma ? barred(p) || leave_to_other_rails(path, now)
                                      : !sockets_may_carry(now))
            return std::nullopt;
    }
    if (stands_by(path)) return std::nullopt;
    auto task = out_.next_chunk(path, epoch, wall_ns(), now);
    if (task) {
        ++p.chunks;
        p.bytes += task->bytes;
    }
    return task;
}

// A chunk that is half entered, or a message that is here and not acknowledged, is more than the
// end of a path: no fence would find it.
template <typename F>
void Link::or_die(F&& run) {
    try {
        run();
    } catch (const std::exception& e) {  // out of memory, most likely
        die(describe() + " is dead: a chunk could not be taken: " + e.what());
    }
}

ChunkSink Link::begin_chunk(const ChunkHeader& header) {
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    or_die([&] {
        const Lock lock(mu_);
        const Path& p = paths_[header.path];
        if (!over() && p.live && p.machine.epoch() == header.epoch) sink = in_.begin_chunk(header);
        if (sink.verdict == ChunkSink::Verdict::duplicate) ++duplicate_chunks_;
        if (sink.verdict == ChunkSink::Verdict::stale) ++stale_chunks_;
    });
    return sink;
}

void Link::finish_chunk(const ChunkSink& sink, bool intact) {
    or_die([&] {
        const Lock lock(mu_);
        if (over()) return;
        const auto finished = in_.finish_chunk(sink, intact, wall_ns());
        if (!finished.message_complete) return;
        ++messages_received_;
        bytes_received_ += finished.bytes;
        stream_.send(AckFrame{finished.message});
        if (finished.grant) stream_.send(GrantFrame{{*finished.grant}});
        flush();
        changed();
    });
}

void Link::refused() {
    const Lock lock(mu_);
    ++frames_refused_;
}

void Link::stale_chunk() {
    const Lock lock(mu_);
    ++stale_chunks_;
}

std::optional<PathHost::Segment> Link::next_segment_to_offer() {
    const Lock lock(mu_);
    while (!segments_to_offer_.empty()) {
        const uint32_t number = segments_to_offer_.front();
        segments_to_offer_.pop_front();
        if (unmapped_segments_.contains(number)) return Segment{number, in_.segment(number)};
    }
    return std::nullopt;
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
