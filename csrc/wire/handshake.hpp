// Who may connect. Pure state machines: bytes in, bytes out, no sockets.
//
//   dialler                                   listener
//     magic, version, purpose, nonce_d  ───▶
//                                       ◀───  magic, version, nonce_l
//     hello, HMAC("dialler", ...)       ───▶
//                                       ◀───  verdict, reply, HMAC("listener", ...)
//
// Both MACs cover the whole transcript so far, from the first byte on, and the role, so a reflected
// or replayed message never verifies. The keys for what follows on the connection come from the
// second, and so from both nonces. The listener tells an unauthenticated dialler nothing but its
// nonce; names, addresses and counters come only in `reply`, after the dialler's MAC has been
// checked.
#pragma once

#include <optional>
#include <string>

#include "crypto/hmac.hpp"
#include "wire/bytes.hpp"
#include "wire/frames.hpp"
#include "wire/payload_guard.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

using Nonce = std::array<uint8_t, 32>;
using Session = std::array<uint8_t, 16>;

enum class Purpose : uint8_t { control = 1, data = 2 };

struct Hello {
    Purpose purpose = Purpose::control;
    bool resume = false;  // control: an old link comes back
    std::string job;
    uint32_t from_rank = 0;
    uint32_t to_rank = 0;
    uint32_t link = 0;
    Session session{};   // chosen by the dialler, once per link
    uint32_t path = 0;   // data only
    uint32_t epoch = 0;  // of the path or of the control connection: only ever rises
    Transport transport = Transport::any;
    Integrity integrity = Integrity::crc;  // has to be the listener's
    Digest host_proof{};  // HMAC over the machine's boot id: says "same host" without saying which
    uint16_t sockets = 0;
    uint16_t listen_port = 0;
    uint64_t received = 0;      // last control frame received: where to resume
    uint16_t rails = 0;         // how many the dialler could use; their addresses come later
    bool require_rdma = false;  // it will not fall back to TCP
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
    unauthenticated = 1,  // said without a MAC, and without a reason
    refused = 2,
    not_yet = 3,  // refused for now: the dialler may try again
};

// The key for everything here, so that the job's secret is never used bare.
Digest handshake_key(Bytes secret);
Digest host_proof(const Digest& key, std::string_view boot_id, const Nonce& dialler,
                  const Nonce& listener);

// The part both ends share: bytes are fed exactly as many as wanted, so nothing that follows the
// handshake on the connection is ever swallowed.
class Handshake {
  public:
    size_t wanted() const { return need_ - in_.size(); }
    bool feed(Bytes data);  // false: failed, see `failure()`
    std::vector<uint8_t> take_output();
    bool done() const { return done_; }
    bool failed() const { return !failure_.empty(); }
    const std::string& failure() const { return failure_; }
    // For what follows, once both ends have accepted.
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
    // `boot_id` empty: offer no proof of the host.
    DiallerHandshake(const Digest& key, Hello hello, std::string boot_id);
    // The listener has said that it is an engine, and knows who asks.
    bool met() const { return step_ != Step::nonce; }
    // It has failed since the peer is an engine of another version.
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
    // The dialler is authenticated and waits for one of the two below.
    bool needs_decision() const { return step_ == Step::decide; }
    const Hello& hello() const { return hello_; }
    void accept(const HelloReply& reply);
    void refuse(Verdict verdict, std::string_view reason);
    // Whether the peer failed to authenticate (as opposed to: sent garbage, never came so far).
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
