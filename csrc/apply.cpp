// Decoding: messages onto targets.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "codec.h"
#include "cpu/scalars.h"
#include "decoder.h"
#include "error.h"
#include "parallel.h"

namespace gradwire {
namespace {

// Several messages go over the target together in blocks: small enough for the second-level cache where they change
// much of it, larger where each comes by only now and then.
constexpr uint64_t kDenseBlock = uint64_t{1} << 16;
constexpr uint64_t kSparseBlock = uint64_t{1} << 22;
constexpr uint64_t kLargestBlock = uint64_t{1} << 30;      // below kMostEntryDistance
constexpr uint64_t kMomentumBlock = uint64_t{1} << 15;     // four arrays of it stay in the second-level cache
constexpr uint64_t kChangedPerThread = uint64_t{1} << 14;  // less does not repay a thread's start
constexpr uint64_t kNumelPerThread = uint64_t{1} << 16;    // where all elements are gone over
constexpr uint64_t kSparse = 32;  // elements per changed one, from which on memory is asked for ahead

AddEntriesFunction<float> add_entries(float) { return kernels().add_entries_float; }
AddEntriesFunction<double> add_entries(double) { return kernels().add_entries_double; }
AddBitmapFunction<float> add_bitmap(float) { return kernels().add_bitmap_float; }
AddBitmapFunction<double> add_bitmap(double) { return kernels().add_bitmap_double; }

// Where a block of a target lies, and of the one beside it if there is one.
template <class Target>
struct Block {
    Target* target = nullptr;
    Target* beside = nullptr;
};

// Collects entries of several messages, in the order in which they are to be added, and adds them in one go.
template <class Target>
class Adder {
  public:
    explicit Adder(bool scattered)
        : capacity_(scattered ? kSparseCapacity : kDenseCapacity),
          entries_(capacity_ + kPrefetchAhead),
          scattered_(scattered) {}

    void set_block(const Block<Target>& block, uint64_t first, uint64_t numel) {
        flush();
        block_ = block;
        first_ = first;
        numel_ = numel;
    }
    void set_quanta(float quantum, float beside) {
        const Quanta quanta{static_cast<Target>(quantum), static_cast<Target>(beside)};
        const bool same = quanta.target == quanta_.target && quanta.beside == quanta_.beside;
        quanta_ = quanta;
        if (runs_.empty() || !same) runs_.push_back({used_, quanta_});
    }
    void flush() {
        for (size_t i = 0; i < runs_.size(); ++i) {
            const uint64_t end = i + 1 < runs_.size() ? runs_[i + 1].begin : used_;
            const Entry* entries = entries_.data() + runs_[i].begin;
            const Quanta& quanta = runs_[i].quanta;
            add_entries(Target{})(entries, end - runs_[i].begin, block_.target, numel_, quanta.target, scattered_);
            if (block_.beside)
                add_entries(Target{})(entries, end - runs_[i].begin, block_.beside, numel_, quanta.beside, scattered_);
        }
        used_ = 0;
        runs_.assign(1, {0, quanta_});
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
        const uint64_t offset = first - first_;
        if (block_.beside) add_bitmap(Target{})(changed, minus, block_.beside + offset, numel, quanta_.beside);
        return add_bitmap(Target{})(changed, minus, block_.target + offset, numel, quanta_.target);
    }

  private:
    // Few at a time where they lie close, so that the processor fetches the target ahead while the next are decoded;
    // many where each waits for memory.
    static constexpr uint64_t kDenseCapacity = 128;
    static constexpr uint64_t kSparseCapacity = 4096;
    struct Quanta {
        Target target = 0;
        Target beside = 0;
    };
    struct Run {
        uint64_t begin;
        Quanta quanta;
    };
    uint64_t capacity_;
    std::vector<Entry> entries_;
    uint64_t used_ = 0;
    std::vector<Run> runs_;
    Block<Target> block_;
    uint64_t first_ = 0;
    uint64_t numel_ = 0;
    Quanta quanta_;
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
    // `beside` is the factor for the target beside the first.
    Application(const MessageView& message, double scale, double beside)
        : message_(message),
          scale_(scale),
          beside_(beside),
          decoder_(message.header.kind == Kind::kTernary ? message : MessageView{}) {}

    // Leaves out what falls on elements before `first`.
    void skip_to(uint64_t first) {
        if (first > 0 && message_.header.kind == Kind::kTernary) decoder_.skip_to(first);
    }

    // Adds what falls on elements [first, stop), which lie at `block`.
    template <class Target>
    void advance(uint64_t first, uint64_t stop, const Block<Target>& block, Adder<Target>& adder) {
        if (message_.header.kind == Kind::kTernary) {
            adder.set_quanta(quantum(scale_), quantum(beside_));
            decoder_.advance(first, stop, adder);
        } else {
            adder.flush();
            add_dense(first, stop - first, scale_, block.target);
            if (block.beside) add_dense(first, stop - first, beside_, block.beside);
        }
    }

  private:
    float quantum(double scale) const { return static_cast<float>(scale * static_cast<double>(message_.threshold())); }

    template <class Target>
    void add_dense(uint64_t first, uint64_t count, double scale, Target* target) {
        const uint8_t* values = message_.payload;
        switch (message_.header.dtype) {
            case DenseType::kFloat32: return add_values<Target, float>(values, first, count, scale, target);
            case DenseType::kFloat64: return add_values<Target, double>(values, first, count, scale, target);
            case DenseType::kBfloat16: return add_values<Target, Bfloat16>(values, first, count, scale, target);
            case DenseType::kNone: break;
        }
    }

    MessageView message_;
    double scale_;
    double beside_;
    Decoder decoder_;
};

template <class Target>
void apply_to(std::vector<Application>& messages, const Block<Target>& whole, uint64_t first, uint64_t numel,
              uint64_t block_numel, bool scattered) {
    Adder<Target> adder(scattered);
    for (uint64_t at = 0; at < numel; at += block_numel) {
        const uint64_t stop = std::min(at + block_numel, numel);
        const Block<Target> block{whole.target + at, whole.beside ? whole.beside + at : nullptr};
        adder.set_block(block, first + at, stop - at);
        for (Application& message : messages) message.advance(first + at, first + stop, block, adder);
    }
    adder.flush();
}

template <class Target>
Block<Target> block_of(const Array& target, const Array* beside, uint64_t offset) {
    return {static_cast<Target*>(target.data) + offset, beside ? static_cast<Target*>(beside->data) + offset : nullptr};
}

// Validates all payloads.
std::vector<Application> applications_of(const std::vector<MessageView>& messages, uint64_t numel, double scale,
                                         const Beside* beside) {
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
        const bool is_own = beside && applications.size() == beside->own;
        applications.emplace_back(message, scale, is_own ? scale - 1.0 : scale);
    }
    return applications;
}

uint64_t numel_of(const std::vector<Array>& arrays) {
    uint64_t numel = 0;
    for (const Array& array : arrays) numel += array.numel;
    return numel;
}

// Calls f(array's number, offset in it, index of its first element, how many) for the part of each array that lies in
// [begin, end) of all of them together.
template <class F>
void for_parts(const std::vector<Array>& arrays, uint64_t begin, uint64_t end, F f) {
    uint64_t first = 0;
    for (size_t i = 0; i < arrays.size(); ++i) {
        const uint64_t from = std::max(first, begin);
        const uint64_t to = std::min(first + arrays[i].numel, end);
        if (from < to) f(i, from - first, from, to - from);
        first += arrays[i].numel;
    }
}

// Calls f(begin, end) for as many ranges of [0, numel) as `wanted` and `threads` allow, each on a thread of its own.
template <class F>
void for_ranges(uint64_t numel, uint64_t wanted, unsigned threads, F f) {
    const auto count = static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, threads));
    run_parts(numel, count, [&](unsigned, uint64_t begin, uint64_t end) { f(begin, end); });
}

// The same messages from element `first` on.
std::vector<Application> starting_at(const std::vector<Application>& all, uint64_t first) {
    std::vector<Application> applications = all;
    for (Application& application : applications) application.skip_to(first);
    return applications;
}

// What was added goes on: reads and writes three arrays once, 24 bytes per float.
template <class Target>
void carry_on(const Target* added, Target* velocity, const Block<Target>& block, uint64_t numel, Target momentum) {
    for (uint64_t i = 0; i < numel; ++i) {
        velocity[i] = momentum * (velocity[i] + added[i]);
        block.target[i] += added[i] + velocity[i];
    }
    if (block.beside)
        for (uint64_t i = 0; i < numel; ++i) block.beside[i] += added[i] + velocity[i];
}

// The messages are added up apart, block by block, so that each is decoded once for all three arrays. What the one
// beside holds already is taken out of it on its own.
template <class Target>
void apply_with(std::vector<Application>& messages, std::vector<Application>& held, const Block<Target>& whole,
                Target* velocity, uint64_t first, uint64_t numel, Target momentum) {
    Adder<Target> adder(false);
    std::vector<Target> added(std::min(numel, kMomentumBlock));
    for (uint64_t at = 0; at < numel; at += kMomentumBlock) {
        const uint64_t count = std::min(kMomentumBlock, numel - at);
        const auto add = [&](std::vector<Application>& some, Target* target) {
            const Block<Target> block{target, nullptr};
            adder.set_block(block, first + at, count);
            for (Application& message : some) message.advance(first + at, first + at + count, block, adder);
            adder.flush();
        };
        std::fill(added.begin(), added.end(), Target{0});
        add(messages, added.data());
        const Block<Target> block{whole.target + at, whole.beside ? whole.beside + at : nullptr};
        carry_on(added.data(), velocity + at, block, count, momentum);
        if (block.beside) add(held, block.beside);
    }
}

}  // namespace

void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                    const Beside* beside, unsigned threads) {
    const uint64_t numel = numel_of(targets);
    const std::vector<Application> all = applications_of(messages, numel, scale, beside);
    if (messages.empty()) return;
    uint64_t changed = 0;
    for (const MessageView& message : messages) changed += message.header.count;
    const uint64_t together = changed <= numel / kSparse ? kSparseBlock : kDenseBlock;
    const uint64_t block = messages.size() == 1 ? kLargestBlock : together;
    const bool scattered = changed / messages.size() <= numel / kSparse;
    for_ranges(numel, changed / kChangedPerThread, threads, [&](uint64_t begin, uint64_t end) {
        std::vector<Application> applications = starting_at(all, begin);
        for_parts(targets, begin, end, [&](size_t i, uint64_t offset, uint64_t first, uint64_t count) {
            const Array* second = beside ? &beside->targets[i] : nullptr;
            if (targets[i].dtype == Dtype::kFloat64)
                apply_to(applications, block_of<double>(targets[i], second, offset), first, count, block, scattered);
            else
                apply_to(applications, block_of<float>(targets[i], second, offset), first, count, block, scattered);
        });
    });
}

void apply_with_momentum(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                         const Momentum& momentum, const Holding& beside, unsigned threads) {
    const uint64_t numel = numel_of(targets);
    const std::vector<Application> all = applications_of(messages, numel, scale, nullptr);
    const std::vector<Application> all_held = applications_of(beside.held, numel, -1.0, nullptr);
    for_ranges(numel, numel / kNumelPerThread, threads, [&](uint64_t begin, uint64_t end) {
        std::vector<Application> applications = starting_at(all, begin);
        std::vector<Application> held = starting_at(all_held, begin);
        for_parts(targets, begin, end, [&](size_t i, uint64_t offset, uint64_t first, uint64_t count) {
            const Array* second = beside.targets.empty() ? nullptr : &beside.targets[i];
            void* velocity = momentum.velocity[i].data;
            if (targets[i].dtype == Dtype::kFloat64)
                apply_with(applications, held, block_of<double>(targets[i], second, offset),
                           static_cast<double*>(velocity) + offset, first, count, momentum.factor);
            else
                apply_with(applications, held, block_of<float>(targets[i], second, offset),
                           static_cast<float*>(velocity) + offset, first, count, static_cast<float>(momentum.factor));
        });
    });
}

}  // namespace gradwire
