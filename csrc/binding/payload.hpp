// Python buffers that the engine's threads read from.
//
// A buffer may only be released with the GIL, which no engine thread ever takes. So the last
// reference, on whatever thread it is dropped, only puts the buffer on a list. The next call from
// Python on the same engine releases the buffers of the list.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "os/fd.hpp"

namespace pipemorph {

// Buffer with its list node, so that dropping the last reference allocates no memory.
struct HeldBuffer : Py_buffer {
    HeldBuffer* next = nullptr;
};

class ReleaseQueue {
  public:
    ~ReleaseQueue() { release_all(); }

    // True in a fork of the process that owns the engine. A fork has none of its threads, and its
    // locks may be held forever: nothing of the engine may be touched.
    bool inherited() const { return forks_ != forks(); }

    // Called at the beginning of every call on the engine.
    void release_queued() {
        if (inherited())
            throw EngineError("process " + std::to_string(getpid()) + " was forked off process " +
                              std::to_string(owner_) +
                              ", whose engine this is, and cannot use it: make an engine here, or "
                              "start processes by the methods 'spawn' or 'forkserver'");
        release_all();
    }

    void add_buffer(HeldBuffer* buffer) noexcept {
        if (inherited()) return;
        buffer->next = queued_.load(std::memory_order_relaxed);
        while (!queued_.compare_exchange_weak(buffer->next, buffer, std::memory_order_release,
                                              std::memory_order_relaxed)) {
        }
    }

    // Called with the GIL.
    void release_all() {
        if (inherited() || queued_.load(std::memory_order_relaxed) == nullptr) return;
        HeldBuffer* queued = queued_.exchange(nullptr, std::memory_order_acquire);
        // Without an interpreter the buffers have no owner.
        if (!Py_IsInitialized()) return;
        while (queued != nullptr) {
            const std::unique_ptr<HeldBuffer> buffer(std::exchange(queued, queued->next));
            PyBuffer_Release(buffer.get());
        }
    }

  private:
    const uint32_t forks_ = forks();
    const pid_t owner_ = getpid();
    std::atomic<HeldBuffer*> queued_{nullptr};
};

// Reference of Python to an object of the engine. In a forked child it is never released.
template <typename T>
class Reference : public std::shared_ptr<T> {
  public:
    Reference(std::shared_ptr<T> to) : std::shared_ptr<T>(std::move(to)) {}
    Reference(const Reference&) = default;
    Reference(Reference&&) noexcept = default;
    Reference& operator=(const Reference&) = delete;
    ~Reference() {
        if (forks_ != forks()) static_cast<void>(new std::shared_ptr<T>(std::move(*this)));
    }

  private:
    const uint32_t forks_ = forks();
};

// Shared owner of a buffer.
inline std::shared_ptr<void> hold(std::shared_ptr<ReleaseQueue> release_queue,
                                  std::unique_ptr<HeldBuffer> buffer) {
    return {buffer.release(), [release_queue = std::move(release_queue)](HeldBuffer* queued) {
                release_queue->add_buffer(queued);
            }};
}

}  // namespace pipemorph
