#include "fuzz_targets.hpp"

#include <cstdio>
#include <cstdlib>

#include "crypto/crc32c.hpp"
#include "protocol/reliable.hpp"
#include "wire/chunk.hpp"
#include "wire/handshake.hpp"

using namespace pipemorph;

namespace fuzz {
namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::abort();
}

Bytes as_bytes(std::string_view s) {
    return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

const Digest& secret_key() {
    static const Digest key = handshake_key(as_bytes("the job's secret"));
    return key;
}

// Takes the next byte off the front of `input`; 0 at its end.
uint8_t next(Bytes& input) {
    if (input.empty()) return 0;
    const uint8_t first = input.front();
    input = input.subspan(1);
    return first;
}

// As a socket would: what there is, never more than is wanted.
template <typename Side>
void feed(Side& side, Bytes data) {
    while (!data.empty() && !side.failed() && side.wanted() > 0) {
        const size_t n = std::min(data.size(), side.wanted());
        side.feed(data.first(n));
        data = data.subspan(n);
    }
}

constexpr size_t kOpening = 40;
constexpr size_t kRefusal = 3;

std::vector<uint8_t> opening_of(DiallerHandshake& dialler) {
    auto opening = dialler.take_output();
    require(opening.size() == kOpening, "an opening is 40 bytes");
    return opening;
}

// Without the secret: whatever is said, the listener answers with its nonce and a bare refusal.
// As it is, and after the opening of this version, which the corpus may be older than.
void stranger(Bytes input) {
    for (const bool opened : {false, true}) {
        ListenerHandshake listener(secret_key());
        if (opened) {
            DiallerHandshake dialler(secret_key(), Hello{}, "");
            feed(listener, opening_of(dialler));
            require(listener.take_output().size() == kOpening, "an opening is answered");
        }
        feed(listener, input);
        require(!listener.needs_decision() && !listener.done(), "a stranger is not let in");
        const size_t most = opened ? kRefusal : kOpening + kRefusal;
        require(listener.take_output().size() <= most, "a stranger learns nothing");
    }
}

// A peer with the secret, whose hello is the input.
void hello(Bytes input) {
    const auto purpose = static_cast<Purpose>(next(input) % 2 + 1);
    Hello nothing;
    nothing.purpose = purpose;
    DiallerHandshake dialler(secret_key(), nothing, "");
    ListenerHandshake listener(secret_key());
    const auto opening = opening_of(dialler);
    feed(listener, opening);
    const Digest mac = Hmac(secret_key())
                           .update(as_bytes("dialler"))
                           .update(opening)
                           .update(listener.take_output())
                           .update(input)
                           .finish();
    std::vector<uint8_t> message;
    Writer w(message);
    w.u16(static_cast<uint16_t>(input.size()));
    w.raw(input);
    w.raw(mac);
    feed(listener, message);
    if (input.size() > 1024) {
        require(listener.failed(), "a hello has at most 1024 bytes");
        return;
    }
    const auto said = decode_hello(input);
    const bool good = said && said->purpose == purpose;
    require(listener.needs_decision() == good, "a hello is taken if and only if it makes sense");
    if (!good) return;
    require(encode_hello(listener.hello()) == std::vector<uint8_t>(input.begin(), input.end()),
            "a hello is stored as it was sent");
    listener.refuse(Verdict::refused, said->job);
    require(listener.done() && !listener.take_output().empty(), "a refusal is said");
}

// A listener that says what it likes, without the secret or with it; also after a good opening.
void listener_says(Bytes input) {
    for (const bool opened : {false, true}) {
        DiallerHandshake dialler(secret_key(), Hello{}, "boot");
        const auto opening = opening_of(dialler);
        if (opened) {
            ListenerHandshake listener(secret_key());
            feed(listener, opening);
            feed(dialler, listener.take_output());
            require(!dialler.failed(), "an opening of this version is taken");
        }
        feed(dialler, input);
        require(!dialler.done(), "an impostor is not believed");
        require(dialler.take_output().size() < 512, "a dialler says its hello and no more");
    }
    if (const auto reply = decode_reply(input))
        require(encode_reply(*reply) == std::vector<uint8_t>(input.begin(), input.end()),
                "a reply is stored as it was sent");
}

// The frames of one connection, as LinkControl::read takes them apart.
void frames(Bytes input) {
    ReliableStream stream;
    for (int i = 0; i < 8; ++i) stream.send(AckFrame{{7}, {}});
    while (input.size() >= kFrameHeaderSize) {
        const auto header = decode_frame_header(input.first(kFrameHeaderSize));
        if (!header) return;
        require(header->body_bytes <= kMaxFrameBody, "a frame is bounded");
        input = input.subspan(kFrameHeaderSize);
        if (input.size() < header->body_bytes) return;
        const Bytes body = input.first(header->body_bytes);
        input = input.subspan(header->body_bytes);
        const auto frame = decode_frame(header->type, body);
        if (!frame) return;
        const EncodedFrame again = encode_frame(*frame);
        require(again.type == header->type &&
                    again.body == std::vector<uint8_t>(body.begin(), body.end()),
                "a frame says one thing in one way");
        const uint64_t before = stream.last_received();
        const bool plausible = stream.acknowledged(header->acknowledged);
        require(plausible == (header->acknowledged <= 8),
                "what was never sent is not acknowledged");
        if (!plausible) return;
        if (header->sequence == 0) continue;
        const auto verdict = stream.received(header->sequence);
        require((verdict == ReliableStream::Verdict::deliver) == (header->sequence == before + 1),
                "frames are delivered in order and once");
    }
}

// A single body, so that the fuzzer need not find a header for it.
void body(Bytes input) {
    const uint8_t type = next(input);
    if (const auto frame = decode_frame(type, input))
        require(encode_frame(*frame).body == std::vector<uint8_t>(input.begin(), input.end()),
                "a frame says one thing in one way");
}

// The header's checksum is set right, as a hostile peer would.
void chunk(Bytes input) {
    std::vector<uint8_t> header(input.begin(), input.end());
    header.resize(kChunkHeaderSize - 4);
    const uint32_t crc = crc32c(0, header);
    Writer(header).u32(crc);
    const auto h = decode_chunk(header);
    if (!h || h->type != ChunkHeader::Type::chunk) return;
    require(h->index < h->chunks() && h->chunks() <= kMaxChunks, "a chunk is one of its message's");
    require(h->length() > 0 && h->length() <= h->chunk_bytes, "a chunk has a length");
    require(h->offset() + h->length() <= h->message.bytes, "a chunk lies in its message");
    require(h->message.key.direction >= 0 && h->message.key.direction < kDirections,
            "a chunk has a direction");
}

}  // namespace

void handshake(Bytes input) {
    switch (next(input) % 3) {
        case 0:
            return stranger(input);
        case 1:
            return hello(input);
        default:
            return listener_says(input);
    }
}

void control(Bytes input) {
    switch (next(input) % 3) {
        case 0:
            return frames(input);
        case 1:
            return body(input);
        default:
            return chunk(input);
    }
}

Target target(std::string_view name) {
    if (name == "handshake") return handshake;
    if (name == "control") return control;
    return nullptr;
}

}  // namespace fuzz
