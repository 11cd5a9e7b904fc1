#include "entry_list.h"

#include "common/error.h"
#include "decoder.h"

namespace gradwire {
namespace {

class EntryList {
  public:
    EntryList(int64_t* positions, bool* negative, uint64_t count)
        : positions_(positions), negative_(negative), count_(count) {}

    void set_first(uint64_t first) { first_ = first; }
    uint64_t found() const { return found_; }

    // The interface of a decoder's sink.
    uint64_t capacity() const { return kCapacity; }
    Entry* entries() { return entries_; }
    void add_entries(uint64_t found) {
        for (uint64_t i = 0; i < found; ++i) add(first_ + (entries_[i] & ~kEntryMinus), entries_[i] & kEntryMinus);
    }
    uint64_t add_bitmap(const BitRun& changed, const BitRun& minus, uint64_t first, uint64_t numel) {
        uint64_t set = 0;
        for (uint64_t i = 0; i < numel; ++i)
            if (bit(changed, i)) add(first + i, bit(minus, set++));
        return set;
    }

  private:
    static constexpr uint64_t kCapacity = 1024;

    static bool bit(const BitRun& run, uint64_t i) {
        const uint64_t at = run.bit + i;
        return at / 8 < run.size && (run.bytes[at / 8] >> (at % 8) & 1);
    }
    void add(uint64_t position, bool minus) {
        if (found_ == count_) return;
        positions_[found_] = static_cast<int64_t>(position);
        negative_[found_++] = minus;
    }
    int64_t* positions_;
    bool* negative_;
    uint64_t count_;
    uint64_t found_ = 0;
    uint64_t first_ = 0;
    Entry entries_[kCapacity];
};

}  // namespace

void list_entries(const MessageView& message, int64_t* positions, bool* negative) {
    validate_payload(message);
    Decoder decoder(message);
    EntryList list(positions, negative, message.header.count);
    constexpr uint64_t kBlock = kMostEntryDistance;
    for (uint64_t first = 0; first < message.header.numel; first += kBlock) {
        list.set_first(first);
        decoder.advance(first, std::min(first + kBlock, message.header.numel), list);
        if (list.found() == message.header.count) return;
    }
    if (list.found() != message.header.count) throw MessageError("the message changed while it was decoded");
}

}  // namespace gradwire
