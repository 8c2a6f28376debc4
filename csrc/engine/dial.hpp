// Outgoing connections: connect, prove ourselves, hand the connection over.
#pragma once

#include <functional>

#include "engine/runtime.hpp"
#include "os/socket.hpp"

namespace pipemorph {

struct DialResult {
    Fd fd;  // connected and authenticated on success
    HelloReply reply;
    ConnectionKeys keys;
    std::string error;          // empty on success
    bool refused = false;       // somebody said no, and asking again will hardly help
    bool answered = false;      // somebody there said no
    bool proved = false;        // that was the peer: it knows the secret
    bool not_yet = false;       // the peer said: not now
    bool nobody_there = false;  // connection refused: no process listens there
    bool cut_short = false;     // the limit left no time for an answer
};

// On the runtime's control thread. `done` is called exactly once, on that thread, unless the
// reactor stops first. An address that does not answer at all is given up before the limit.
// `segment_bytes`: as of `start_connect`. Control connections carry little, and always in packets
// that every network takes.
void dial(Runtime& runtime, const Address& address, Hello hello, int64_t limit_ns,
          std::function<void(DialResult)> done, uint32_t segment_bytes = 0);

}  // namespace pipemorph
