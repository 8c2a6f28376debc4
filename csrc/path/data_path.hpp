// Carrier of chunks: one live connection of one path of a link. A TCP socket, a shared-memory pair
// and a queue pair on a rail are each a DataPath, behind one interface.
//
// A path runs on one reactor's thread, although other threads may send and read for it, and ends
// with its first error. The link then fences its epoch and, if it dials, makes a connection with
// the next epoch: nothing is repaired in place.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "os/reactor.hpp"
#include "protocol/inbox.hpp"
#include "protocol/outbox.hpp"

namespace pipemorph {

class VerbsDevice;

// Interface of the link for its paths. Any thread.
class PathHost {
  public:
    virtual ~PathHost() = default;

    virtual std::optional<ChunkTask> next_chunk(uint32_t path, uint32_t epoch) = 0;
    virtual ChunkSink begin_chunk(const ChunkHeader& header) = 0;
    virtual void finish_chunk(const ChunkSink& sink, bool intact) = 0;
    // Counts a chunk whose header or payload was not sent like this by the peer: its MAC is wrong.
    virtual void refused() = 0;
    // Counts a dropped chunk of a fenced epoch.
    virtual void stale_chunk() = 0;
    virtual void path_lost(uint32_t path, uint32_t epoch, const std::string& why) = 0;
    // Count bytes of payloads that the engine itself copied from memory to memory.
    virtual void copied_out(uint64_t) {}
    virtual void copied_in(uint64_t) {}
    // Ends the link, since the peer violated the protocol.
    virtual void protocol_error(const std::string& why) = 0;

    // Shared memory only.
    struct Segment {
        uint32_t number = 0;
        std::shared_ptr<Memory> memory;
    };
    virtual std::optional<Segment> next_segment_to_offer() = 0;
    virtual void segment_offered(uint32_t number, uint64_t bytes, Fd fd) = 0;
    // Mapping of a segment of granted slots.
    virtual std::shared_ptr<Memory> peer_segment(uint32_t number) = 0;

    // Rails only.
    struct RemoteSlot {
        uint64_t address = 0;
        uint64_t bytes = 0;
        uint32_t key = 0;
    };
    // Location of a granted slot for the path's rail; empty if the peer has not sent it.
    virtual std::optional<RemoteSlot> remote_slot(uint32_t, const SlotGrant&) {
        return std::nullopt;
    }
    // Key of the device for a payload that its card may read in place, as long as its message is
    // held; empty if it must be staged.
    virtual std::optional<uint32_t> payload_key(const VerbsDevice&, const uint8_t*) {
        return std::nullopt;
    }
    // Reserves staging memory. False: the limit is reached.
    virtual bool claim_staging(uint64_t) { return true; }
    virtual void disclaim_staging(uint64_t) {}
    // Records that the path is up: a probe was acknowledged.
    virtual void path_up(uint32_t, uint32_t) {}
    // Records that the path is silent, or no longer.
    virtual void path_suspect(uint32_t, uint32_t, bool) {}
    // Ends the link: the path cannot be retired, so its peer may write to slots at any time.
    virtual void path_stuck(const std::string&) {}
    // Rate in bytes per second while busy (0: unknown), and limit of bytes under way.
    struct Pace {
        double bytes_per_second = 0.0;
        uint64_t window = 0;
    };
    // Limits the path to its window: it reports deliveries with `chunk_delivered`.
    virtual Pace pace(uint32_t, uint32_t) { return {}; }
    // Limits the bytes under way to the path's memory.
    virtual void path_limited(uint32_t, uint32_t, uint64_t) {}
    // Records the delivery of its oldest chunk under way.
    virtual Pace chunk_delivered(uint32_t, uint32_t) { return {}; }
    // Records bytes per second while busy, and the round trip of a probe without other traffic.
    virtual void path_measured(uint32_t, uint32_t, double, std::optional<int64_t>) {}
};

class DataPath : public std::enable_shared_from_this<DataPath> {
  public:
    virtual ~DataPath() = default;

    // Any thread; each runs on the path's reactor.
    void start() { post(&DataPath::on_start); }
    void notify();                               // notify of chunks to send
    void sever() { post(&DataPath::on_sever); }  // fault injection: break as a cable would
    // Ends the path with an error, since it does not deliver.
    void give_up(const std::string& why) {
        reactor_.post([self = shared_from_this(), why] { self->on_give_up(why); });
    }
    // Closes the path. `closed` is released when the path can no longer write.
    void close(std::shared_ptr<void> closed = nullptr) {
        reactor_.post(
            [self = shared_from_this(), closed = std::move(closed)] { self->on_close(closed); });
    }

    // Size up to which a message is small: waking another thread takes longer than sending or
    // reading it. So threads of the application may do that instead of the reactor's.
    static constexpr size_t kSmall = size_t{16} << 10;
    // Sends one ready chunk, if nothing else is under way. False: the path must be notified.
    virtual bool send_inline() { return false; }
    // Waits for input, for `wake` to be readable or for the end of the time, and reads the input.
    // One thread at a time. The reactor does not read from then on, until `return_to_reactor`.
    // False, at once: the reactor should read.
    virtual bool read_inline(int /*wake*/, int64_t /*wait_ns*/) { return false; }
    virtual void return_to_reactor() {}

    // Retires the fenced epoch, on the reactor's thread. Once this has returned true, no input
    // reaches a slot, and nothing more is sent. False: it must be called again.
    virtual bool retire() = 0;

    Reactor& reactor() const { return reactor_; }
    const uint32_t index;
    const uint32_t epoch;

  protected:
    DataPath(Reactor& reactor, std::shared_ptr<PathHost> host, uint32_t path_index,
             uint32_t path_epoch)
        : index(path_index), epoch(path_epoch), reactor_(reactor), host_(std::move(host)) {}
    virtual void on_start() = 0;
    virtual void on_notify() = 0;
    virtual void on_sever() = 0;
    virtual void on_give_up(const std::string& why) = 0;
    // Holds `closed` until the path is closed.
    virtual void on_close(const std::shared_ptr<void>& closed) = 0;

    Reactor& reactor_;
    std::shared_ptr<PathHost> host_;

  private:
    void post(void (DataPath::*what)()) {
        reactor_.post([self = shared_from_this(), what] { ((*self).*what)(); });
    }
    std::atomic<bool> notified_{false};
};

inline void DataPath::notify() {
    if (notified_.exchange(true)) return;
    try {
        reactor_.post([self = shared_from_this()] {
            self->notified_.store(false);
            self->on_notify();
        });
    } catch (...) {  // no memory: a later call may find some
        notified_.store(false);
        throw;
    }
}

}  // namespace pipemorph
