// The decoding of one message over a range of elements, chunk by chunk.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"
#include "message.h"

namespace gradwire {

// Return how many of the first `numel` bits of a run are set; there are none beyond its bytes.
inline uint64_t count_bits(const BitRun& run, uint64_t numel) {
    const uint64_t stop = std::min(run.bit + numel, run.size * 8);
    uint64_t set = 0;
    for (uint64_t bit = run.bit; bit < stop;) {
        const uint64_t some = std::min<uint64_t>(8 - bit % 8, stop - bit);
        set += static_cast<unsigned>(__builtin_popcount(run.bytes[bit / 8] >> (bit % 8) & ((1U << some) - 1)));
        bit += some;
    }
    return set;
}

// Passes the changed elements of each chunk to a sink, as a list or as a bitmap, whichever is closer to the chunk's
// coding. A sink has
//   capacity(), entries()                           memory for capacity() > 0 entries
//   add_entries(found)                              so many entries were written to it
//   add_bitmap(changed, minus, first, numel)        elements [first, first + numel); returns the number of set bits
class Decoder {
  public:
    explicit Decoder(const MessageView& message) : reader_(message) {}

    // Skip the elements before `first`, whole chunks without decoding them. Only before the first `advance`.
    void skip_to(uint64_t first) {
        do {
            if (!read_chunk()) return;
        } while (cursor_.chunk.begin + cursor_.chunk.shape.span <= first);
        open_chunk();
        NullSink nothing;
        for (uint64_t at = cursor_.chunk.begin; at < first;) {
            const uint64_t stop = std::min(first, at + kMostEntryDistance);
            advance(at, stop, nothing);
            at = stop;
        }
    }

    template <class Sink>
    void advance(uint64_t first, uint64_t stop, Sink& sink) {
        while (has_chunk_ || next_chunk()) {
            const Chunk& chunk = cursor_.chunk;
            if (chunk.begin + position_ >= stop) return;
            const bool done = as_bitmap() ? advance_bitmap(first, stop, sink) : advance_list(first, stop, sink);
            if (!done) return;
            has_chunk_ = false;
        }
    }

  private:
    bool as_bitmap() const { return cursor_.chunk.shape.inverted || cursor_.chunk.shape.rice == 0; }

    bool next_chunk() {
        if (read_chunk()) open_chunk();
        return has_chunk_;
    }
    bool read_chunk() {
        cursor_ = ChunkCursor{};
        position_ = changed_done_ = 0;
        has_chunk_ = reader_.next(cursor_.chunk);
        return has_chunk_;
    }
    void open_chunk() {
        if (cursor_.chunk.shape.inverted) expand_inverted();
    }

    // A sink for skipped elements.
    class NullSink {
      public:
        static uint64_t capacity() { return kCapacity; }
        Entry* entries() { return entries_; }
        static void add_entries(uint64_t) {}
        static uint64_t add_bitmap(const BitRun& changed, const BitRun&, uint64_t, uint64_t numel) {
            return count_bits(changed, numel);
        }

      private:
        static constexpr uint64_t kCapacity = 512;
        Entry entries_[kCapacity];
    };

    // Make the bitmap of a chunk whose unchanged elements are listed.
    void expand_inverted() {
        const Chunk& chunk = cursor_.chunk;
        const uint64_t span = chunk.shape.span;
        bitmap_.assign((span + 63) / 64, ~uint64_t{0});
        constexpr uint64_t kCapacity = 512;
        Entry entries[kCapacity];
        for (uint64_t first = 0; first < span && !cursor_.done;) {
            const uint64_t stop = std::min(span, first + kMostEntryDistance);
            const uint64_t found = kernels().list_entries(reader_.stream(), reader_.stream_bytes(), cursor_,
                                                          chunk.begin + first, chunk.begin + stop, entries, kCapacity);
            for (uint64_t i = 0; i < found; ++i) {
                const uint64_t at = first + (entries[i] & ~kEntryMinus);
                if (at < span) bitmap_[at / 64] &= ~(uint64_t{1} << (at % 64));
            }
            if (found < kCapacity) first = stop;
        }
    }

    template <class Sink>
    bool advance_bitmap(uint64_t first, uint64_t stop, Sink& sink) {
        const Chunk& chunk = cursor_.chunk;
        const uint64_t at = chunk.begin + position_;
        const uint64_t end = std::min(stop, chunk.begin + chunk.shape.span);
        if (at < first || at >= end) return at >= chunk.begin + chunk.shape.span;
        BitRun changed{reader_.stream(), reader_.stream_bytes(), chunk.quotient_bit + position_};
        if (chunk.shape.inverted)
            changed = {reinterpret_cast<const uint8_t*>(bitmap_.data()), bitmap_.size() * 8, position_};
        changed_done_ += sink.add_bitmap(
            changed, {reader_.stream(), reader_.stream_bytes(), chunk.sign_bit + changed_done_}, at, end - at);
        position_ += end - at;
        return position_ == chunk.shape.span;
    }

    template <class Sink>
    bool advance_list(uint64_t first, uint64_t stop, Sink& sink) {
        while (!cursor_.done) {
            const uint64_t capacity = sink.capacity();
            const uint64_t found = kernels().list_entries(reader_.stream(), reader_.stream_bytes(), cursor_, first,
                                                          stop, sink.entries(), capacity);
            sink.add_entries(found);
            if (!cursor_.done && found < capacity) return false;
        }
        return true;
    }

    ChunkReader reader_;
    ChunkCursor cursor_;
    bool has_chunk_ = false;
    uint64_t position_ = 0;      // of a bitmap: elements passed to the sink
    uint64_t changed_done_ = 0;  // the changed ones among them
    std::vector<uint64_t> bitmap_;
};

}  // namespace gradwire
