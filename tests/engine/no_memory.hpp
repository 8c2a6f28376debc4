// An allocator that fails on command.
#pragma once

#include <cstddef>

// While one lives, what its thread asks for by `new` fails with std::bad_alloc, but for the first
// `first` times.
class NoMemory {
  public:
    explicit NoMemory(size_t first = 0);
    ~NoMemory();
    NoMemory(const NoMemory&) = delete;
    NoMemory& operator=(const NoMemory&) = delete;

    // How often that has been.
    size_t failures() const;
};
