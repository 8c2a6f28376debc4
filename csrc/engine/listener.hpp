// Incoming connections until they are authenticated. Unauthenticated peers get little time, are few
// at once, and receive only a nonce.
#pragma once

#include <deque>
#include <functional>
#include <unordered_map>

#include "engine/runtime.hpp"
#include "os/socket.hpp"

namespace pipemorph {

// Reasons of refused connections, for the log. Bounded; a repeated reason is counted.
class RefusalLog {
  public:
    void add(const std::string& reason);
    std::vector<std::string> list() const;

  private:
    static constexpr size_t kMaxReasons = 256;
    mutable std::mutex mu_;
    std::deque<std::pair<std::string, uint64_t>> reasons_;
    uint64_t forgotten_ = 0;
};

class Listener;

// Connection in its handshake.
class PendingConnection : public std::enable_shared_from_this<PendingConnection> {
  public:
    PendingConnection(Listener& listener, Fd fd, const Digest& key);
    const Hello& hello() const { return handshake_.hello(); }
    const ListenerHandshake& handshake() const { return handshake_; }
    const Address& from() const { return from_; }

    // Decisions about an authenticated dialler, which waits until one is made. `accept` returns the
    // connection, or an empty one if it broke meanwhile.
    Fd accept(const HelloReply& reply);
    void refuse(Verdict verdict, const std::string& reason);
    bool closed() const { return !fd_; }

  private:
    friend class Listener;
    void start();
    void on_event();
    bool send_output();
    void log(const std::string& why);
    void end(const std::string& why);
    void release();

    Listener& listener_;
    Fd fd_;
    Address from_;
    std::string source_;  // its address, without the port
    ListenerHandshake handshake_;
    uint64_t timer_ = 0;
    int64_t since_ns_ = 0;
    bool waiting_ = false;
};

class Listener {
  public:
    using Decide = std::function<void(const std::shared_ptr<PendingConnection>&)>;

    // `decide`: called on the control thread for every authenticated dialler.
    Listener(Runtime& runtime, RefusalLog& refusals, const Address& address, Decide decide);
    void start();  // on the control thread
    void stop();   // on the control thread
    uint16_t port() const { return local_port(fd_); }

  private:
    friend class PendingConnection;
    void on_connections();
    bool make_room(const std::string& source);

    Runtime& runtime_;
    RefusalLog& refusals_;
    Fd fd_;
    Decide decide_;
    std::unordered_map<PendingConnection*, std::shared_ptr<PendingConnection>>
        unauthenticated_peers_;  // not authenticated yet
    std::unordered_map<PendingConnection*, std::shared_ptr<PendingConnection>>
        waiting_;  // authenticated
};

}  // namespace pipemorph
