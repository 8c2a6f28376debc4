// Common base of paths over stream sockets: the descriptor, its events, failures, and the drain
// after a fence.
//
// The reactor's thread sends and reads, and so may threads of the application for a moment: with
// small messages, waking another thread takes longer than all the rest. The mutex is held
// meanwhile.
#pragma once

#include <atomic>
#include <mutex>
#include <string_view>

#include "path/data_path.hpp"

namespace pipemorph {

class StreamPath : public DataPath {
  public:
    bool retire() override;
    bool send_inline() override;
    bool read_inline(int wake, int64_t wait_ns) override;
    void return_to_reactor() override;

  protected:
    StreamPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
               Fd fd)
        : DataPath(reactor, std::move(host), index, epoch), fd_(std::move(fd)) {}
    ~StreamPath() override;

    void on_start() override;
    void on_notify() override;
    void on_sever() override;
    void on_give_up(const std::string& why) override;
    void on_close(const std::shared_ptr<void>& closed) override;

    // Called with the mutex held.
    //
    // Sends a bounded amount.
    enum class Sent {
        nothing,  // there was nothing to send
        small,    // a small chunk was sent
        more,     // to be called again when the socket takes more
    };
    virtual Sent send_some() = 0;
    // Reads a bounded amount.
    virtual void receive_some() = 0;
    // Releases the chunk being sent and the one being received.
    virtual void drop_work() = 0;

    void fail(std::string_view why);
    // Handles an errno of the socket: true if it means a retry; else the path fails.
    bool would_block_or_fail(const char* what);
    // True once the path drains: its headers are dropped.
    bool retired() const { return retired_; }
    bool open() const { return fd_ && broken_.empty(); }
    // Size of the last header's message. Large messages are read by the reactor, and more of them
    // are expected after one.
    void note_size(bool large) { large_ = large; }
    bool is_large() const { return large_; }
    // True if the reactor's thread should read the rest.
    bool should_yield() const { return on_application_thread_ && large_; }

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
    void close_socket();

    std::mutex mu_;
    Reactor::Watch watch_;  // none before on_start
    bool retired_ = false;
    bool watching_write_ = false;
    std::atomic<bool> large_{false};      // also read without the mutex, which a long copy may hold
    bool read_by_application_ = false;    // a thread of the application reads
    bool sleeps_ = false;                 // ... and waits at the socket
    bool on_application_thread_ = false;  // a thread of the application holds the mutex
    std::string broken_;                  // its error, to be handled by the reactor's thread
    uint64_t drain_timer_ = 0;
};

}  // namespace pipemorph
