// What a path over a stream socket has in common with another: the descriptor, when to watch it
// for writing, how it fails and how it is drained after a fence.
//
// Its reactor's thread carries, and so may threads of the application for a moment: with small
// messages, waking another thread takes longer than all the rest. Whoever carries holds the mutex.
#pragma once

#include <atomic>
#include <mutex>
#include <string_view>

#include "path/data_path.hpp"

namespace pipemorph {

class StreamPath : public DataPath {
  public:
    bool retire() override;
    bool send_here() override;
    bool read_here(int wake, int64_t wait_ns) override;
    void leave_to_reactor() override;

  protected:
    StreamPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
               Fd fd)
        : DataPath(reactor, std::move(host), index, epoch), fd_(std::move(fd)) {}
    ~StreamPath() override;

    void on_start() override;
    void on_kick() override;
    void on_sever() override;
    void on_give_up(const std::string& why) override;
    void on_close(const std::shared_ptr<void>& closed) override;

    // All of these with the mutex held.
    //
    // Send a bounded amount.
    enum class Sent {
        nothing,  // there was nothing to send
        small,    // a small chunk is out
        more,     // to be called again when the socket takes more
    };
    virtual Sent send_some() = 0;
    // Read a bounded amount.
    virtual void receive_some() = 0;
    // Let go of the chunk being sent and of the one being received.
    virtual void drop_work() = 0;

    void fail(std::string_view why);
    // For an errno from the socket: true if it only means "later".
    bool would_block_or_fail(const char* what);
    // The first header that a drained path gets to see, and every one after it.
    bool retired() const { return retired_; }
    bool open() const { return fd_ && broken_.empty(); }
    // What the last header said. Large messages are read beside the application, and more of them
    // are expected after one.
    void note_size(bool large) { large_ = large; }
    bool is_large() const { return large_; }
    // Whether to leave the rest to the reactor's thread.
    bool leaves_off() const { return elsewhere_ && large_; }

    Fd fd_;

  private:
    using Lock = std::unique_lock<std::mutex>;

    void on_event(uint32_t events);
    void pump();
    template <typename F>
    void guarded(F&& run);
    template <typename F>
    void on_other_thread(F&& run);
    void watch();
    void shut();

    std::mutex mu_;
    Reactor::Watch watch_;  // none before on_start
    bool retired_ = false;
    bool watching_write_ = false;
    std::atomic<bool> large_{false};  // also asked without the mutex, which a long copy may hold
    bool read_elsewhere_ = false;     // the reactor leaves it to another thread
    bool sleeps_ = false;             // which waits at the socket
    bool elsewhere_ = false;          // whoever holds the mutex is not the reactor's thread
    std::string broken_;              // found there; taken apart by the reactor's thread
    uint64_t drain_timer_ = 0;
};

}  // namespace pipemorph
