// Calls of Python threads into the engine that let go of the GIL, and the end of the interpreter.
//
// A thread that asks for the GIL while the interpreter ends is ended by Python (before 3.14) with
// pthread_exit, which unwinds through C++ that may not be unwound: the process aborts, and its exit
// code is lost. So before that, when Python calls what `atexit` knows, such threads are sent out of
// the engine with SystemExit, which ends a thread without a word, and the last one is waited for.
#pragma once

#include <nanobind/nanobind.h>
#include <pthread.h>

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
            PyEval_RestoreThread(state_);
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

    // When the module is made.
    static void begin() {
        // Threads that are inside are not the child's.
        pthread_atfork(nullptr, nullptr, [] { inside_ = 0; });
        nanobind::module_::import_("atexit").attr("register")(nanobind::cpp_function(&Calls::end));
    }

    // By `atexit`, with the GIL.
    static void end() {
        ender_ = std::this_thread::get_id();
        ending_ = true;
        PyThreadState* const state = PyEval_SaveThread();
        // What copies or registers memory takes as long as it takes, but not for ever.
        constexpr int64_t kPatience = 10 * kSecond;
        const int64_t deadline = steady_ns() + kPatience;
        while (inside_.load() > 0 && steady_ns() < deadline)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        PyEval_RestoreThread(state);
    }

  private:
    static void throw_if_ending() {
        if (!ending()) return;
        PyErr_SetNone(PyExc_SystemExit);
        throw nanobind::python_error();
    }

    static inline std::atomic<int> inside_{0};
    static inline std::atomic<bool> ending_{false};
    static inline std::atomic<std::thread::id> ender_{};
};

}  // namespace pipemorph
