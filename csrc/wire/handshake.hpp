// Handshake of connections, with mutual authentication. Pure state machines: bytes in, bytes out,
// no sockets.
//
//   dialler                                   listener
//     magic, version, purpose, nonce_d  ───▶
//                                       ◀───  magic, version, nonce_l
//     hello, HMAC("dialler", ...)       ───▶
//                                       ◀───  verdict, reply, HMAC("listener", ...)
//
// Both MACs cover the whole transcript so far, from the first byte on, and the role, so a reflected
// or replayed message never verifies. The keys of the connection derive from the second MAC, and so
// from both nonces. An unauthenticated dialler gets only the listener's nonce; names, addresses and
// counters follow in `reply`, after the check of the dialler's MAC.
#pragma once

#include <optional>
#include <string>

#include "crypto/hmac.hpp"
#include "wire/bytes.hpp"
#include "wire/frames.hpp"
#include "wire/mac.hpp"
#include "wire/payload_guard.hpp"

namespace pipemorph {

using Nonce = std::array<uint8_t, 32>;
using Session = std::array<uint8_t, 16>;

enum class Purpose : uint8_t { control = 1, data = 2 };

struct Hello {
    Purpose purpose = Purpose::control;
    bool resume = false;  // control: an existing link reconnects
    std::string job;
    uint32_t from_rank = 0;
    uint32_t to_rank = 0;
    uint32_t link = 0;
    Session session{};   // chosen by the dialler, once per link
    uint32_t path = 0;   // data only
    uint32_t epoch = 0;  // of the path or of the control connection: only ever rises
    Transport transport = Transport::any;
    Integrity integrity = Integrity::crc;  // must equal the listener's
    Digest host_proof{};  // HMAC over the machine's boot id: proves "same host", hides which
    uint16_t sockets = 0;
    uint16_t listen_port = 0;
    uint64_t received = 0;      // last control frame received, for the resumption
    uint16_t rails = 0;         // number that the dialler could use; their addresses follow later
    bool require_rdma = false;  // no fallback to TCP
};

constexpr size_t kMaxRails = 16;

struct HelloReply {
    Transport transport = Transport::tcp;
    std::string unix_name;  // abstract socket for shared memory
    uint16_t sockets = 0;
    uint16_t listen_port = 0;
    uint64_t received = 0;
    std::vector<std::array<uint8_t, 16>> rails;  // their GIDs, to pair them by
};

std::vector<uint8_t> encode_hello(const Hello& hello);
std::optional<Hello> decode_hello(Bytes data);
std::vector<uint8_t> encode_reply(const HelloReply& reply);
std::optional<HelloReply> decode_reply(Bytes data);

enum class Verdict : uint8_t {
    accepted = 0,
    unauthenticated = 1,  // sent without a MAC and without a reason
    refused = 2,
    not_yet = 3,  // refused for now: the dialler may try again
};

// Key of all handshakes, derived from the job's secret, which is not used directly.
Digest handshake_key(Bytes secret);
Digest host_proof(const Digest& key, std::string_view boot_id, const Nonce& dialler,
                  const Nonce& listener);

// Common part of both ends. Exactly the wanted bytes are fed, so that no byte after the handshake
// is consumed.
class Handshake {
  public:
    size_t wanted() const { return need_ - in_.size(); }
    bool feed(Bytes data);  // false: failed, see `failure()`
    std::vector<uint8_t> take_output();
    bool done() const { return done_; }
    bool failed() const { return !failure_.empty(); }
    const std::string& failure() const { return failure_; }
    // Keys of the connection, once both ends have accepted.
    const ConnectionKeys& keys() const { return keys_; }
    const Nonce& dialler_nonce() const { return dialler_nonce_; }
    const Nonce& listener_nonce() const { return listener_nonce_; }
    virtual ~Handshake() = default;

  protected:
    explicit Handshake(const Digest& key) : key_(key) {}
    virtual bool advance() = 0;
    bool fail(std::string why);
    void expect(size_t bytes);
    Digest dialler_mac(Bytes hello) const;
    Digest listener_mac(Bytes hello, Verdict verdict, Bytes reply) const;
    void make_keys(const Digest& listener_mac, bool dials);

    Digest key_;
    Purpose purpose_ = Purpose::control;
    std::vector<uint8_t> openings_;  // the dialler's, the listener's
    Nonce dialler_nonce_{};
    Nonce listener_nonce_{};
    ConnectionKeys keys_;
    std::vector<uint8_t> in_;
    std::vector<uint8_t> out_;
    size_t need_ = 0;
    bool done_ = false;
    std::string failure_;
};

class DiallerHandshake : public Handshake {
  public:
    // `boot_id`: empty to offer no proof of the host.
    DiallerHandshake(const Digest& key, Hello hello, std::string boot_id);
    // True if the listener has answered as an engine.
    bool met() const { return step_ != Step::nonce; }
    // True if it has failed because the peer has another version.
    bool other_version() const { return other_version_; }
    Verdict verdict() const { return verdict_; }
    const std::string& refusal() const { return refusal_; }
    const HelloReply& reply() const { return reply_; }

  protected:
    bool advance() override;

  private:
    enum class Step { nonce, verdict, reply };
    Step step_ = Step::nonce;
    bool other_version_ = false;
    Hello hello_;
    std::string boot_id_;
    std::vector<uint8_t> hello_bytes_;
    Verdict verdict_ = Verdict::accepted;
    std::string refusal_;
    HelloReply reply_;
};

class ListenerHandshake : public Handshake {
  public:
    explicit ListenerHandshake(const Digest& key);
    // True if the dialler is authenticated and waits for `accept` or `refuse`.
    bool needs_decision() const { return step_ == Step::decide; }
    const Hello& hello() const { return hello_; }
    void accept(const HelloReply& reply);
    void refuse(Verdict verdict, std::string_view reason);
    // True if the peer's authentication failed, as opposed to an earlier error.
    bool unauthenticated() const { return unauthenticated_; }

  protected:
    bool advance() override;

  private:
    enum class Step { nonce, length, hello, decide, end };
    void answer(Verdict verdict, Bytes reply);
    Step step_ = Step::nonce;
    Hello hello_;
    std::vector<uint8_t> hello_bytes_;
    bool unauthenticated_ = false;
};

}  // namespace pipemorph
