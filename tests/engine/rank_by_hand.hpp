// Rank 0 of a link to an engine, made by hand: what it says and when is the test's.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <future>
#include <optional>

#include "engine/dial.hpp"
#include "two_engines.hpp"

namespace pipemorph {

// Its control connection, until the test says otherwise.
inline Hello hello_by_hand(Transport transport) {
    Hello h;
    h.job = "test";
    h.to_rank = 1;
    h.link = 7;
    h.epoch = 1;
    h.sockets = 1;
    h.transport = transport;
    return h;
}

inline DialResult dial_by_hand(Runtime& runtime, uint16_t port, Hello hello) {
    std::promise<DialResult> said;
    runtime.control.post([&] {
        dial(runtime, resolve("127.0.0.1", port, false).front(), std::move(hello), 60 * kSecond,
             [&](DialResult result) { said.set_value(std::move(result)); });
    });
    return said.get_future().get();
}

// A link that its dialler has confirmed, over which it says frames.
class RankByHand {
  public:
    explicit RankByHand(uint16_t port, const Hello& hello) {
        control_ = dial_by_hand(runtime_, port, hello);
        runtime_.stop();
        CHECK(control_.fd);
        outgoing_mac_.emplace(control_.keys.ours);
        say(ConfirmFrame{hello.transport}, 0);
    }
    void say(const Frame& frame, uint64_t sequence) {
        std::vector<uint8_t> out;
        append_frame(out, encode_frame(frame), sequence, 0, &*outgoing_mac_);
        CHECK(::send(control_.fd.get(), out.data(), out.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(out.size()));
    }
    // The next frame of this kind.
    template <typename F>
    F hear() {
        for (;;) {
            const auto header = decode_frame_header(receive(kFrameHeaderSize));
            CHECK(header);
            const auto frame = decode_frame(header->type, receive(header->body_bytes));
            CHECK(frame);
            receive(kMacSize);
            if (const auto* found = std::get_if<F>(&*frame)) return *found;
        }
    }

  private:
    std::vector<uint8_t> receive(size_t bytes) {
        std::vector<uint8_t> in(bytes);
        for (size_t have = 0; have < bytes;) {
            pollfd readable{control_.fd.get(), POLLIN, 0};
            CHECK(::poll(&readable, 1, 30'000) == 1);
            const ssize_t n = ::recv(control_.fd.get(), &in[have], bytes - have, MSG_DONTWAIT);
            CHECK(n > 0);
            have += static_cast<size_t>(n);
        }
        return in;
    }

    Runtime runtime_{config(0, Transport::tcp)};
    DialResult control_;
    std::optional<FrameMac> outgoing_mac_;
};

}  // namespace pipemorph
