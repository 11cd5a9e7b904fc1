// Memory from malloc, which unlike std::vector is not initialised: fresh pages cost more than what is written into
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace gradwire {

struct FreeMemory {
    void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Memory = std::unique_ptr<T[], FreeMemory>;

// Memory that only grows. T is trivial.
template <class T>
class Buffer {
  public:
    T* reserve(uint64_t count) { return grow(count, count, 0); }
    // Keep the first `used` items.
    T* reserve_keeping(uint64_t used, uint64_t count) { return grow(count, std::max(count, capacity_ * 2), used); }
    T* get() { return items_.get(); }
    const T* get() const { return items_.get(); }

  private:
    T* grow(uint64_t least, uint64_t wanted, uint64_t used) {
        if (least <= capacity_) return items_.get();
        Memory<T> larger(static_cast<T*>(std::malloc(wanted * sizeof(T))));
        if (!larger) throw std::bad_alloc();
        if (used > 0) std::memcpy(larger.get(), items_.get(), used * sizeof(T));
        items_ = std::move(larger);
        capacity_ = wanted;
        return items_.get();
    }
    Memory<T> items_;
    uint64_t capacity_ = 0;
};

}  // namespace gradwire
