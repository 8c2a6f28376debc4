// The control connection of a link: frames in and out, and the peer at its other end. A connection
// that breaks is made anew, until the peer is known to be gone or was missed for too long.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/dial.hpp"
#include "protocol/link_core.hpp"
#include "protocol/peer_watch.hpp"

namespace pipemorph {

class Link;
struct LinkStats;

// Behind the link's mutex. "Locked": to be called while holding it; all else without it.
class LinkControl {
  public:
    explicit LinkControl(Link& link);

    // --- The engine's side. Control thread. ---
    // A control connection is authenticated; `peer_received` says where to resume.
    void attach(Fd fd, const ConnectionKeys& keys, uint32_t epoch, uint64_t peer_received);
    uint32_t epoch() const;
    uint64_t received() const;
    // The peer: silent, missed for too long, gone? It may end the link.
    void look_after(int64_t now_ns);

    // Fault injection, any thread.
    void sever();

    // --- The link's side, locked. ---
    bool connected() const { return connection_ != nullptr; }
    // The link is up from now on.
    void begin();
    void send_frame(const Frame& frame);
    void flush() noexcept;
    // Frames may wait for the reader to be back.
    void postpone_flush() { flush_due_ = true; }
    bool flush_is_due() const { return flush_due_; }
    // The last word of a link that ends, said also where nothing else is any more.
    void write_frames();
    // Closed on the control thread. Where it throws, nothing was done; then `drop`.
    void start_to_close();
    void drop() { connection_.reset(); }
    void count(LinkStats& stats) const;
    void drain_telemetry() { echo_.drain(); }
    void refused() { ++frames_refused_; }
    Hello hello(Purpose purpose) const;

  private:
    struct Connection {
        Connection(Fd connected, const ConnectionKeys& keys)
            : fd(std::move(connected)), says(keys.ours), hears(keys.theirs) {}

        Fd fd;
        Sealer says;
        Sealer hears;
        std::vector<uint8_t> in;
        std::vector<uint8_t> out;
        size_t out_done = 0;
        bool watching_write = false;
        Reactor::Watch watch;  // control thread
    };

    // Whether the peer is missed. An acceptor's link that is not confirmed is, too: its dialler may
    // think that it is up, and come back.
    bool is_missed() const;
    // Locked.
    void send_confirm();
    void send_last_words(Connection& connection);
    void send_ping(int64_t now_ns);
    void watch_write();
    std::string refused_text() const;

    void on_event(const std::shared_ptr<Connection>& connection, uint32_t events);
    bool read(const std::shared_ptr<Connection>& connection);
    void handle(Frame frame);
    void refuse_frame(const std::shared_ptr<Connection>& connection);
    void lost(const std::shared_ptr<Connection>& connection, const std::string& why);
    void confirmed(Transport transport);
    void seek_peer();
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
