// Python objects for messages: their memory after arrival, and before sending.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "binding/calls.hpp"
#include "binding/payload.hpp"
#include "engine/link.hpp"
#include "os/clock.hpp"
#include "os/copy.hpp"

namespace pipemorph {

namespace nb = nanobind;

// Size from which a copy takes longer than releasing the GIL and taking it again.
constexpr size_t kCopyWithoutGil = size_t{64} << 10;

class Buffer {
  public:
    Buffer(nb::handle object, int flags) : buffer_(new HeldBuffer) {
        if (PyObject_GetBuffer(object.ptr(), buffer_.get(), flags) != 0) {
            delete buffer_.release();
            throw nb::python_error();
        }
    }
    // Memory of `owner`, which need not have a buffer interface.
    Buffer(nb::handle owner, void* data, size_t bytes) : buffer_(new HeldBuffer) {
        if (PyBuffer_FillInfo(buffer_.get(), owner.ptr(), data, static_cast<Py_ssize_t>(bytes), 1,
                              PyBUF_SIMPLE) != 0) {
            delete buffer_.release();
            throw nb::python_error();
        }
    }
    ~Buffer() {
        if (buffer_) PyBuffer_Release(buffer_.get());
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* data() const { return static_cast<uint8_t*>(buffer_->buf); }
    size_t size() const { return static_cast<size_t>(buffer_->len); }
    std::unique_ptr<HeldBuffer> take() { return std::move(buffer_); }

  private:
    std::unique_ptr<HeldBuffer> buffer_;
};

struct PyLink {
    Reference<Link> link;
    std::shared_ptr<ReleaseQueue> release_queue;

    // Every call from Python passes through here.
    Link& use() const {
        release_queue->release_queued();
        return *link;
    }
};

inline std::string checked(const nb::bytes& note) {
    if (note.size() > kMaxNote)
        throw nb::value_error(
            ("note has " + std::to_string(note.size()) + " bytes, at most 64 are allowed").c_str());
    return {note.c_str(), note.size()};
}

// Owner of a memoryview of a slot. It keeps the slot mapped, so that a view used after `release`
// may show another message but never faults.
struct SlotView {
    std::shared_ptr<void> keep;
    uint8_t* data;
    size_t bytes;
};

// True if `is_usable` does not throw. For functions that Python calls without a C++ caller.
template <typename F>
bool may_show(Py_buffer* view, F&& is_usable) {
    try {
        is_usable();
        return true;
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_BufferError, e.what());
    }
    view->obj = nullptr;
    return false;
}

inline int slot_view_buffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* slot = nb::inst_ptr<SlotView>(self);
    return PyBuffer_FillInfo(view, self, slot->data, static_cast<Py_ssize_t>(slot->bytes), 0,
                             flags);
}

inline PyType_Slot slot_view_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(slot_view_buffer)},
    {0, nullptr},
};

class PyMessage {
  public:
    PyMessage(PyLink link, Arrived arrived)
        : link_(std::move(link)), arrived_(std::move(arrived)) {}
    ~PyMessage() { release(); }
    PyMessage(const PyMessage&) = delete;
    PyMessage& operator=(const PyMessage&) = delete;

    const MessageInfo& info() const { return arrived_.info; }
    int64_t arrived_ns() const { return arrived_.arrived_ns; }

    nb::object view() const {
        check();
        nb::object holder =
            nb::cast(SlotView{arrived_.keep, arrived_.data != nullptr ? arrived_.data : &empty_,
                              arrived_.info.bytes});
        return nb::steal(PyMemoryView_FromObject(holder.ptr()));
    }

    // Buffer of the message itself, which it keeps alive: the slot is granted with the last buffer.
    static int buffer(PyObject* self, Py_buffer* view, int flags) {
        auto* message = nb::inst_ptr<PyMessage>(self);
        if (!may_show(view, [message] { message->check(); })) return -1;
        const Arrived& a = message->arrived_;
        message->exported_ = true;
        return PyBuffer_FillInfo(view, self, a.data != nullptr ? a.data : &empty_,
                                 static_cast<Py_ssize_t>(a.info.bytes), 0, flags);
    }

    void copy_into(nb::handle destination) const {
        check();
        const Buffer to(destination, PyBUF_WRITABLE);
        if (to.size() != arrived_.info.bytes) throw wrong_size(to.size());
        const Calls::WithoutGil no_gil;
        if (to.size() == 0) return;
        copy_past_caches(to.data(), arrived_.data, to.size());
        link_.link->copied_in(to.size());
    }

    std::tuple<double, double> move_to(uintptr_t address, size_t bytes, bool at_once) {
        check();
        if (bytes != arrived_.info.bytes) throw wrong_size(bytes);
        if (address == 0 && bytes > 0)
            throw nb::value_error("the destination has no memory: address is 0");
        if (bytes > 0) {
            std::optional<Calls::WithoutGil> no_gil;
            if (bytes >= kCopyWithoutGil) no_gil.emplace();
            copy_past_caches(reinterpret_cast<uint8_t*>(address), arrived_.data, bytes);
            link_.link->copied_in(bytes);
        }
        release(at_once);
        return {to_seconds(arrived_.info.started_ns), to_seconds(arrived_.arrived_ns)};
    }

    void release(bool at_once = true) {
        if (std::exchange(released_, true) || link_.release_queue->inherited()) return;
        if (arrived_.slot) link_.link->release(*arrived_.slot, arrived_.serial, at_once);
        // A buffer holds the message, and with it the memory. Without one, the application may free
        // the memory of its destination.
        if (!exported_) arrived_.keep.reset();
    }

  private:
    nb::builtin_exception wrong_size(size_t bytes) const {
        return nb::value_error((arrived_.info.key.describe() + " has " +
                                std::to_string(arrived_.info.bytes) + " bytes, the destination " +
                                std::to_string(bytes))
                                   .c_str());
    }
    void check() const {
        link_.use();
        if (released_)
            throw EngineError(arrived_.info.key.describe() + " has been released already");
    }

    static inline uint8_t empty_ = 0;
    PyLink link_;
    Arrived arrived_;
    bool released_ = false;
    bool exported_ = false;
};

inline PyType_Slot message_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(PyMessage::buffer)},
    {0, nullptr},
};

// Memory for a payload. Views keep it alive, also after it was sent.
class PyLease {
  public:
    PyLease(PyLink link, const Key& key, Link::Lease lease)
        : link_(std::move(link)), key_(key), lease_(std::move(lease)) {}
    ~PyLease() {
        release();
        // In a forked child the pool does not exist.
        if (link_.release_queue->inherited())
            static_cast<void>(new std::shared_ptr<void>(std::move(lease_.hold)));
    }
    PyLease(const PyLease&) = delete;
    PyLease& operator=(const PyLease&) = delete;

    uint64_t bytes() const { return lease_.bytes; }

    uint64_t send(const nb::bytes& note) {
        check();
        MessageInfo info;
        info.key = key_;
        info.note = checked(note);
        info.bytes = lease_.bytes;
        const uint64_t ticket =
            link_.link->send(std::move(info), lease_.data, lease_.hold, lease_.slot);
        over_ = "sent";
        return ticket;
    }

    void release() {
        if (over_ || link_.release_queue->inherited()) return;
        over_ = "released";
        link_.link->end_lease(lease_);
    }

    static int buffer(PyObject* self, Py_buffer* view, int flags) {
        auto* lease = nb::inst_ptr<PyLease>(self);
        if (!may_show(view, [lease] { lease->check(); })) return -1;
        return PyBuffer_FillInfo(view, self, lease->lease_.data,
                                 static_cast<Py_ssize_t>(lease->lease_.bytes), 0, flags);
    }

  private:
    void check() const {
        link_.use();
        if (over_) throw EngineError(key_.describe() + " has been " + over_ + " already");
    }

    PyLink link_;
    Key key_;
    Link::Lease lease_;
    const char* over_ = nullptr;  // "sent" or "released"; null before
};

inline PyType_Slot lease_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(PyLease::buffer)},
    {0, nullptr},
};

}  // namespace pipemorph
