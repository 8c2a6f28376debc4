// Releases the GIL during calls into a module, and ends these calls when the interpreter exits.
//
// Before 3.14, Python ends a thread that requests the GIL while the interpreter ends by
// pthread_exit, which unwinds through C++ that must not be unwound: the process aborts, and its
// exit code is lost. So an `atexit` function raises SystemExit in such threads, which ends them
// silently, and waits until all have returned from the module. A thread that takes longer blocks
// until the process ends, as with Python 3.14.
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
    // Scope without the GIL. Throws SystemExit if the interpreter is ending.
    class WithoutGil {
      public:
        WithoutGil() : WithoutGil(true) {}
        // `may_end`: false where an exception would be useless.
        explicit WithoutGil(bool may_end) {
            if (may_end) throw_if_ending();
            inside_.fetch_add(1);
            state_ = PyEval_SaveThread();
        }
        ~WithoutGil() {
            returning_.fetch_add(1);
            if (too_late_ && must_return()) {
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

    // Must be called regularly during a long call, without the GIL. Throws the exception of a
    // signal handler, and SystemExit if the interpreter is ending.
    static void check_signals() {
        const nanobind::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
        throw_if_ending();
    }

    // True if this thread must return from the module. Any thread, with or without the GIL.
    static bool must_return() {
        return ending_.load() && exit_thread_.load() != std::this_thread::get_id();
    }

    // Called once, when the module is created. `patience_ns`: longest wait of the interpreter's end
    // for threads that are inside.
    static void register_atexit(int64_t patience_ns) {
        patience_ns_ = patience_ns;
        // A forked child has no such threads.
        pthread_atfork(nullptr, nullptr, [] { inside_ = returning_ = 0; });
        nanobind::module_::import_("atexit").attr("register")(
            nanobind::cpp_function(&Calls::end_calls));
    }

  private:
    // Called by `atexit`, with the GIL.
    static void end_calls() {
        exit_thread_ = std::this_thread::get_id();
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
        if (!must_return()) return;
        PyErr_SetNone(PyExc_SystemExit);
        throw nanobind::python_error();
    }

    static inline int64_t patience_ns_ = 0;
    static inline std::atomic<int> inside_{0};
    static inline std::atomic<int> returning_{0};  // about to acquire the GIL again
    static inline std::atomic<bool> too_late_{false};
    static inline std::atomic<bool> ending_{false};
    static inline std::atomic<std::thread::id> exit_thread_{};
};

}  // namespace pipemorph
