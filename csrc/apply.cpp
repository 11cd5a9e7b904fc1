// Decoding: messages onto targets.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "codec.h"
#include "cpu/scalars.h"
#include "decoder.h"
#include "error.h"

namespace gradwire {
namespace {

// Several messages go over the target together in blocks: small enough for the second-level cache where they change
// much of it, larger where each comes by only now and then.
constexpr uint64_t kDenseBlock = uint64_t{1} << 16;
constexpr uint64_t kSparseBlock = uint64_t{1} << 22;
constexpr uint64_t kLargestBlock = uint64_t{1} << 30;  // below kMostEntryDistance
constexpr uint64_t kSparse = 32;  // elements per changed one, from which on memory is asked for ahead

AddEntriesFunction<float> add_entries(float) { return kernels().add_entries_float; }
AddEntriesFunction<double> add_entries(double) { return kernels().add_entries_double; }
AddBitmapFunction<float> add_bitmap(float) { return kernels().add_bitmap_float; }
AddBitmapFunction<double> add_bitmap(double) { return kernels().add_bitmap_double; }

// Collects entries of several messages, in the order in which they are to be added, and adds them in one go.
template <class Target>
class Adder {
  public:
    explicit Adder(bool scattered)
        : capacity_(scattered ? kSparseCapacity : kDenseCapacity),
          entries_(capacity_ + kPrefetchAhead),
          scattered_(scattered) {}

    void set_block(Target* target, uint64_t first, uint64_t numel) {
        flush();
        target_ = target;
        first_ = first;
        numel_ = numel;
    }
    void set_quantum(float quantum) {
        quantum_ = static_cast<Target>(quantum);
        if (runs_.empty() || runs_.back().quantum != quantum_) runs_.push_back({used_, quantum_});
    }
    void flush() {
        for (size_t i = 0; i < runs_.size(); ++i) {
            const uint64_t end = i + 1 < runs_.size() ? runs_[i + 1].begin : used_;
            add_entries(Target{})(entries_.data() + runs_[i].begin, end - runs_[i].begin, target_, numel_,
                                  runs_[i].quantum, scattered_);
        }
        used_ = 0;
        runs_.assign(1, {0, quantum_});
    }

    // What a Decoder asks of a sink.
    uint64_t room() {
        if (used_ > capacity_ / 2) flush();
        return capacity_ - used_;
    }
    Entry* entries() { return entries_.data() + used_; }
    void take(uint64_t found) { used_ += found; }
    uint64_t bitmap(const BitRun& changed, const BitRun& minus, uint64_t first, uint64_t numel) {
        flush();  // earlier messages first
        return add_bitmap(Target{})(changed, minus, target_ + (first - first_), numel, quantum_);
    }

  private:
    // Few at a time where they lie close, so that the processor fetches the target ahead while the next are decoded;
    // many where each waits for memory.
    static constexpr uint64_t kDenseCapacity = 128;
    static constexpr uint64_t kSparseCapacity = 4096;
    struct Run {
        uint64_t begin;
        Target quantum;
    };
    uint64_t capacity_;
    std::vector<Entry> entries_;
    uint64_t used_ = 0;
    std::vector<Run> runs_;
    Target* target_ = nullptr;
    uint64_t first_ = 0;
    uint64_t numel_ = 0;
    Target quantum_ = 0;
    bool scattered_;
};

// target += scale * value, the product rounded once to the target's type.
template <class Target, class Value>
void add_values(const uint8_t* bytes, uint64_t first, uint64_t count, double scale, Target* target) {
    for (uint64_t i = 0; i < count; ++i) {
        Value value;
        std::memcpy(&value, bytes + (first + i) * sizeof value, sizeof value);
        target[i] += static_cast<Target>(scale * to_scalar<double>(value));
    }
}

class Application {
  public:
    Application(const MessageView& message, double scale)
        : message_(message),
          scale_(scale),
          quantum_(static_cast<float>(scale * static_cast<double>(message.threshold()))),
          decoder_(message.header.kind == Kind::kTernary ? message : MessageView{}) {}

    // Adds what falls on elements [first, stop), which lie at `target`.
    template <class Target>
    void advance(uint64_t first, uint64_t stop, Target* target, Adder<Target>& adder) {
        if (message_.header.kind == Kind::kTernary) {
            adder.set_quantum(quantum_);
            decoder_.advance(first, stop, adder);
        } else {
            adder.flush();
            add_dense(first, stop - first, target);
        }
    }

  private:
    template <class Target>
    void add_dense(uint64_t first, uint64_t count, Target* target) {
        const uint8_t* values = message_.payload;
        switch (message_.header.dtype) {
            case DenseType::kFloat32: return add_values<Target, float>(values, first, count, scale_, target);
            case DenseType::kFloat64: return add_values<Target, double>(values, first, count, scale_, target);
            case DenseType::kBfloat16: return add_values<Target, Bfloat16>(values, first, count, scale_, target);
            case DenseType::kNone: break;
        }
    }

    MessageView message_;
    double scale_;
    float quantum_;
    Decoder decoder_;
};

template <class Target>
void apply_to(std::vector<Application>& messages, Target* target, uint64_t first, uint64_t numel, uint64_t block,
              bool scattered) {
    Adder<Target> adder(scattered);
    for (uint64_t at = 0; at < numel; at += block) {
        const uint64_t stop = std::min(at + block, numel);
        adder.set_block(target + at, first + at, stop - at);
        for (Application& message : messages) message.advance(first + at, first + stop, target + at, adder);
    }
    adder.flush();
}

}  // namespace

void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale) {
    uint64_t numel = 0;
    for (const Array& target : targets) numel += target.numel;
    std::vector<Application> applications;
    applications.reserve(messages.size());
    for (const MessageView& message : messages) {
        if (message.header.numel != numel) {
            std::ostringstream what;
            what << "the message of key " << message.header.key << ", step " << message.header.step << " has numel "
                 << message.header.numel << ", the target " << numel
                 << ": apply it to the parameters it was encoded for";
            throw MessageError(what.str());
        }
        validate_payload(message);
        applications.emplace_back(message, scale);
    }
    if (messages.empty()) return;
    uint64_t changed = 0;
    for (const MessageView& message : messages) changed += message.header.count;
    const uint64_t together = changed <= numel / kSparse ? kSparseBlock : kDenseBlock;
    const uint64_t block = messages.size() == 1 ? kLargestBlock : together;
    const bool scattered = changed / messages.size() <= numel / kSparse;
    uint64_t first = 0;
    for (const Array& target : targets) {
        if (target.dtype == Dtype::kFloat64)
            apply_to(applications, static_cast<double*>(target.data), first, target.numel, block, scattered);
        else
            apply_to(applications, static_cast<float*>(target.data), first, target.numel, block, scattered);
        first += target.numel;
    }
}

}  // namespace gradwire
