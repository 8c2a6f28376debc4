// TCP and abstract unix sockets, non-blocking and close-on-exec throughout.
#pragma once

#include <sys/socket.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "os/fd.hpp"

namespace pipemorph {

struct Address {
    sockaddr_storage storage{};
    socklen_t size = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
    int family() const { return storage.ss_family; }
    std::string text(bool with_port = true) const;
    Address with_port(uint16_t port) const;
};

// Resolves a name; blocks until the name service answers. Throws EngineError.
std::vector<Address> resolve(const std::string& host, uint16_t port, bool to_listen);

// Name look-up on a thread of its own: getaddrinfo has no deadline and cannot be cancelled. The
// thread may outlive this object.
class Lookup {
  public:
    // Starts the look-up. Throws EngineError if there can be no thread.
    static std::shared_ptr<Lookup> begin(const std::string& host, uint16_t port);
    // Result, if there is one within `ns`. Throws EngineError if it is an error.
    std::optional<std::vector<Address>> wait(int64_t ns);

  private:
    void end(std::vector<Address> found, std::string error);

    std::mutex mu_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::vector<Address> found_;
    std::string error_;
};
// Name in the abstract namespace: it has no file, and vanishes with its last descriptor.
Address abstract_unix(std::string_view name);

Fd listen_on(const Address& address);
uint16_t local_port(const Fd& socket);
Address peer_address(const Fd& socket);

// Starts to connect; errno is EINPROGRESS or 0 on success. An invalid Fd means immediate failure.
// `segment_bytes`: most bytes in a packet of either end; 0: as the network seems to allow.
Fd start_connect(const Address& address, uint32_t segment_bytes = 0);
int connect_error(const Fd& socket);

void set_no_delay(const Fd& socket);
// True if both ends are on this host.
bool is_local(const Fd& socket);
void set_send_buffer(const Fd& socket, int bytes);
// Ends the connection when data stays unacknowledged this long: a pulled cable sends no reset.
void set_unacked_limit(const Fd& socket, int64_t ns);
// Closes as a broken cable would: nothing more is sent, and queued data is lost.
void reset_connection(Fd& socket);

}  // namespace pipemorph
