// A data path that broke: its epoch is fenced, and what it lost moves to the others.
#include <algorithm>

#include "engine/link.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

constexpr int64_t kRetireAgain = 20 * kMillisecond;

}  // namespace

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
    before->reactor().post([self = shared_from_this(), before] { self->keep_retiring(before); });
}

void Link::keep_retiring(const std::shared_ptr<DataPath>& before) {
    if (retire_replaced(before->index, before->epoch)) return;
    before->reactor().after(kRetireAgain,
                            [self = shared_from_this(), before] { self->keep_retiring(before); });
}

// On the path's own thread, for all up to this epoch. False: not all of them can be retired yet.
bool Link::retire_replaced(uint32_t index, uint32_t epoch) {
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
    const auto stuck = std::stable_partition(old.begin(), old.end(),
                                             [](const auto& path) { return path->retire(); });
    const Lock lock(mu_);
    if (over()) return true;
    for (auto it = old.begin(); it != stuck; ++it) send_fence(index, (*it)->epoch);
    paths_[index].replaced.insert(paths_[index].replaced.end(), stuck, old.end());
    return stuck == old.end();
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
    reactor->post(
        [self = shared_from_this(), reactor, fence] { self->answer_fence(*reactor, fence); });
}

void Link::answer_fence(Reactor& reactor, const FenceFrame& fence) {
    // Also those that a newer connection replaced after the fence was posted to this thread.
    bool retired = retire_replaced(fence.path, fence.epoch);
    std::shared_ptr<DataPath> live;
    {
        const Lock lock(mu_);
        if (over()) return;
        const Path& p = paths_[fence.path];
        if (p.machine.epoch() <= fence.epoch) live = p.live;
    }
    if (live) retired = live->retire() && retired;
    if (!retired) {
        // What is missing must not move while it may still come this way, too.
        reactor.after(kRetireAgain, [self = shared_from_this(), &reactor, fence] {
            self->answer_fence(reactor, fence);
        });
        return;
    }
    bool lost = false;
    {
        const Lock lock(mu_);
        if (over()) return;
        Path& p = paths_[fence.path];
        lost = live && p.live == live;
        if (lost) {
            lose_path(p, "given up by the peer");
            send_fence(live->index, live->epoch);
        }
        constexpr size_t kMaxBits = size_t{256} << 10;
        BitmapFrame answer{fence.path, fence.epoch, {}};
        size_t bits = 0;
        for (ChunkReport& r : in_.report(fence.messages)) {
            bits += r.bits.size() + 16;
            answer.reports.push_back(std::move(r));
            if (bits < kMaxBits) continue;
            answer.last = false;
            stream_.send(std::exchange(answer, {fence.path, fence.epoch, {}}));
            bits = 0;
        }
        // Also without messages to report on: the peer waits for it before it starts anew.
        stream_.send(answer);
        flush();
    }
    if (lost && identity_.dials)
        runtime_->control.post([self = shared_from_this()] { self->dial_paths(); });
}

}  // namespace pipemorph
