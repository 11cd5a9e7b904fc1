// One message on its way over a range of elements, chunk by chunk.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"

namespace gradwire {

// How many of the first `numel` bits of a run are set; none lie beyond its bytes.
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

// Hands what a chunk changes to a sink, as a list or as a bitmap, whichever its coding is closer to. A sink has
//   room(), entries(), take(found)          entries() has space for room() > 0 entries, take() says how many were
//   written bitmap(changed, minus, first, numel)    for elements [first, first + numel); returns the number of set bits
class Decoder {
  public:
    explicit Decoder(const MessageView& message) : reader_(message) {}

    // Leaves out what lies before element `first`; whole chunks of it are not even decoded. At the message's begin
    // only.
    void skip_to(uint64_t first) {
        do {
            if (!read_chunk()) return;
        } while (cursor_.chunk.begin + cursor_.chunk.shape.span <= first);
        open_chunk();
        Nothing nothing;
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

    // A sink for what is left out.
    class Nothing {
      public:
        static uint64_t room() { return kRoom; }
        Entry* entries() { return entries_; }
        static void take(uint64_t) {}
        static uint64_t bitmap(const BitRun& changed, const BitRun&, uint64_t, uint64_t numel) {
            return count_bits(changed, numel);
        }

      private:
        static constexpr uint64_t kRoom = 512;
        Entry entries_[kRoom];
    };

    // The bitmap of a chunk whose unchanged elements are listed.
    void expand_inverted() {
        const Chunk& chunk = cursor_.chunk;
        const uint64_t span = chunk.shape.span;
        bitmap_.assign((span + 63) / 64, ~uint64_t{0});
        constexpr uint64_t kRoom = 512;
        Entry entries[kRoom];
        for (uint64_t first = 0; first < span && !cursor_.done;) {
            const uint64_t stop = std::min(span, first + kMostEntryDistance);
            const uint64_t found = kernels().list_entries(reader_.stream(), reader_.stream_bytes(), cursor_,
                                                          chunk.begin + first, chunk.begin + stop, entries, kRoom);
            for (uint64_t i = 0; i < found; ++i) {
                const uint64_t at = first + (entries[i] & ~kEntryMinus);
                if (at < span) bitmap_[at / 64] &= ~(uint64_t{1} << (at % 64));
            }
            if (found < kRoom) first = stop;
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
        changed_done_ += sink.bitmap(
            changed, {reader_.stream(), reader_.stream_bytes(), chunk.sign_bit + changed_done_}, at, end - at);
        position_ += end - at;
        return position_ == chunk.shape.span;
    }

    template <class Sink>
    bool advance_list(uint64_t first, uint64_t stop, Sink& sink) {
        while (!cursor_.done) {
            const uint64_t room = sink.room();
            Entry* out = sink.entries();
            const uint64_t found =
                kernels().list_entries(reader_.stream(), reader_.stream_bytes(), cursor_, first, stop, out, room);
            sink.take(found);
            if (!cursor_.done && found < room) return false;
        }
        return true;
    }

    ChunkReader reader_;
    ChunkCursor cursor_;
    bool has_chunk_ = false;
    uint64_t position_ = 0;      // of a bitmap: elements handed out
    uint64_t changed_done_ = 0;  // and how many of them had changed
    std::vector<uint64_t> bitmap_;
};

}  // namespace gradwire
