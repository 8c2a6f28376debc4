#include "no_memory.hpp"

#include <cstdlib>
#include <new>

namespace {

struct Rule {
    bool fails = false;
    size_t first = 0;
    size_t failures = 0;
};
thread_local Rule rule;

}  // namespace

NoMemory::NoMemory(size_t first) {
    rule = {true, first, 0};
}

NoMemory::~NoMemory() {
    rule.fails = false;
}

size_t NoMemory::failures() const {
    return rule.failures;
}

void* operator new(size_t bytes) {
    if (rule.fails) {
        if (rule.first == 0) {
            ++rule.failures;
            throw std::bad_alloc();
        }
        --rule.first;
    }
    void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void operator delete(void* memory) noexcept {
    std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
    std::free(memory);
}

// std::stable_partition asks so. A sanitizer's own would not go with the operator delete above.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    try {
        return operator new(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
