// What carries chunks: one live connection of one path of a link. A TCP socket, a shared-memory
// pair, a queue pair on a rail: each is a DataPath, and the link neither knows nor cares which.
//
// A path lives on one reactor's thread, although others may send and read for it, and dies with its
// first error. The link then fences its epoch and, if it dials, makes a new one with the next
// epoch: nothing is ever repaired in place.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "os/reactor.hpp"
#include "protocol/inbox.hpp"
#include "protocol/outbox.hpp"

namespace pipemorph {

class VerbsDevice;

// What a path may ask of its link. Any thread.
class PathHost {
  public:
    virtual ~PathHost() = default;

    virtual std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) = 0;
    virtual ChunkSink begin_chunk(const ChunkHeader& header) = 0;
    virtual void finish_chunk(const ChunkSink& sink, bool intact) = 0;
    // A chunk's header or payload is not the peer's, or not as it said it: its seal or MAC is
    // wrong.
    virtual void refused() = 0;
    // A chunk of a fenced epoch came in and was dropped.
    virtual void stale_chunk() = 0;
    virtual void path_lost(uint32_t path, uint32_t epoch, const std::string& why) = 0;
    // Bytes of payloads that the engine itself moved from memory to memory, which is counted.
    virtual void copied_out(uint64_t) {}
    virtual void copied_in(uint64_t) {}
    // The peer says what it must never say: nothing it sends can be trusted any more.
    virtual void protocol_error(const std::string& why) = 0;

    // Shared memory only.
    struct Segment {
        uint32_t number = 0;
        std::shared_ptr<Memory> memory;
    };
    virtual std::optional<Segment> next_segment_to_offer() = 0;
    virtual void segment_offered(uint32_t number, uint64_t bytes, Fd fd) = 0;
    // Where a granted slot is mapped here.
    virtual std::shared_ptr<Memory> peer_segment(uint32_t number) = 0;

    // Rails only.
    struct RemoteSlot {
        uint64_t address = 0;
        uint64_t bytes = 0;
        uint32_t key = 0;
    };
    // Where a granted slot lies for the path's rail; nothing if the peer never said.
    virtual std::optional<RemoteSlot> remote_slot(uint32_t, const SlotGrant&) {
        return std::nullopt;
    }
    // The device's key for a payload that lies where its card may read it, as long as its message
    // is held; nothing if it has to be staged.
    virtual std::optional<uint32_t> payload_key(const VerbsDevice&, const uint8_t*) {
        return std::nullopt;
    }
    // For more staging memory. False: the link has enough of it.
    virtual bool claim_staging(uint64_t) { return true; }
    virtual void disclaim_staging(uint64_t) {}
    // It carries: a probe was acknowledged.
    virtual void path_up(uint32_t, uint32_t) {}
    // It has gone quiet, or has come back from that.
    virtual void path_suspect(uint32_t, uint32_t, bool) {}
    // What it let in may reach slots for ever: it cannot be retired.
    virtual void path_stuck(const std::string&) {}
    // How fast it is in bytes per second while busy (0: not known), and how many bytes it may have
    // under way.
    struct Pace {
        double bytes_per_second = 0.0;
        uint64_t window = 0;
    };
    // It is up, and says with `chunk_delivered` what has got through: it is given no more than its
    // window.
    virtual Pace pace(uint32_t, uint32_t) { return {}; }
    // Its memory holds no more bytes under way than that, whatever its window.
    virtual void path_limited(uint32_t, uint32_t, uint64_t) {}
    // The oldest chunk that it has under way.
    virtual Pace chunk_delivered(uint32_t, uint32_t) { return {}; }
    // Bytes per second while busy, and the round trip of a probe that met no traffic.
    virtual void path_measured(uint32_t, uint32_t, double, std::optional<int64_t>) {}
};

class DataPath : public std::enable_shared_from_this<DataPath> {
  public:
    virtual ~DataPath() = default;

    // Any thread; each is carried out on the path's reactor.
    void start() { post(&DataPath::on_start); }
    void kick();                                 // there may be something to send
    void sever() { post(&DataPath::on_sever); }  // fault injection: break as a cable would
    // It does not do what it is for: it is lost, and that is why.
    void give_up(const std::string& why) {
        reactor_.post([self = shared_from_this(), why] { self->on_give_up(why); });
    }
    // `closed` is let go of when nothing of it can write anywhere any more.
    void close(std::shared_ptr<void> closed = nullptr) {
        reactor_.post(
            [self = shared_from_this(), closed = std::move(closed)] { self->on_close(closed); });
    }

    // Up to this size a message is small: to wake another thread for it takes longer than to send
    // or to read it. So threads of the application may do that for the reactor's.
    static constexpr size_t kSmall = size_t{16} << 10;
    // Send one chunk of those that are ready, if nothing else is under way. False: kick it.
    virtual bool send_here() { return false; }
    // Sleep until something comes, `wake` is readable or the time is over, and read what has come.
    // One thread at a time. From then on the reactor's does not, until `leave_to_reactor`. False,
    // at once: it is better left to that anyway.
    virtual bool read_here(int /*wake*/, int64_t /*wait_ns*/) { return false; }
    virtual void leave_to_reactor() {}

    // On the reactor's thread: the epoch is fenced. Nothing that still comes may reach a slot once
    // this has returned true; nothing more is sent. False: not yet, it has to be asked again.
    virtual bool retire() = 0;

    Reactor& reactor() const { return reactor_; }
    const uint32_t index;
    const uint32_t epoch;

  protected:
    DataPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t path_index,
             uint32_t path_epoch)
        : index(path_index), epoch(path_epoch), reactor_(reactor), host_(std::move(host)) {}
    virtual void on_start() = 0;
    virtual void on_kick() = 0;
    virtual void on_sever() = 0;
    virtual void on_give_up(const std::string& why) = 0;
    // What cannot be closed yet keeps `closed`.
    virtual void on_close(const std::shared_ptr<void>& closed) = 0;

    Reactor& reactor_;
    std::shared_ptr<PathHost> host_;

  private:
    void post(void (DataPath::*what)()) {
        reactor_.post([self = shared_from_this(), what] { ((*self).*what)(); });
    }
    std::atomic<bool> kicked_{false};
};

inline void DataPath::kick() {
    if (kicked_.exchange(true)) return;
    try {
        reactor_.post([self = shared_from_this()] {
            self->kicked_.store(false);
            self->on_kick();
        });
    } catch (...) {  // no memory: others may find some
        kicked_.store(false);
        throw;
    }
}

}  // namespace pipemorph
