#include "apply.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>

#include "common/error.h"
#include "common/scalars.h"
#include "decoder.h"
#include "parallel.h"

namespace gradwire {
namespace {

// Several messages are applied block by block. A block fits into the second-level cache where the messages change many
// elements; it is larger where they change few.
constexpr uint64_t kDenseBlock = uint64_t{1} << 16;
constexpr uint64_t kSparseBlock = uint64_t{1} << 22;
constexpr uint64_t kLargestBlock = uint64_t{1} << 30;      // below kMostEntryDistance
constexpr uint64_t kMomentumBlock = uint64_t{1} << 15;     // four arrays fit into the second-level cache
constexpr uint64_t kChangedPerThread = uint64_t{1} << 14;  // fewer do not repay the start of a thread
constexpr uint64_t kNumelPerThread = uint64_t{1} << 16;    // where every element is changed
constexpr uint64_t kSparse = 32;                           // elements per changed one from which memory is prefetched

// A block of a target, and of the second target if there is one.
template <class Target>
struct Block {
    Target* target = nullptr;
    Target* second = nullptr;
};

// Collects entries of several messages in order and adds them together.
template <class Target>
class Adder {
  public:
    Adder(const Part& part, bool scattered)
        : part_(part), capacity_(scattered ? kSparseCapacity : kDenseCapacity), scattered_(scattered) {}

    // The block has elements [first, first + numel) of the whole; the part's first element in it is `first_in_part`.
    void set_block(const Block<Target>& block, uint64_t first, uint64_t first_in_part, uint64_t numel) {
        flush();
        block_ = block;
        first_ = first;
        first_in_part_ = first_in_part;
        numel_ = numel;
    }
    void set_quanta(float quantum, float second) {
        const Quanta quanta{static_cast<Target>(quantum), static_cast<Target>(second)};
        const bool same = quanta.target == quanta_.target && quanta.second == quanta_.second;
        quanta_ = quanta;
        if (runs_.empty() || !same) runs_.push_back({used_, quanta_});
    }
    void flush() {
        const auto add_entries = value_kernels<Target>().add_entries;
        for (size_t i = 0; i < runs_.size(); ++i) {
            const uint64_t end = i + 1 < runs_.size() ? runs_[i + 1].begin : used_;
            const Entry* entries = entries_.data() + runs_[i].begin;
            const Quanta& quanta = runs_[i].quanta;
            add_entries(entries, end - runs_[i].begin, block_.target, numel_, quanta.target, scattered_);
            if (changes_second(quanta))
                add_entries(entries, end - runs_[i].begin, block_.second, numel_, quanta.second, scattered_);
        }
        used_ = 0;
        runs_.assign(1, {0, quanta_});
    }

    // The interface of a decoder's sink.
    uint64_t capacity() {
        if (entries_.empty()) entries_.resize(capacity_ + kPrefetchAhead);
        if (used_ > capacity_ / 2) flush();
        return capacity_ - used_;
    }
    Entry* entries() { return entries_.data() + used_; }
    void add_entries(uint64_t found) {
        if (part_.partition.parts > 1)
            for (uint64_t i = used_; i < used_ + found; ++i) entries_[i] = moved(entries_[i]);
        used_ += found;
    }
    uint64_t add_bitmap(const BitRun& changed, const BitRun& minus, uint64_t first, uint64_t numel) {
        flush();  // earlier messages first
        const auto add_bits = value_kernels<Target>().add_bitmap;
        uint64_t set = 0;
        for_blocks(part_, first, first + numel, [&](uint64_t own, uint64_t whole, uint64_t count) {
            const BitRun changed_here{changed.bytes, changed.size, changed.bit + (own - first)};
            const BitRun minus_here{minus.bytes, minus.size, minus.bit + set};
            const uint64_t offset = whole - first_;
            if (changes_second(quanta_))
                add_bits(changed_here, minus_here, block_.second + offset, count, quanta_.second);
            set += add_bits(changed_here, minus_here, block_.target + offset, count, quanta_.target);
        });
        return set;
    }

  private:
    // Few at a time where entries are close, so that the processor fetches the target while the next are decoded; many
    // where each entry waits for memory.
    static constexpr uint64_t kDenseCapacity = 128;
    static constexpr uint64_t kSparseCapacity = 4096;
    struct Quanta {
        Target target = 0;
        Target second = 0;
    };
    struct Run {
        uint64_t begin;
        Quanta quanta;
    };
    // A node alone adds nothing to the second target, which holds its whole message already.
    bool changes_second(const Quanta& quanta) const { return block_.second && quanta.second != 0; }
    // Count an entry's distance in the whole instead of in the part.
    Entry moved(Entry entry) const {
        const uint64_t at = element_of_whole(part_, first_in_part_ + (entry & ~kEntryMinus)) - first_;
        return static_cast<Entry>(std::min(at, kMostEntryDistance)) | (entry & kEntryMinus);
    }

    Part part_;
    uint64_t capacity_;
    std::vector<Entry> entries_;
    uint64_t used_ = 0;
    std::vector<Run> runs_;
    Block<Target> block_;
    uint64_t first_ = 0;
    uint64_t first_in_part_ = 0;
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

// One message on its way over the targets.
class MessageCursor {
  public:
    MessageCursor(const MessageView& message, const Part& part, double scale, double second_scale)
        : message_(message),
          part_(part),
          scale_(scale),
          second_scale_(second_scale),
          decoder_(message.header.kind == Kind::kTernary ? message : MessageView{}) {}

    // Skip the elements before `first`, an element of the part as in all that follows.
    void skip_to(uint64_t first) {
        if (first > 0 && message_.header.kind == Kind::kTernary) decoder_.skip_to(first);
    }

    // Add elements [first, stop) to `block`, which begins at element `origin` of the whole.
    template <class Target>
    void advance(uint64_t first, uint64_t stop, const Block<Target>& block, uint64_t origin, Adder<Target>& adder) {
        if (message_.header.kind == Kind::kTernary) {
            adder.set_quanta(quantum(scale_), quantum(second_scale_));
            decoder_.advance(first, stop, adder);
        } else {
            adder.flush();
            for_blocks(part_, first, stop, [&](uint64_t own, uint64_t whole, uint64_t count) {
                add_dense(own, count, scale_, block.target + (whole - origin));
                if (block.second && second_scale_ != 0)
                    add_dense(own, count, second_scale_, block.second + (whole - origin));
            });
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
    Part part_;
    double scale_;
    double second_scale_;
    Decoder decoder_;
};

using Cursors = std::vector<MessageCursor>;

template <class Target>
void apply_to(Cursors& messages, const Part& part, const Block<Target>& whole, uint64_t first, uint64_t numel,
              uint64_t block_numel, Adder<Target>& adder) {
    for (uint64_t at = 0; at < numel; at += block_numel) {
        const uint64_t stop = std::min(at + block_numel, numel);
        const Block<Target> block{whole.target + at, whole.second ? whole.second + at : nullptr};
        const uint64_t begin = numel_before(part, first + at);
        const uint64_t end = numel_before(part, first + stop);
        adder.set_block(block, first + at, begin, stop - at);
        for (MessageCursor& message : messages) message.advance(begin, end, block, first + at, adder);
    }
    adder.flush();
}

template <class Target>
Block<Target> block_of(const Array& target, const Array* second, uint64_t offset) {
    return {static_cast<Target*>(target.data) + offset, second ? static_cast<Target*>(second->data) + offset : nullptr};
}

// Validate all payloads.
Cursors validated(const std::vector<MessageView>& messages, const Part& part, double scale,
                  const SecondTarget* second) {
    const uint64_t numel = numel_of(part);
    Cursors cursors;
    cursors.reserve(messages.size());
    for (const MessageView& message : messages) {
        if (message.header.numel != numel) {
            throw MessageError("the message of key " + std::to_string(message.header.key) + ", step " +
                               std::to_string(message.header.step) + " has numel " +
                               std::to_string(message.header.numel) + ", the target " + std::to_string(numel) +
                               ": apply it to the parameters it was encoded for");
        }
        validate_payload(message);
        const bool is_own = second && cursors.size() == second->own;
        cursors.emplace_back(message, part, scale, is_own ? scale - 1.0 : scale);
    }
    return cursors;
}

// Call f(array, offset in it, index of its first element, count) for the part of each array in [begin, end).
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

// Call f(begin, end) for up to `wanted` ranges of [0, numel), each on a thread of its own.
template <class F>
void for_ranges(uint64_t numel, uint64_t wanted, unsigned threads, F f) {
    const auto count = static_cast<unsigned>(std::clamp<uint64_t>(wanted, 1, threads));
    run_parts(numel, count, [&](unsigned, uint64_t begin, uint64_t end) { f(begin, end); });
}

// Return the same messages from element `first` on.
Cursors starting_at(const Cursors& all, uint64_t first) {
    Cursors cursors = all;
    for (MessageCursor& cursor : cursors) cursor.skip_to(first);
    return cursors;
}

// Memory traffic: 24 bytes per float, and 8 more for a second target.
template <class Target>
void add_with_momentum(const Target* added, Target* velocity, const Block<Target>& block, uint64_t numel,
                       Target momentum) {
    for (uint64_t i = 0; i < numel; ++i) {
        velocity[i] = momentum * (velocity[i] + added[i]);
        block.target[i] += added[i] + velocity[i];
    }
    if (block.second)
        for (uint64_t i = 0; i < numel; ++i) block.second[i] += added[i] + velocity[i];
}

// The messages of a block are summed up separately, so that each is decoded once for all arrays. The second target's
// own message is subtracted from it.
template <class Target>
void apply_with(Cursors& messages, Cursors& own, const Block<Target>& whole, Target* velocity, uint64_t first,
                uint64_t numel, Target momentum, const Part& part) {
    Adder<Target> adder(part, false);
    std::vector<Target> added(std::min(numel, kMomentumBlock));
    for (uint64_t at = 0; at < numel; at += kMomentumBlock) {
        const uint64_t count = std::min(kMomentumBlock, numel - at);
        const auto add = [&](Cursors& some, Target* target) {
            const Block<Target> block{target, nullptr};
            adder.set_block(block, first + at, first + at, count);
            for (MessageCursor& message : some)
                message.advance(first + at, first + at + count, block, first + at, adder);
            adder.flush();
        };
        std::fill(added.begin(), added.end(), Target{0});
        add(messages, added.data());
        const Block<Target> block{whole.target + at, whole.second ? whole.second + at : nullptr};
        add_with_momentum(added.data(), velocity + at, block, count, momentum);
        if (block.second) add(own, block.second);
    }
}

}  // namespace

void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, const Part& part,
                    double scale, const SecondTarget* second, unsigned threads) {
    const uint64_t numel = part.partition.numel;
    const Cursors all = validated(messages, part, scale, second);
    if (messages.empty()) return;
    uint64_t changed = 0;
    for (const MessageView& message : messages) changed += message.header.count;
    changed *= part.partition.parts;  // as if the other parts were like this one
    const uint64_t together = changed <= numel / kSparse ? kSparseBlock : kDenseBlock;
    const uint64_t block = messages.size() == 1 ? kLargestBlock : together;
    const bool scattered = changed / messages.size() <= numel / kSparse;
    for_ranges(numel, changed / kChangedPerThread, threads, [&](uint64_t begin, uint64_t end) {
        Cursors cursors = starting_at(all, numel_before(part, begin));
        std::tuple<Adder<float>, Adder<double>> adders{Adder<float>(part, scattered), Adder<double>(part, scattered)};
        for_parts(targets, begin, end, [&](size_t i, uint64_t offset, uint64_t first, uint64_t count) {
            const Array* other = second ? &second->targets[i] : nullptr;
            with_value_of(targets[i].dtype, [&](auto zero) {
                using Target = decltype(zero);
                apply_to(cursors, part, block_of<Target>(targets[i], other, offset), first, count, block,
                         std::get<Adder<Target>>(adders));
            });
        });
    });
}

void apply_with_momentum(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                         const Momentum& momentum, const SecondTarget* second, unsigned threads) {
    const uint64_t numel = total_numel(targets);
    const Part whole{undivided(numel), 0};
    const Cursors all = validated(messages, whole, scale, nullptr);
    std::vector<MessageView> own;
    if (second && second->own < messages.size()) own.push_back(messages[second->own]);
    const Cursors all_own = validated(own, whole, -1.0, nullptr);
    for_ranges(numel, numel / kNumelPerThread, threads, [&](uint64_t begin, uint64_t end) {
        Cursors cursors = starting_at(all, begin);
        Cursors own_cursors = starting_at(all_own, begin);
        for_parts(targets, begin, end, [&](size_t i, uint64_t offset, uint64_t first, uint64_t count) {
            const Array* other = second ? &second->targets[i] : nullptr;
            with_value_of(targets[i].dtype, [&](auto zero) {
                using Target = decltype(zero);
                apply_with(cursors, own_cursors, block_of<Target>(targets[i], other, offset),
                           static_cast<Target*>(momentum.velocity[i].data) + offset, first, count,
                           static_cast<Target>(momentum.factor), whole);
            });
        });
    });
}

}  // namespace gradwire
