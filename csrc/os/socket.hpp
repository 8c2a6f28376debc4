// TCP and abstract unix sockets, non-blocking and close-on-exec throughout.
#pragma once

#include <sys/socket.h>

#include <cstdint>
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

// May block on DNS: call it on the application's thread. Throws EngineError.
std::vector<Address> resolve(const std::string& host, uint16_t port, bool to_listen);
// A name in the abstract namespace: no file, gone with its last descriptor.
Address abstract_unix(std::string_view name);

Fd listen_on(const Address& address);
uint16_t local_port(const Fd& socket);
Address peer_address(const Fd& socket);

// Starts connecting; errno is EINPROGRESS or 0 on success. An invalid Fd means it failed at once.
Fd start_connect(const Address& address);
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
