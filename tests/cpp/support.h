// Shared by the tests: random numbers, every table of kernels, updates of every dtype, and a plain implementation of
// the message format as an oracle.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "apply.h"
#include "check.h"
#include "common/error.h"
#include "common/scalars.h"
#include "dense.h"
#include "encoder.h"
#include "entry_list.h"

namespace support {

using Bytes = std::vector<uint8_t>;
using Numbers = std::vector<uint64_t>;

// SplitMix64, so that a seed means the same numbers under every standard library.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15U;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t end) { return next() % end; }
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    bool chance(double probability) { return uniform() < probability; }

  private:
    uint64_t state_;
};

// Call f() with each table of kernels that this machine runs, and restore the fastest.
template <class F>
void for_every_table(F f) {
    const std::vector<std::string> names = gradwire::usable_isas();
    for (const std::string& name : names) {
        const check::Note note("table", name.c_str());
        gradwire::select_isa(name);
        f();
    }
    gradwire::select_isa(names.back());
}

// The changed elements of an update.
struct Entries {
    uint64_t numel = 0;
    std::vector<uint64_t> positions;
    std::vector<uint8_t> minus;

    void add(uint64_t position, bool negative) {
        positions.push_back(position);
        minus.push_back(negative);
    }
};
inline bool operator==(const Entries& a, const Entries& b) {
    return a.numel == b.numel && a.positions == b.positions && a.minus == b.minus;
}

// Return a ternary header with the fields that do not follow from the entries.
gradwire::Header header_for(uint64_t numel, uint16_t threshold = 0x3f00, uint32_t key = 7, uint32_t step = 1000);

// Encode entries with the codec and the table in use.
Bytes encode(const Entries& entries, gradwire::Header header, unsigned threads = 1);

// Encode entries bit by bit, straight from docs/message-format.md. With `zeros`, append so many to the quotients of
// each chunk that has a Q and count them in Q: another spelling of the message, which must be refused.
Bytes encode_plainly(const Entries& entries, gradwire::Header header, unsigned zeros = 0);

// Return the message that is all of `bytes`, fully validated.
gradwire::MessageView parse(const Bytes& bytes);

Entries list(const gradwire::MessageView& message);

uint32_t crc32c_plainly(const Bytes& bytes);

// Write a correct checksum into the header of `bytes`.
void mend_checksum(Bytes& bytes);

// Copy bytes into a heap block of the same size, so that AddressSanitizer detects any access beyond.
Bytes exactly(const uint8_t* bytes, uint64_t size);

// --- updates ---

using gradwire::bytes_per_element;

// Return a value of `dtype` as a double, which represents every dtype exactly.
double value_at(const void* data, uint64_t index, gradwire::Dtype dtype);

// Write `value`, rounded towards zero.
void put_value(void* data, uint64_t index, gradwire::Dtype dtype, double value);

// An array of an update that begins `offset` elements into its memory, so that only its elements are aligned.
class UpdateArray {
  public:
    UpdateArray(uint64_t numel, gradwire::Dtype dtype, uint64_t offset)
        : memory_((numel + offset) * bytes_per_element(dtype)), numel_(numel), offset_(offset), dtype_(dtype) {}
    void* data() { return memory_.data() + offset_ * bytes_per_element(dtype_); }
    const void* data() const { return memory_.data() + offset_ * bytes_per_element(dtype_); }
    uint64_t numel() const { return numel_; }
    gradwire::Dtype dtype() const { return dtype_; }
    double operator[](uint64_t i) const { return value_at(data(), i, dtype_); }
    void set(uint64_t i, double value) { put_value(data(), i, dtype_, value); }
    gradwire::ConstArray view() const { return {data(), numel_, dtype_}; }

  private:
    Bytes memory_;
    uint64_t numel_;
    uint64_t offset_;
    gradwire::Dtype dtype_;
};

// Return a difficult number for pass 1: at, just below or just above the threshold, a zero of either sign, denormal,
// large, or random; with `nonfinite` sometimes infinite, NaN or so large that sums overflow.
double tricky_value(Random& random, double threshold, bool nonfinite);

}  // namespace support
