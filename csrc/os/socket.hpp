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

// Blocks for as long as the name service does not answer. Throws EngineError.
std::vector<Address> resolve(const std::string& host, uint16_t port, bool to_listen);

// A name that is being looked up, on a thread of its own: getaddrinfo has no deadline, and cannot
// be called off. The thread may outlive this.
class Lookup {
  public:
    // Throws EngineError without another thread.
    static std::shared_ptr<Lookup> begin(const std::string& host, uint16_t port);
    // What was found, if there is an answer within so long. Throws EngineError if it is an error.
    std::optional<std::vector<Address>> wait(int64_t ns);

  private:
    void end(std::vector<Address> found, std::string error);

    std::mutex mu_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::vector<Address> found_;
    std::string error_;
};
// A name in the abstract namespace: no file, gone with its last descriptor.
Address abstract_unix(std::string_view name);

Fd listen_on(const Address& address);
uint16_t local_port(const Fd& socket);
Address peer_address(const Fd& socket);

// Starts connecting; errno is EINPROGRESS or 0 on success. An invalid Fd means it failed at once.
// `segment_bytes`: the most that a packet of either end may carry; 0: what the network seems to.
Fd start_connect(const Address& address, uint32_t segment_bytes = 0);
int connect_error(const Fd& socket);

void set_no_delay(const Fd& socket);
// Whether both ends are on this host.
bool is_local(const Fd& socket);
void set_send_buffer(const Fd& socket, int bytes);
// Give up on data that stays unacknowledged this long: a pulled cable sends no reset.
void set_unacked_limit(const Fd& socket, int64_t ns);
// Close the way a broken cable looks from afar: nothing more is sent, what was queued is lost.
void reset_connection(Fd& socket);

}  // namespace pipemorph
