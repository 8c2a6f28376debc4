// Control connection of a link: frames in and out, and the liveness of the peer. A broken
// connection is remade, until the peer is known to be gone or was unreachable for too long.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/dial.hpp"
#include "protocol/link_core.hpp"
#include "protocol/peer_watch.hpp"
#include "protocol/telemetry.hpp"

namespace pipemorph {

class Link;
struct LinkStats;

// Its state is behind the link's mutex. "Locked" functions are called with it, all others without.
class LinkControl {
  public:
    explicit LinkControl(Link& link);

    // --- The engine's side. Control thread. ---
    // Attaches an authenticated connection; `peer_received`: last frame of ours that the peer has.
    void attach(Fd fd, const ConnectionKeys& keys, uint32_t epoch, uint64_t peer_received);
    uint32_t epoch() const;
    uint64_t received() const;
    // Checks whether the peer is silent, unreachable for too long or gone. It may end the link.
    void check_health(int64_t now_ns);

    // Fault injection, any thread.
    void sever();

    // --- The link's side, locked. ---
    bool connected() const { return connection_ != nullptr; }
    // Starts the connection: the link is up from now on.
    void begin();
    void send_frame(const Frame& frame);
    void flush() noexcept;
    // Delays the frames until the reader returns.
    void postpone_flush() { flush_due_ = true; }
    bool flush_is_due() const { return flush_due_; }
    // Writes frames, also the last one of a failed link.
    void write_frames();
    // Closes on the control thread; then `drop`. If it throws, nothing was done.
    void start_to_close();
    void drop() { connection_.reset(); }
    void count(LinkStats& stats) const;
    void refused() { ++frames_refused_; }
    Hello hello(Purpose purpose) const;

  private:
    struct Connection {
        Connection(Fd connected, const ConnectionKeys& keys)
            : fd(std::move(connected)), outgoing_mac(keys.ours), incoming_mac(keys.theirs) {}

        Fd fd;
        FrameMac outgoing_mac;
        FrameMac incoming_mac;
        std::vector<uint8_t> in;
        std::vector<uint8_t> out;
        size_t out_done = 0;
        bool watching_write = false;
        Reactor::Watch watch;  // control thread
    };

    // True if the peer is missing, also for an acceptor's link without confirmation: its dialler
    // may consider it up, and reconnect.
    bool is_peer_missing() const;
    // Locked.
    void send_confirm();
    void send_final_frames(Connection& connection);
    void send_ping(int64_t now_ns);
    void watch_write();
    std::string refused_text() const;

    void on_event(const std::shared_ptr<Connection>& connection, uint32_t events);
    bool read(const std::shared_ptr<Connection>& connection);
    void handle(Frame frame);
    void refuse_frame(const std::shared_ptr<Connection>& connection);
    void lost(const std::shared_ptr<Connection>& connection, const std::string& why);
    void confirmed(Transport transport);
    void reconnect_peer();
    void redial();
    void probe_peer();

    Link& link_;
    LinkCore& core_;
    Runtime& runtime_;

    std::shared_ptr<Connection> connection_;
    uint32_t epoch_ = 0;
    bool flush_due_ = false;
    PeerWatch peer_;
    EchoMeter echo_;
    uint64_t reconnects_ = 0;
    uint64_t frames_refused_ = 0;
};

}  // namespace pipemorph
