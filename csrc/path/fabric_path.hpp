// Chunks as messages between two endpoints of libfabric, beside a socket.
//
// The socket is the link's own: dialled, authenticated and lost as that of any path. Over it each
// end says where its endpoint is, and how many messages it has taken. A message is one chunk: a
// number, the chunk's header, their seal, the payload and what proves it. It is read into memory of
// the endpoint and copied from there into the slot, so the fabric never gets to know a slot: what
// it still delivers after a fence can reach none. No order of messages is relied on.
//
// All of it is on the reactor's thread, except to open and to close an endpoint: that may take a
// provider long, and others carry on this thread. Another one does it.
#pragma once

#include <memory>
#include <vector>

#include "libfabric/device.hpp"
#include "path/stream_path.hpp"
#include "wire/payload_guard.hpp"
#include "wire/seal.hpp"

namespace pipemorph {

class FabricPath final : public StreamPath {
  public:
    struct Settings {
        uint32_t chunk_bytes = 0;
        // Where the peer takes nothing for this long the path is given up; after half of it no new
        // chunks are entrusted to it.
        int64_t dead_after_ns = 0;
        FabricEndpoint::Wake wake = FabricEndpoint::Wake::descriptor;
    };

    // Endpoints are opened and closed on the thread of `setup`.
    FabricPath(Reactor& reactor, Reactor& setup, std::shared_ptr<PathHost> host, uint32_t index,
               uint32_t epoch, Fd fd, const ConnectionKeys& keys, Integrity integrity,
               std::shared_ptr<FabricDevice> device, Settings settings);

    // Its messages come over no descriptor that another thread could sleep at.
    bool send_here() override { return false; }
    bool read_here(int, int64_t) override { return false; }

  private:
    enum class Kind : uint8_t { probe = 1, chunk = 2 };

    void on_start() override;
    Sent send_some() override;
    void receive_some() override;
    void drop_work() override;

    void guarded(void (FabricPath::*what)());
    void open_endpoint();
    void begin();
    void work();
    void work_again();
    void work_after(int64_t delay_ns);
    void sleep(bool more);
    void look();
    bool hello_received(Bytes body);
    bool counts_received(Bytes body);
    void peer_known();
    void say(Bytes body);
    void say_counts();
    bool flush();
    void send_message(uint32_t block, Kind kind, Bytes header, size_t payload);
    void post_messages();
    void arrived(const FabricEndpoint::Done& done);
    void take_in_order();
    void take(const uint8_t* message);
    Seal seal_of(Hmac& mac, Bytes head);
    bool busy() const;

    const Settings settings_;
    Reactor& setup_;
    const std::shared_ptr<FabricDevice> device_;
    std::shared_ptr<FabricEndpoint> endpoint_;  // none before it is open
    bool connected_ = false;
    bool up_ = false;
    bool suspect_ = false;
    bool peer_polls_ = false;
    bool works_again_ = false;
    uint64_t timer_ = 0;
    int64_t timer_due_ns_ = 0;
    int64_t started_ns_ = 0;
    int64_t looked_ns_ = 0;
    int64_t news_ns_ = 0;      // when polling last brought anything
    int64_t progress_ns_ = 0;  // when the peer last took something, or had nothing to take
    int64_t freed_ns_ = 0;     // when a message was last said to have been sent

    // The socket.
    Sealer says_;
    Sealer hears_;
    std::vector<uint8_t> out_;
    size_t out_done_ = 0;
    std::vector<uint8_t> in_;
    std::optional<std::vector<uint8_t>> peer_address_;

    // Messages out.
    Hmac seals_;
    PayloadGuard guard_out_;
    std::vector<uint32_t> free_blocks_;
    struct Waiting {
        uint32_t block = 0;
        size_t bytes = 0;
    };
    std::vector<Waiting> to_post_;
    uint64_t sent_ = 0;
    uint64_t taken_by_peer_ = 0;

    // Messages in.
    Hmac proves_;
    PayloadGuard guard_in_;
    struct Arrived {
        uint32_t block = 0;
        size_t bytes = 0;
    };
    std::vector<std::optional<Arrived>> early_;  // by number, modulo the window
    std::vector<uint32_t> to_receive_;           // blocks that are to be offered again
    uint64_t taken_ = 0;
    uint64_t taken_said_ = 0;
    uint64_t sent_by_peer_ = 0;  // as far as it has said
    ChunkSink sink_;             // of the chunk that is being taken
};

}  // namespace pipemorph
