#include "os/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pipemorph {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

[[noreturn]] void fail(const char* what, size_t bytes) {
    throw EngineError(std::string(what) + " of " + std::to_string(bytes) +
                      " bytes for slots failed: " + std::strerror(errno));
}

// Touches every page: a page fault inside a transfer costs as much as copying the page.
void prefault(uint8_t* data, size_t bytes) {
    madvise(data, bytes, MADV_HUGEPAGE);
    if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) fail("prefaulting", bytes);
    // Kernels before 5.14 have no such advice.
    for (size_t i = 0; i < bytes; i += 4096) {
        volatile uint8_t* page = data + i;
        *page = *page;
    }
}

}  // namespace

size_t Memory::mapped(size_t bytes) {
    const size_t unit = bytes >= kHugePage ? kHugePage : 4096;
    return (bytes + unit - 1) / unit * unit;
}

std::shared_ptr<Memory> Memory::anonymous(size_t bytes) {
    bytes = mapped(bytes);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("allocating", bytes);
    std::shared_ptr<Memory> memory(new Memory(static_cast<uint8_t*>(p), bytes, Fd()));
    // A forked child, such as a worker that loads data, does not use this memory, and sees zeros
    // there. Otherwise the first message into each slot after a fork would copy it, page by page,
    // for every child, or the fork itself would, for pages that a device has locked.
    madvise(p, bytes, MADV_WIPEONFORK);
    prefault(memory->data(), bytes);
    return memory;
}

std::string Memory::why_not_shareable() {
    try {
        shareable(1);
    } catch (const EngineError& e) {
        return e.what();
    }
    return {};
}

std::shared_ptr<Memory> Memory::shareable(size_t bytes) {
    bytes = mapped(bytes);
    Fd fd = Fd::made_by(
        [] { return memfd_create("pipemorph-slots", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
    if (!fd) fail("creating shared memory", bytes);
    // Reserved now: a lack of memory must be an error here and not a SIGBUS later.
    if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
        fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)
        fail("allocating shared memory", bytes);
    if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        fail("sealing shared memory", bytes);
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (p == MAP_FAILED) fail("mapping shared memory", bytes);
    std::shared_ptr<Memory> memory(new Memory(static_cast<uint8_t*>(p), bytes, std::move(fd)));
    prefault(memory->data(), bytes);
    return memory;
}

std::shared_ptr<Memory> Memory::map_peer(const Fd& fd, size_t bytes) {
    struct stat st{};
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        throw EngineError("the peer's shared memory is not sealed against shrinking");
    if (fstat(fd.get(), &st) != 0 || static_cast<size_t>(st.st_size) != bytes || bytes == 0)
        throw EngineError("the peer's shared memory does not have the announced size");
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (p == MAP_FAILED) fail("mapping the peer's shared memory", bytes);
    std::shared_ptr<Memory> memory(new Memory(static_cast<uint8_t*>(p), bytes, Fd()));
    prefault(memory->data(), bytes);
    return memory;
}

Memory::~Memory() {
    munmap(data_, size_);
}

}  // namespace pipemorph
