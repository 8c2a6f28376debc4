#include "wire/handshake.hpp"

#include <utility>

#include "wire/fields.hpp"

namespace pipemorph {
namespace {

constexpr uint32_t kMagic = 0x4850'4d50;  // "PMPH"
constexpr uint16_t kVersion = 9;
constexpr size_t kOpeningBytes = 4 + 2 + 1 + 1 + 32;
constexpr size_t kMaxHello = 1024;
constexpr size_t kMaxReply = 1024;
constexpr size_t kMaxJob = 512;
constexpr size_t kMacBytes = 32;

Bytes as_bytes(std::string_view s) {
    return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

std::vector<uint8_t> opening(Purpose purpose, const Nonce& nonce) {
    std::vector<uint8_t> out;
    Writer w(out);
    w.u32(kMagic);
    w.u16(kVersion);
    w.u8(static_cast<uint8_t>(purpose));
    w.u8(0);
    w.raw(nonce);
    return out;
}

}  // namespace

void fields(auto& io, Is<Hello> auto& h) {
    io(h.purpose, h.resume, h.job, h.from_rank, h.to_rank, h.link, h.session, h.path, h.epoch,
       h.transport, h.integrity, h.host_proof, h.sockets, h.listen_port, h.received, h.rails,
       h.require_rdma);
}

std::vector<uint8_t> encode_hello(const Hello& h) {
    std::vector<uint8_t> out;
    FieldWriter io(out);
    fields(io, h);
    return out;
}

std::optional<Hello> decode_hello(Bytes data) {
    FieldReader io(data);
    Hello h;
    fields(io, h);
    if (!io.complete() || h.purpose < Purpose::control || h.purpose > Purpose::data ||
        h.transport > Transport::rdma || h.integrity < Integrity::crc ||
        h.integrity > Integrity::aead || h.job.size() > kMaxJob)
        return std::nullopt;
    return h;
}

std::vector<uint8_t> encode_reply(const HelloReply& reply) {
    std::vector<uint8_t> out;
    Writer w(out);
    w.u8(static_cast<uint8_t>(reply.transport));
    w.text(reply.unix_name);
    w.u16(reply.sockets);
    w.u16(reply.listen_port);
    w.u64(reply.received);
    w.u8(static_cast<uint8_t>(reply.rails.size()));
    for (const auto& gid : reply.rails) w.raw(gid);
    return out;
}

std::optional<HelloReply> decode_reply(Bytes data) {
    Reader r(data);
    HelloReply reply;
    const uint8_t transport = r.u8();
    reply.unix_name = r.text(100);
    reply.sockets = r.u16();
    reply.listen_port = r.u16();
    reply.received = r.u64();
    const size_t rails = r.u8();
    if (rails > kMaxRails) return std::nullopt;
    for (size_t i = 0; i < rails; ++i) reply.rails.push_back(r.fixed<16>());
    if (!r.complete() || transport < 1 || transport > 3) return std::nullopt;
    reply.transport = static_cast<Transport>(transport);
    return reply;
}

Digest handshake_key(Bytes secret) {
    return Hmac(secret).update(as_bytes("pipemorph engine handshake v1")).finish();
}

Digest host_proof(const Digest& key, std::string_view boot_id, const Nonce& dialler,
                  const Nonce& listener) {
    return Hmac(key)
        .update(as_bytes("host"))
        .update(dialler)
        .update(listener)
        .update(as_bytes(boot_id))
        .finish();
}

bool Handshake::feed(Bytes data) {
    if (failed()) return false;
    in_.insert(in_.end(), data.begin(), data.end());
    while (!failed() && !done_ && need_ > 0 && in_.size() == need_)
        if (!advance()) break;
    return !failed();
}

std::vector<uint8_t> Handshake::take_output() {
    return std::exchange(out_, {});
}

bool Handshake::fail(std::string why) {
    failure_ = std::move(why);
    need_ = 0;
    in_.clear();
    return false;
}

void Handshake::expect(size_t bytes) {
    in_.clear();
    need_ = bytes;
}

Digest Handshake::dialler_mac(Bytes hello) const {
    return Hmac(key_).update(as_bytes("dialler")).update(openings_).update(hello).finish();
}

Digest Handshake::listener_mac(Bytes hello, Verdict verdict, Bytes reply) const {
    const uint8_t said = static_cast<uint8_t>(verdict);
    return Hmac(key_)
        .update(as_bytes("listener"))
        .update(dialler_mac(hello))
        .update({&said, 1})
        .update(reply)
        .finish();
}

void Handshake::make_keys(const Digest& listener_mac, bool dials) {
    const auto key_of = [&](std::string_view who) {
        return Hmac(key_).update(as_bytes(who)).update(listener_mac).finish();
    };
    keys_ = {key_of("frames of the dialler"), key_of("frames of the listener")};
    if (!dials) std::swap(keys_.ours, keys_.theirs);
}

DiallerHandshake::DiallerHandshake(const Digest& key, Hello hello, std::string boot_id)
    : Handshake(key), hello_(std::move(hello)), boot_id_(std::move(boot_id)) {
    purpose_ = hello_.purpose;
    fill_random(dialler_nonce_);
    out_ = openings_ = opening(purpose_, dialler_nonce_);
    expect(kOpeningBytes);
}

bool DiallerHandshake::advance() {
    Reader r(in_);
    switch (step_) {
        case Step::nonce: {
            if (r.u32() != kMagic) return fail("the peer is not a PipeMorph engine");
            const uint16_t version = r.u16();
            other_version_ = version != kVersion;
            if (other_version_)
                return fail("the peer speaks protocol version " + std::to_string(version) +
                            ", this engine " + std::to_string(kVersion) +
                            ": run one release of PipeMorph on all ranks");
            r.u16();
            listener_nonce_ = r.fixed<32>();
            openings_.insert(openings_.end(), in_.begin(), in_.end());
            if (!boot_id_.empty())
                hello_.host_proof = host_proof(key_, boot_id_, dialler_nonce_, listener_nonce_);
            hello_bytes_ = encode_hello(hello_);
            Writer w(out_);
            w.u16(static_cast<uint16_t>(hello_bytes_.size()));
            w.raw(hello_bytes_);
            w.raw(dialler_mac(hello_bytes_));
            step_ = Step::verdict;
            expect(3);
            return true;
        }
        case Step::verdict: {
            const uint8_t verdict = r.u8();
            const size_t size = r.u16();
            if (verdict > 3 || size > kMaxReply) return fail("the peer's answer is malformed");
            verdict_ = static_cast<Verdict>(verdict);
            if (verdict_ == Verdict::unauthenticated)
                return fail("refused: authentication failed (is the job's secret the same?)");
            step_ = Step::reply;
            expect(size + kMacBytes);
            return true;
        }
        case Step::reply: {
            const Bytes body = r.raw(in_.size() - kMacBytes);
            const Digest mac = r.fixed<kMacBytes>();
            const Digest expected = listener_mac(hello_bytes_, verdict_, body);
            if (!equal_constant_time(mac, expected))
                return fail("the peer could not prove that it has the job's secret");
            if (verdict_ == Verdict::accepted) {
                const auto reply = decode_reply(body);
                if (!reply) return fail("the peer's answer is malformed");
                reply_ = *reply;
                make_keys(expected, true);
            } else {
                refusal_.assign(body.begin(), body.end());
            }
            done_ = true;
            need_ = 0;
            in_.clear();
            return true;
        }
    }
    return false;
}

ListenerHandshake::ListenerHandshake(const Digest& key) : Handshake(key) {
    expect(kOpeningBytes);
}

bool ListenerHandshake::advance() {
    Reader r(in_);
    switch (step_) {
        case Step::nonce: {
            if (r.u32() != kMagic) return fail("not a PipeMorph connection");
            const uint16_t version = r.u16();
            const uint8_t purpose = r.u8();
            r.u8();
            if (version != kVersion)
                return fail("protocol version " + std::to_string(version) +
                            ", this engine speaks " + std::to_string(kVersion));
            if (purpose < 1 || purpose > 2) return fail("unknown kind of connection");
            purpose_ = static_cast<Purpose>(purpose);
            dialler_nonce_ = r.fixed<32>();
            fill_random(listener_nonce_);
            out_ = opening(purpose_, listener_nonce_);
            openings_ = in_;
            openings_.insert(openings_.end(), out_.begin(), out_.end());
            step_ = Step::length;
            expect(2);
            return true;
        }
        case Step::length: {
            const size_t size = r.u16();
            if (size > kMaxHello) return fail("hello too long");
            step_ = Step::hello;
            expect(size + kMacBytes);
            return true;
        }
        case Step::hello: {
            const Bytes body = r.raw(in_.size() - kMacBytes);
            const Digest mac = r.fixed<kMacBytes>();
            // No field of the body is used before its MAC was checked.
            const bool genuine = equal_constant_time(mac, dialler_mac(body));
            const auto hello = genuine ? decode_hello(body) : std::nullopt;
            if (!hello || hello->purpose != purpose_) {
                unauthenticated_ = true;
                out_ = {static_cast<uint8_t>(Verdict::unauthenticated), 0, 0};
                return fail("authentication failed (wrong job secret)");
            }
            hello_bytes_.assign(body.begin(), body.end());
            hello_ = *hello;
            step_ = Step::decide;
            expect(0);
            return true;
        }
        case Step::decide:
        case Step::end:
            break;
    }
    return false;
}

void ListenerHandshake::answer(Verdict verdict, Bytes reply) {
    Writer w(out_);
    w.u8(static_cast<uint8_t>(verdict));
    w.u16(static_cast<uint16_t>(reply.size()));
    w.raw(reply);
    const Digest mac = listener_mac(hello_bytes_, verdict, reply);
    w.raw(mac);
    if (verdict == Verdict::accepted) make_keys(mac, false);
    step_ = Step::end;
    done_ = true;
}

void ListenerHandshake::accept(const HelloReply& reply) {
    answer(Verdict::accepted, encode_reply(reply));
}

void ListenerHandshake::refuse(Verdict verdict, std::string_view reason) {
    answer(verdict, as_bytes(reason.substr(0, kMaxReply)));
}

}  // namespace pipemorph
