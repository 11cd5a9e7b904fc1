// Pass 2's working memory: codes a run of chunks into one stream of bits. Kept from message to message, since fresh
// pages cost more than what is written into them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpu/kernels.h"

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

class ChunkCoder {
  public:
    void clear();
    void code(const ChunkSource& source, bool last);

    const std::vector<uint8_t>& directory() const { return directory_; }
    const uint64_t* bits() const { return stream_.get(); }
    uint64_t bit_count() const { return bit_count_; }

  private:
    void append(const uint64_t* from, uint64_t bits);

    Buffer<uint64_t> remainders_, signs_, quotients_, bitmap_, stream_;
    uint64_t bit_count_ = 0;
    std::vector<uint8_t> directory_;
};

// Appends `bits` bits at bit `at` of `to`, word by word. The memory behind `at` need not be initialised, and one word
// beyond the end may be written.
void append_bits(uint8_t* to, uint64_t at, const uint64_t* from, uint64_t bits);

}  // namespace gradwire
