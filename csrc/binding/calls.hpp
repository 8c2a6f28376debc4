// Calls of Python threads into a module that let go of the GIL, and the end of the interpreter.
//
// A thread that asks for the GIL while the interpreter ends is ended by Python (before 3.14) with
// pthread_exit, which unwinds through C++ that may not be unwound: the process aborts, and its exit
// code is lost. So before that, when Python calls what `atexit` knows, such threads are sent out of
// the module with SystemExit, which ends a thread without a word, and the last one is waited for.
// One that takes longer stays where it is until the process ends, as with Python 3.14.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "os/clock.hpp"

namespace pipemorph {

class Calls {
  public:
    // Without the GIL as long as it lives. Throws SystemExit where the interpreter ends.
    class WithoutGil {
      public:
        WithoutGil() : WithoutGil(true) {}
        // Where an exception would be no use: `may_end` is false.
        explicit WithoutGil(bool may_end) {
            if (may_end) throw_if_ending();
            inside_.fetch_add(1);
            state_ = PyEval_SaveThread();
        }
        ~WithoutGil() {
            returning_.fetch_add(1);
            if (too_late_ && ending()) {
                returning_.fetch_sub(1);
                for (;;) pause();
            }
            PyEval_RestoreThread(state_);
            returning_.fetch_sub(1);
            inside_.fetch_sub(1);
        }
        WithoutGil(const WithoutGil&) = delete;
        WithoutGil& operator=(const WithoutGil&) = delete;

      private:
        PyThreadState* state_ = nullptr;
    };

    // Now and then during a call: signals are handled, and the end of the interpreter ends it. Both
    // throw. Without the GIL.
    static void check() {
        const nanobind::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
        throw_if_ending();
    }

    // Whether this thread should be out. Any thread, with or without the GIL.
    static bool ending() { return ending_.load() && ender_.load() != std::this_thread::get_id(); }

    // When the module is made. `patience_ns`: for so long at most the end of the interpreter waits
    // for threads that are inside.
    static void begin(int64_t patience_ns) {
        patience_ns_ = patience_ns;
        // Threads that are inside are not the child's.
        pthread_atfork(nullptr, nullptr, [] { inside_ = returning_ = 0; });
        nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&Calls::end));
    }

  private:
    // By `atexit`, with the GIL.
    static void end() {
        ender_ = std::this_thread::get_id();
        ending_ = true;
        PyThreadState* const state = PyEval_SaveThread();
        const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
        const int64_t deadline = steady_ns() + patience_ns_;
        while (inside_.load() > 0 && steady_ns() < deadline) wait();
        too_late_ = true;
        while (returning_.load() > 0) wait();
        PyEval_RestoreThread(state);
    }

    static void throw_if_ending() {
        if (!ending()) return;
        PyErr_SetNone(PyExc_SystemExit);
        throw nanobind::python_error();
    }

    static inline int64_t patience_ns_ = 0;
    static inline std::atomic<int> inside_{0};
    static inline std::atomic<int> returning_{0};  // about to have the GIL again
    static inline std::atomic<bool> too_late_{false};
    static inline std::atomic<bool> ending_{false};
    static inline std::atomic<std::thread::id> ender_{};
};

}  // namespace pipemorph
