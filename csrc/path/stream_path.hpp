// What a path over a stream socket has in common with another: the descriptor, when to watch it
// for writing, how it fails and how it is drained after a fence.
#pragma once

#include "path/data_path.hpp"

namespace pipemorph {

class StreamPath : public DataPath {
  public:
    bool retire() override;

  protected:
    StreamPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t index, uint32_t epoch,
               Fd fd)
        : DataPath(reactor, std::move(host), index, epoch), fd_(std::move(fd)) {}
    ~StreamPath() override;

    void on_start() override;
    void on_kick() override;
    void on_sever() override;
    void on_close() override;

    // Send a bounded amount. Whether to be called again when the socket takes more.
    virtual bool send_some() = 0;
    // Read a bounded amount.
    virtual void receive_some() = 0;
    // Let go of the chunk being sent and of the one being received.
    virtual void drop_work() = 0;

    void fail(const std::string& why);
    // For an errno from the socket: true if it only means "later".
    bool would_block_or_fail(const char* what);
    // The first header that a drained path gets to see, and every one after it.
    bool retired() const { return retired_; }
    bool open() const { return static_cast<bool>(fd_); }

    Fd fd_;

  private:
    void on_event(uint32_t events);
    void pump();
    template <typename F>
    void guarded(F&& run);
    void shut();

    bool retired_ = false;
    bool watching_write_ = false;
    uint64_t drain_timer_ = 0;
};

}  // namespace pipemorph
