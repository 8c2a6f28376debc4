// A data path that broke: its epoch is fenced, and what it lost moves to the others.
#include <algorithm>

#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {

void Link::lose_path(Path& p, const std::string& why) {
    p.live.reset();
    p.trouble = why;
    p.machine.lost(p.machine.epoch(), steady_ns());
    note_carrier();
    // What nobody has taken yet can go another way at once.
    kick_paths();
}

// The path's epoch is over on this side: ask what of it arrived, and let the peer do the same.
void Link::send_fence(uint32_t index, uint32_t epoch) {
    constexpr size_t kPerFrame = 4096;
    const auto messages = out_.entrusted_to(index, epoch);
    size_t at = 0;
    do {
        FenceFrame fence{index, epoch, {}};
        for (; at < messages.size() && fence.messages.size() < kPerFrame; ++at)
            fence.messages.push_back(messages[at]);
        stream_.send(fence);
    } while (at < messages.size());
    flush();
}

// A newer connection takes the place of the live one. It is retired on its own thread: that may be
// in the middle of a copy, and the fence must come after it.
void Link::replace(Path& p) {
    const std::shared_ptr<DataPath> before = std::exchange(p.live, nullptr);
    if (!before) return;
    p.replaced.push_back(before);
    before->reactor().post([self = shared_from_this(), before] {
        self->retire_replaced(before->index, before->epoch);
    });
}

// On the path's own thread, for all up to this epoch.
void Link::retire_replaced(uint32_t index, uint32_t epoch) {
    std::vector<std::shared_ptr<DataPath>> old;
    {
        const Lock lock(mu_);
        auto& replaced = paths_[index].replaced;
        const auto first =
            std::stable_partition(replaced.begin(), replaced.end(),
                                  [epoch](const auto& path) { return path->epoch > epoch; });
        old.assign(first, replaced.end());
        replaced.erase(first, replaced.end());
    }
    for (const auto& path : old) path->retire();
    const Lock lock(mu_);
    if (over()) return;
    for (const auto& path : old) send_fence(index, path->epoch);
}

void Link::path_lost(uint32_t index, uint32_t epoch, const std::string& why) {
    {
        const Lock lock(mu_);
        Path& p = paths_[index];
        if (over() || !p.live || p.machine.epoch() != epoch) return;
        last_trouble_ = "data path " + std::to_string(index) + ": " + why;
        lose_path(p, why);
        send_fence(index, epoch);
    }
    if (identity_.dials)
        runtime_->control.post([self = shared_from_this()] { self->dial_paths(); });
}

void Link::fence_requested(const FenceFrame& fence) {
    bool known = false;
    Reactor* reactor = nullptr;
    {
        const Lock lock(mu_);
        if (over()) return;
        known = fence.path < paths_.size();
        if (known) {
            paths_[fence.path].machine.fenced_by_peer(fence.epoch);
            reactor = &reactor_of(fence.path);
        }
    }
    if (!known) {
        protocol_error("a fence for a path that does not exist");
        return;
    }
    // On the path's own thread, so that no byte of the fenced epoch can reach a slot after the
    // bitmaps have been read.
    reactor->post([self = shared_from_this(), fence] {
        // Also those that a newer connection replaced after the fence was posted to this thread.
        self->retire_replaced(fence.path, fence.epoch);
        std::shared_ptr<DataPath> live;
        bool lost = false;
        {
            const Lock lock(self->mu_);
            if (self->over()) return;
            Path& p = self->paths_[fence.path];
            if (p.live && p.machine.epoch() <= fence.epoch) {
                live = p.live;
                lost = true;
            }
        }
        if (live) live->retire();
        {
            const Lock lock(self->mu_);
            if (self->over()) return;
            Path& p = self->paths_[fence.path];
            if (lost && p.live == live) {
                self->lose_path(p, "given up by the peer");
                self->send_fence(live->index, live->epoch);
            }
            constexpr size_t kMaxBits = size_t{256} << 10;
            BitmapFrame answer{fence.path, fence.epoch, {}};
            size_t bits = 0;
            for (ChunkReport& r : self->in_.report(fence.messages)) {
                bits += r.bits.size() + 16;
                answer.reports.push_back(std::move(r));
                if (bits < kMaxBits) continue;
                answer.last = false;
                self->stream_.send(std::exchange(answer, {fence.path, fence.epoch, {}}));
                bits = 0;
            }
            // Also without messages to report on: the peer waits for it before it starts anew.
            self->stream_.send(answer);
            self->flush();
        }
        if (lost && self->identity_.dials)
            self->runtime_->control.post([self] { self->dial_paths(); });
    });
}

}  // namespace pipemorph
