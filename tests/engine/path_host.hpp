// The link of a path under test, as far as all such tests have it alike, and the path's thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <utility>

#include "check.hpp"
#include "os/reactor.hpp"
#include "path/data_path.hpp"

namespace pipemorph {

struct TestHost : PathHost {
    std::mutex mu;
    std::condition_variable changed;
    std::string lost;
    std::string protocol;  // the peer's error
    int refusals = 0;

    void refused() override {
        note([&] { ++refusals; });
    }
    void stale_chunk() override {}
    void path_lost(uint32_t, uint32_t, const std::string& why) override {
        note([&] { keep(lost, why); });
    }
    void protocol_error(const std::string& why) override {
        note([&] { keep(protocol, why); });
    }
    std::optional<Segment> next_segment_to_offer() override { return std::nullopt; }
    void segment_offered(uint32_t, uint64_t, Fd) override {}
    std::shared_ptr<Memory> peer_segment(uint32_t) override { return nullptr; }

    // The first words stay: tests read them while a path may say the same again.
    static void keep(std::string& words, const std::string& why) {
        if (words.empty()) words = why;
    }

    template <typename F>
    void note(F&& what) {
        const std::lock_guard lock(mu);
        what();
        changed.notify_all();
    }
    template <typename F>
    void until(const char* what, F&& condition) {
        std::unique_lock lock(mu);
        const auto end = std::chrono::system_clock::now() + std::chrono::seconds(20);
        if (!changed.wait_until(lock, end, condition))
            check::fail(__FILE__, __LINE__,
                        std::string("never: ") + what + "; lost: '" + lost + "', protocol: '" +
                            protocol + "'");
    }
};

inline void on_thread(Reactor& reactor, const std::function<void()>& what) {
    std::promise<void> done;
    reactor.post([&] {
        what();
        done.set_value();
    });
    done.get_future().wait();
}

// A reactor's thread that is blocked.
class HeldUp {
  public:
    explicit HeldUp(Reactor& reactor) {
        std::promise<void> here;
        reactor.post([&here, open = opens_.get_future().share()] {
            here.set_value();
            open.wait();
        });
        here.get_future().wait();
    }
    ~HeldUp() { go(); }
    void go() {
        if (!std::exchange(gone_, true)) opens_.set_value();
    }

  private:
    std::promise<void> opens_;
    bool gone_ = false;
};

}  // namespace pipemorph
