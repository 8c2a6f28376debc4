// Outgoing connections: connect, authenticate, and pass the connection on.
#pragma once

#include <functional>

#include "engine/runtime.hpp"
#include "os/socket.hpp"

namespace pipemorph {

struct DialResult {
    Fd fd;  // connected and authenticated on success
    HelloReply reply;
    ConnectionKeys keys;
    std::string error;                // empty on success
    bool refused = false;             // refused, and a retry will hardly help
    bool answered = false;            // refused by a process at the address
    bool proved = false;              // that process is the peer: it has the secret
    bool not_yet = false;             // refused by the peer for now
    bool connection_refused = false;  // connection refused: no process listens there
    bool cut_short = false;           // the limit left no time for an answer
};

// Dials on the runtime's control thread. `done` is called exactly once, on that thread, unless the
// reactor stops first. An address without any answer is given up before the limit. `segment_bytes`:
// as of `start_connect`; control connections always use packets that every network carries.
void dial(Runtime& runtime, const Address& address, Hello hello, int64_t limit_ns,
          std::function<void(DialResult)> done, uint32_t segment_bytes = 0);

}  // namespace pipemorph
