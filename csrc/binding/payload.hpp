// Python buffers that the engine's threads read from.
//
// A buffer may only be let go of with the GIL, and no engine thread ever takes that. So the last
// reference, wherever it is dropped, only puts the buffer on a list; the next call from Python on
// the same engine releases what is on it.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace pipemorph {

class Graveyard {
  public:
    ~Graveyard() { release_all(); }

    void bury(Py_buffer* buffer) {
        const std::lock_guard lock(mu_);
        dead_.push_back(buffer);
        any_.store(true, std::memory_order_release);
    }

    // With the GIL.
    void release_all() {
        if (!any_.load(std::memory_order_acquire)) return;
        std::vector<Py_buffer*> dead;
        {
            const std::lock_guard lock(mu_);
            dead.swap(dead_);
            any_.store(false, std::memory_order_release);
        }
        // When the interpreter is gone there is nobody to give them back to.
        if (!Py_IsInitialized()) return;
        for (Py_buffer* buffer : dead) {
            PyBuffer_Release(buffer);
            delete buffer;
        }
    }

  private:
    std::mutex mu_;
    std::vector<Py_buffer*> dead_;
    std::atomic<bool> any_{false};
};

// Takes the buffer over.
inline std::shared_ptr<void> hold(std::shared_ptr<Graveyard> graveyard,
                                  std::unique_ptr<Py_buffer> buffer) {
    return std::shared_ptr<void>(
        buffer.release(), [graveyard](void* p) { graveyard->bury(static_cast<Py_buffer*>(p)); });
}

}  // namespace pipemorph
