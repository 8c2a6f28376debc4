// The data paths of a link: making them, and what they may ask of it.
#include <algorithm>

#include "engine/link.hpp"
#include "os/clock.hpp"
#include "path/shm_path.hpp"
#include "path/tcp_path.hpp"

namespace pipemorph {

void Link::sever_data_path(uint32_t index) {
    const Lock lock(mu_);
    if (over()) throw_over();
    if (index >= paths_.size())
        throw EngineError(describe() + " has " + std::to_string(paths_.size()) +
                          " data paths, not " + std::to_string(index + 1));
    if (paths_[index].live) paths_[index].live->sever();
}

std::string Link::may_attach_data(uint32_t path, uint32_t epoch) const {
    const Lock lock(mu_);
    if (over()) return error_;
    if (path >= paths_.size()) return describe() + " has no data path " + std::to_string(path);
    if (epoch <= paths_[path].epoch)
        return describe() + ": data path " + std::to_string(path) + " is past epoch " +
               std::to_string(epoch);
    return {};
}

void Link::attach_data(uint32_t path, uint32_t epoch, Fd fd) {
    std::shared_ptr<DataPath> before;
    std::shared_ptr<DataPath> now;
    {
        const Lock lock(mu_);
        if (over()) return;
        Path& p = paths_[path];
        if (epoch <= p.fenced) return;  // given up by the peer before we had it
        before = p.live;
        Reactor& reactor = runtime_->data(path);
        if (transport_ == Transport::shm)
            now =
                std::make_shared<ShmPath>(reactor, shared_from_this(), path, epoch, std::move(fd));
        else {
            set_unacked_limit(fd, runtime_->peer_deadline_ns / 2);
            now =
                std::make_shared<TcpPath>(reactor, shared_from_this(), path, epoch, std::move(fd));
        }
        p.live = now;
        p.epoch = epoch;
        p.up_since_ns = steady_ns();
        if (p.was_up) ++reconnects_;
        p.was_up = true;
        if (path == 0)
            segments_to_offer_.assign(unmapped_segments_.begin(), unmapped_segments_.end());
    }
    // On its own thread: it may be in the middle of a copy, and the fence must come after that.
    if (before)
        before->reactor().post([self = shared_from_this(), before] {
            before->retire();
            const Lock lock(self->mu_);
            if (!self->over()) self->send_fence(before->index, before->epoch);
        });
    now->start();
}

void Link::kick_paths() {
    for (const Path& p : paths_)
        if (p.live) p.live->kick();
}

void Link::dial_paths() {
    struct Call {
        uint32_t index;
        uint32_t epoch;
        Hello hello;
    };
    std::vector<Call> calls;
    Address address;
    {
        const Lock lock(mu_);
        if (state_ != State::up || leaving_) return;
        address = transport_ == Transport::shm ? abstract_unix(unix_name_) : peer_address_;
        const int64_t now = steady_ns();
        for (uint32_t i = 0; i < paths_.size(); ++i) {
            Path& p = paths_[i];
            if (p.live || p.dialling || now < p.next_try_ns) continue;
            p.dialling = true;
            // Every attempt has an epoch of its own: the peer may have taken one that we gave up.
            Hello h = hello(Purpose::data);
            h.path = i;
            h.epoch = ++p.epoch;
            const uint32_t epoch = h.epoch;
            calls.push_back({i, epoch, std::move(h)});
        }
    }
    for (Call& call : calls) {
        dial(*runtime_, address, std::move(call.hello), 2 * kSecond,
             [weak = weak_from_this(), index = call.index, epoch = call.epoch](DialResult r) {
                 const auto self = weak.lock();
                 if (!self) return;
                 {
                     const Lock lock(self->mu_);
                     Path& p = self->paths_[index];
                     p.dialling = false;
                     if (!r.fd) {
                         p.backoff_ns =
                             std::clamp<int64_t>(p.backoff_ns * 2, 20 * kMillisecond, kSecond);
                         p.next_try_ns = steady_ns() + p.backoff_ns;
                     }
                 }
                 if (r.fd) self->attach_data(index, epoch, std::move(r.fd));
             });
    }
}

std::optional<ChunkTask> Link::next_chunk(uint32_t path, uint32_t epoch) {
    const Lock lock(mu_);
    const Path& p = paths_[path];
    if (over() || !p.live || p.epoch != epoch) return std::nullopt;
    return out_.next_chunk(path, epoch, wall_ns(), steady_ns());
}

ChunkSink Link::begin_chunk(const ChunkHeader& header) {
    const Lock lock(mu_);
    ChunkSink sink;
    sink.verdict = ChunkSink::Verdict::stale;
    const Path& p = paths_[header.path];
    if (!over() && p.live && p.epoch == header.epoch) sink = in_.begin_chunk(header);
    if (sink.verdict == ChunkSink::Verdict::duplicate) ++duplicate_chunks_;
    if (sink.verdict == ChunkSink::Verdict::stale) ++stale_chunks_;
    return sink;
}

void Link::finish_chunk(const ChunkSink& sink, bool intact) {
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
