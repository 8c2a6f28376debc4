#include "os/socket.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "os/clock.hpp"

namespace pipemorph {
namespace {

void set_option(const Fd& socket, int level, int option, int value) {
    setsockopt(socket.get(), level, option, &value, sizeof value);
}

Fd make_socket(const Address& address) {
    return Fd::made_by(
        [&] { return ::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
}

uint16_t port_of(const sockaddr_storage& s) {
    if (s.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(s).sin_port);
    if (s.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(s).sin6_port);
    return 0;
}

}  // namespace

std::string Address::text(bool with_port) const {
    if (family() == AF_UNIX) return "this host";
    char host[INET6_ADDRSTRLEN] = "?";
    if (family() == AF_INET)
        inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, host,
                  sizeof host);
    else if (family() == AF_INET6)
        inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr, host,
                  sizeof host);
    if (!with_port) return host;
    const std::string port = ':' + std::to_string(port_of(storage));
    // Not "[" + std::string: gcc 12 warns of a false overlap.
    return family() == AF_INET6 ? std::string("[").append(host) + "]" + port : host + port;
}

Address Address::with_port(uint16_t port) const {
    Address out = *this;
    if (family() == AF_INET) reinterpret_cast<sockaddr_in&>(out.storage).sin_port = htons(port);
    if (family() == AF_INET6) reinterpret_cast<sockaddr_in6&>(out.storage).sin6_port = htons(port);
    return out;
}

std::vector<Address> resolve(const std::string& host, uint16_t port, bool to_listen) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
    addrinfo* list = nullptr;
    const int rc = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                               &hints, &list);
    if (rc != 0) throw EngineError("cannot resolve host '" + host + "': " + gai_strerror(rc));
    std::vector<Address> out;
    for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
        Address address;
        std::memcpy(&address.storage, a->ai_addr, a->ai_addrlen);
        address.size = a->ai_addrlen;
        out.push_back(address);
    }
    freeaddrinfo(list);
    return out;
}

static bool is_numeric(const std::string& host) {
    in6_addr any{};
    return inet_pton(AF_INET, host.c_str(), &any) == 1 ||
           inet_pton(AF_INET6, host.c_str(), &any) == 1;
}

std::shared_ptr<Lookup> Lookup::begin(const std::string& host, uint16_t port) {
    auto lookup = std::make_shared<Lookup>();
    const auto run = [lookup, host, port] {
        try {
            lookup->end(resolve(host, port, false), "");
        } catch (const std::exception& e) {
            lookup->end({}, e.what());
        }
    };
    if (is_numeric(host)) {  // no name service is needed
        run();
        return lookup;
    }
    try {
        std::thread(run).detach();
    } catch (const std::system_error& e) {
        throw EngineError("cannot resolve host '" + host + "': no thread for it: " + e.what());
    }
    return lookup;
}

void Lookup::end(std::vector<Address> found, std::string error) {
    const std::lock_guard lock(mu_);
    found_ = std::move(found);
    error_ = std::move(error);
    ended_ = true;
    changed_.notify_all();
}

std::optional<std::vector<Address>> Lookup::wait(int64_t ns) {
    std::unique_lock lock(mu_);
    if (!ended_) wait_ns(changed_, lock, ns);
    if (!ended_) return std::nullopt;
    if (!error_.empty()) throw EngineError(error_);
    return found_;
}

Address abstract_unix(std::string_view name) {
    Address out;
    auto& un = reinterpret_cast<sockaddr_un&>(out.storage);
    un.sun_family = AF_UNIX;
    const size_t n = std::min(name.size(), sizeof un.sun_path - 1);
    std::memcpy(un.sun_path + 1, name.data(), n);
    out.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
    return out;
}

Fd listen_on(const Address& address) {
    Fd fd = make_socket(address);
    if (!fd) throw EngineError(std::string("socket: ") + std::strerror(errno));
    if (address.family() != AF_UNIX) set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    // "::" is every address of the host, whatever the system's default.
    if (address.family() == AF_INET6) set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(fd.get(), address.get(), address.size) != 0 || ::listen(fd.get(), 512) != 0)
        throw EngineError("cannot listen on " + address.text() + ": " + std::strerror(errno));
    return fd;
}

uint16_t local_port(const Fd& socket) {
    sockaddr_storage s{};
    socklen_t size = sizeof s;
    if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&s), &size) != 0) return 0;
    return port_of(s);
}

Address peer_address(const Fd& socket) {
    Address out;
    out.size = sizeof out.storage;
    if (getpeername(socket.get(), reinterpret_cast<sockaddr*>(&out.storage), &out.size) != 0)
        return {};
    return out;
}

Fd start_connect(const Address& address, uint32_t segment_bytes) {
    Fd fd = make_socket(address);
    if (!fd) return fd;
    if (segment_bytes > 0 && address.family() != AF_UNIX)
        set_option(fd, IPPROTO_TCP, TCP_MAXSEG, static_cast<int>(segment_bytes));
    if (::connect(fd.get(), address.get(), address.size) != 0 && errno != EINPROGRESS) {
        const int error = errno;
        fd.reset();
        errno = error;
    }
    return fd;
}

int connect_error(const Fd& socket) {
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
    return error;
}

void set_no_delay(const Fd& socket) {
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

bool is_local(const Fd& socket) {
    Address own;
    own.size = sizeof own.storage;
    if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own.storage), &own.size) != 0)
        return false;
    return own.text(false) == peer_address(socket).text(false);
}

void set_send_buffer(const Fd& socket, int bytes) {
    set_option(socket, SOL_SOCKET, SO_SNDBUF, bytes);
}

void set_unacked_limit(const Fd& socket, int64_t ns) {
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(ns / kMillisecond));
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 5);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 2);
}

void reset_connection(Fd& socket) {
    const linger now{1, 0};
    setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
    socket.reset();
}

}  // namespace pipemorph
