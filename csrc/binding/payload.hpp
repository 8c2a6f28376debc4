// Python buffers that the engine's threads read from.
//
// A buffer may only be let go of with the GIL, and no engine thread ever takes that. So the last
// reference, wherever it is dropped, only puts the buffer on a list; the next call from Python on
// the same engine releases what is on it.
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

// With its place on the list, so that whoever drops the last reference needs no memory for it.
struct HeldBuffer : Py_buffer {
    HeldBuffer* next = nullptr;
};

class Graveyard {
  public:
    ~Graveyard() { release_all(); }

    // Whether this process is a fork of the one that the engine belongs to. Then its threads are
    // not here and its locks may be held for ever: nothing of it may be touched.
    bool inherited() const { return forks_ != forks(); }

    // At the begin of every call on the engine.
    void visit() {
        if (inherited())
            throw EngineError("process " + std::to_string(getpid()) + " was forked off process " +
                              std::to_string(owner_) +
                              ", whose engine this is, and cannot use it: make an engine here, or "
                              "start processes by the methods 'spawn' or 'forkserver'");
        release_all();
    }

    void bury(HeldBuffer* buffer) noexcept {
        if (inherited()) return;
        buffer->next = dead_.load(std::memory_order_relaxed);
        while (!dead_.compare_exchange_weak(buffer->next, buffer, std::memory_order_release,
                                            std::memory_order_relaxed)) {
        }
    }

    // With the GIL.
    void release_all() {
        if (inherited() || dead_.load(std::memory_order_relaxed) == nullptr) return;
        HeldBuffer* dead = dead_.exchange(nullptr, std::memory_order_acquire);
        // When the interpreter is gone there is nobody to give them back to.
        if (!Py_IsInitialized()) return;
        while (dead != nullptr) {
            const std::unique_ptr<HeldBuffer> buffer(std::exchange(dead, dead->next));
            PyBuffer_Release(buffer.get());
        }
    }

  private:
    const uint32_t forks_ = forks();
    const pid_t owner_ = getpid();
    std::atomic<HeldBuffer*> dead_{nullptr};
};

// A reference of Python's to something of the engine's. In a forked child it is never let go of.
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

// Takes the buffer over.
inline std::shared_ptr<void> hold(std::shared_ptr<Graveyard> graveyard,
                                  std::unique_ptr<HeldBuffer> buffer) {
    return {buffer.release(),
            [graveyard = std::move(graveyard)](HeldBuffer* dead) { graveyard->bury(dead); }};
}

}  // namespace pipemorph
