#include "wire/handshake.hpp"

#include <random>
#include <set>

#include "check.hpp"

using namespace pipemorph;

namespace {

Digest key_of(const std::string& secret) {
    return handshake_key({reinterpret_cast<const uint8_t*>(secret.data()), secret.size()});
}

Hello some_hello() {
    Hello h;
    h.job = "train/attempt-3";
    h.from_rank = 2;
    h.to_rank = 3;
    h.link = 2;
    h.session.fill(7);
    h.epoch = 4;
    h.sockets = 4;
    h.listen_port = 4242;
    h.received = 99;
    return h;
}

// Moves what `from` has to say to `to`, in pieces as small as the state machine asks for.
template <typename From, typename To>
void pass(From& from, To& to) {
    const auto bytes = from.take_output();
    for (size_t at = 0; at < bytes.size() && !to.failed() && to.wanted() > 0;) {
        const size_t n = std::min(to.wanted(), bytes.size() - at);
        to.feed(Bytes(bytes).subspan(at, n));
        at += n;
    }
}

}  // namespace

TEST(handshake_succeeds) {
    const Digest key = key_of("secret");
    DiallerHandshake dialler(key, some_hello(), "boot-1");
    ListenerHandshake listener(key);
    pass(dialler, listener);
    pass(listener, dialler);
    pass(dialler, listener);
    CHECK(listener.needs_decision());
    const Hello& h = listener.hello();
    CHECK(h.job == "train/attempt-3" && h.from_rank == 2 && h.to_rank == 3 && h.link == 2);
    CHECK(h.epoch == 4 && h.received == 99 && h.listen_port == 4242);
    CHECK(h.host_proof ==
          host_proof(key, "boot-1", dialler.dialler_nonce(), listener.listener_nonce()));
    HelloReply reply;
    reply.transport = Transport::shm;
    reply.unix_name = "somewhere";
    reply.sockets = 3;
    reply.received = 17;
    listener.accept(reply);
    pass(listener, dialler);
    CHECK(dialler.done() && dialler.verdict() == Verdict::accepted);
    CHECK(dialler.reply().unix_name == "somewhere" && dialler.reply().sockets == 3);
    CHECK(dialler.reply().received == 17);
    CHECK(dialler.keys().ours == listener.keys().theirs);
    CHECK(dialler.keys().theirs == listener.keys().ours);
    CHECK(dialler.keys().ours != dialler.keys().theirs && dialler.keys().ours != Digest{});
}

TEST(handshakes_make_keys_that_no_other_has) {
    std::set<Digest> keys;
    for (const char* secret : {"secret", "secret", "another"}) {
        DiallerHandshake dialler(key_of(secret), some_hello(), "");
        ListenerHandshake listener(key_of(secret));
        pass(dialler, listener);
        pass(listener, dialler);
        pass(dialler, listener);
        listener.accept({});
        pass(listener, dialler);
        CHECK(dialler.done());
        keys.insert(dialler.keys().ours);
        keys.insert(dialler.keys().theirs);
    }
    CHECK(keys.size() == 6);
}

// Magic and version, too: an attacker cannot force an older version on the two ends.
TEST(every_tampered_byte_of_an_opening_is_noticed) {
    const Digest key = key_of("secret");
    for (const bool of_dialler : {true, false}) {
        for (size_t i = 0;; ++i) {
            DiallerHandshake dialler(key, some_hello(), "");
            ListenerHandshake listener(key);
            auto opening = dialler.take_output();
            if (i >= opening.size()) break;
            if (of_dialler) opening[i] ^= 1;
            listener.feed(opening);
            auto answer = listener.take_output();
            if (!of_dialler && !answer.empty()) answer[i] ^= 1;
            dialler.feed(answer);
            pass(dialler, listener);
            CHECK(!listener.needs_decision());
        }
    }
}

TEST(handshake_refusal_carries_its_reason) {
    const Digest key = key_of("secret");
    DiallerHandshake dialler(key, some_hello(), "");
    ListenerHandshake listener(key);
    pass(dialler, listener);
    pass(listener, dialler);
    pass(dialler, listener);
    listener.refuse(Verdict::refused, "wrong job");
    pass(listener, dialler);
    CHECK(dialler.done() && dialler.verdict() == Verdict::refused);
    CHECK(dialler.refusal() == "wrong job");
}

TEST(handshake_with_another_secret_fails_and_tells_nothing) {
    DiallerHandshake dialler(key_of("secret"), some_hello(), "");
    ListenerHandshake listener(key_of("Secret"));
    pass(dialler, listener);
    pass(listener, dialler);
    pass(dialler, listener);
    CHECK(listener.failed() && listener.unauthenticated() && !listener.needs_decision());
    const auto said = listener.take_output();
    CHECK(said == (std::vector<uint8_t>{static_cast<uint8_t>(Verdict::unauthenticated), 0, 0}));
    dialler.feed(said);
    CHECK(dialler.failed() && dialler.failure().find("secret") != std::string::npos);
}

TEST(an_impostor_without_the_secret_cannot_accept) {
    DiallerHandshake dialler(key_of("secret"), some_hello(), "");
    ListenerHandshake impostor(key_of("guess"));
    pass(dialler, impostor);
    pass(impostor, dialler);
    dialler.take_output();
    std::vector<uint8_t> yes;
    Writer w(yes);
    const auto reply = encode_reply({});
    w.u8(0);
    w.u16(static_cast<uint16_t>(reply.size()));
    w.raw(reply);
    for (int i = 0; i < 32; ++i) w.u8(0);
    dialler.feed(Bytes(yes).first(3));
    dialler.feed(Bytes(yes).subspan(3));
    CHECK(dialler.failed() && dialler.failure().find("prove") != std::string::npos);
}

// The attacker knows no secret but plays everything it hears back to its speaker, or plays one
// side of an honest handshake to another instance.
TEST(reflected_and_replayed_messages_fail) {
    const Digest key = key_of("secret");
    {
        DiallerHandshake dialler(key, some_hello(), "");
        const auto opening = dialler.take_output();
        dialler.feed(opening);  // its own nonce as the listener's
        const auto hello = dialler.take_output();
        CHECK(!hello.empty());
        dialler.feed(Bytes(hello).first(3));
        if (!dialler.failed()) dialler.feed(Bytes(hello).subspan(3, dialler.wanted()));
        CHECK(!dialler.done());
    }
    {
        // The dialler's MAC in place of the listener's: same key, same nonces, other role.
        DiallerHandshake dialler(key, some_hello(), "");
        ListenerHandshake listener(key);
        pass(dialler, listener);
        pass(listener, dialler);
        const auto hello = dialler.take_output();
        std::vector<uint8_t> forged = {0, 0, 0};
        const auto reply = encode_reply({});
        forged[1] = static_cast<uint8_t>(reply.size());
        forged.insert(forged.end(), reply.begin(), reply.end());
        forged.insert(forged.end(), hello.end() - 32, hello.end());
        dialler.feed(Bytes(forged).first(3));
        dialler.feed(Bytes(forged).subspan(3));
        CHECK(dialler.failed());
    }
    {
        // A recorded hello against a fresh listener: its nonce is another one.
        DiallerHandshake dialler(key, some_hello(), "");
        ListenerHandshake first(key);
        const auto opening = dialler.take_output();
        first.feed(opening);
        dialler.feed(first.take_output());
        const auto hello = dialler.take_output();
        ListenerHandshake second(key);
        second.feed(opening);
        second.take_output();
        second.feed(Bytes(hello).first(2));
        second.feed(Bytes(hello).subspan(2));
        CHECK(second.failed() && second.unauthenticated());
    }
}

TEST(every_tampered_byte_of_a_hello_is_noticed) {
    const Digest key = key_of("secret");
    for (size_t i = 2;; ++i) {
        DiallerHandshake dialler(key, some_hello(), "boot");
        ListenerHandshake listener(key);
        pass(dialler, listener);
        pass(listener, dialler);
        auto hello = dialler.take_output();
        if (i >= hello.size()) break;
        hello[i] ^= 1;
        listener.feed(Bytes(hello).first(2));
        listener.feed(Bytes(hello).subspan(2));
        CHECK(listener.failed() && !listener.needs_decision());
    }
}

// A connection's purpose is said before and in the hello, and is in the transcript.
TEST(a_control_hello_does_not_open_a_data_connection) {
    const Digest key = key_of("secret");
    DiallerHandshake dialler(key, some_hello(), "");
    ListenerHandshake listener(key);
    auto opening = dialler.take_output();
    opening[6] = static_cast<uint8_t>(Purpose::data);
    listener.feed(opening);
    dialler.feed(listener.take_output());
    pass(dialler, listener);
    CHECK(listener.failed() && listener.unauthenticated());
}

TEST(garbage_never_gets_past_the_listener) {
    std::mt19937 random(4);
    const Digest key = key_of("secret");
    for (int round = 0; round < 2000; ++round) {
        ListenerHandshake listener(key);
        DiallerHandshake honest(key, some_hello(), "");
        if (round % 2 == 0) listener.feed(honest.take_output());  // a good start, then garbage
        for (int step = 0; step < 20 && !listener.failed() && listener.wanted() > 0; ++step) {
            std::vector<uint8_t> noise(std::min<size_t>(listener.wanted(), 1 + random() % 64));
            for (auto& b : noise) b = static_cast<uint8_t>(random());
            listener.feed(noise);
        }
        CHECK(!listener.needs_decision());
    }
}

TEST(host_proofs_differ_by_boot_and_by_connection) {
    const Digest key = key_of("secret");
    Nonce a{};
    Nonce b{};
    b[0] = 1;
    CHECK(host_proof(key, "x", a, b) == host_proof(key, "x", a, b));
    CHECK(host_proof(key, "x", a, b) != host_proof(key, "y", a, b));
    CHECK(host_proof(key, "x", a, b) != host_proof(key, "x", b, b));
    CHECK(host_proof(key, "x", a, b) != host_proof(key_of("other"), "x", a, b));
}
