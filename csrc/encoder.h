// The encoder on host memory: a residual, and the messages that are extracted from it.
#pragma once

#include <memory>
#include <vector>

#include "common/arrays.h"
#include "common/partition.h"
#include "cpu/kernels.h"
#include "quantile_sample.h"
#include "ternary_encoder.h"

namespace gradwire {

struct EncodeOptions {
    uint16_t threshold = 0;       // bfloat16 bits
    double rounding_point = 1.0;  // share of the threshold from which on elements are sent
    uint8_t flags = 0;
    uint32_t key = 0;
    uint32_t step = 0;
    bool skip_nonfinite = false;
    // If the messages have more than `max_bytes` in all, only the `most_changed` largest elements are sent. They must
    // be so few that their messages always fit.
    uint64_t max_bytes = UINT64_MAX;
    uint64_t most_changed = UINT64_MAX;
};

// What an encode adds to the residual: `update`, unless it is null; or with `before` the residual becomes `update`
// minus `before`, which are arrays of the same sizes and dtypes, float32 or float64. An encoder that keeps no residual
// reads such a difference where it is needed, and leaves none.
struct Input {
    Input(const std::vector<ConstArray>* added = nullptr, const std::vector<ConstArray>* subtracted = nullptr)
        : update(added), before(subtracted) {}
    const std::vector<ConstArray>* update;
    const std::vector<ConstArray>* before;
};

struct Encoded {
    std::vector<MessageBytes> messages;  // one for each part
    uint64_t skipped = 0;                // non-finite elements left out
    uint64_t reached = 0;                // elements that reached the threshold, sent or not
};

struct Clipped {
    uint64_t count = 0;
    double sum = 0;  // signed sum of what was removed
};

// Used by one thread at a time.
class Encoder {
  public:
    // With a residual of zeros.
    Encoder(uint64_t numel, Dtype dtype, unsigned threads);
    // Encode from a residual that the caller owns; null: of differences only.
    Encoder(void* residual, uint64_t numel, Dtype dtype, unsigned threads);

    // Allocate a residual of zeros, unless there is one; or free it.
    void keep_residual();
    void drop_residual();

    // Take the input; extract +-threshold from the elements that reach their share of it, as a ternary message for each
    // part. A non-finite element without `skip_nonfinite` throws NonFiniteUpdate and extracts nothing.
    Encoded encode(const Input& input, const EncodeOptions& options, const Partition& partition);
    Encoded encode(const Input& input, const EncodeOptions& options) {
        return encode(input, options, undivided(numel_));
    }

    // The same, but send the whole residual, as dense messages of `dtype`.
    Encoded encode_dense(const Input& input, DenseType dtype, const EncodeOptions& options, const Partition& partition);

    // Sample the quantiles of a density before a step with this input, threshold (bfloat16 bits) and rounding point. A
    // difference is like an input that the caller has added.
    SampledQuantiles sample(const Input& input, uint16_t threshold, double rounding_point, double density,
                            uint64_t turn = 0);

    // Limit the residual to [-limit, limit].
    Clipped clip(double limit);

    // Null: there is none.
    void* residual() { return residual_; }
    // Keeps an own residual's memory also after `drop_residual`.
    std::shared_ptr<uint8_t[]> own_residual() const { return own_; }
    uint64_t numel() const { return numel_; }
    Dtype dtype() const { return dtype_; }

  private:
    // The result of pass 1 for one part; the indices are those of the part.
    struct PartList {
        MaskWord* words = nullptr;
        Extracted extracted;
    };
    using PartLists = std::vector<PartList>;

    template <class Residual>
    PartLists extract(const Input& input, Levels<Residual> levels, const Partition& partition);
    // `residual` is that of the first word.
    template <class Residual>
    void extract_range(Residual* residual, const std::vector<ConstArray>* update, Levels<Residual> levels,
                       const Partition& partition, uint64_t from_word, uint64_t to_word, PartLists& lists);
    template <class Residual>
    void extract_difference(const Input& input, Levels<Residual> levels, const Partition& partition, uint64_t from_word,
                            uint64_t to_word, PartLists& lists);
    template <class Residual>
    Encoded encode_as(const Input& input, const EncodeOptions& options, const Partition& partition);
    template <class Residual>
    void restore(const Input& input, const PartLists& lists, Residual quantum, const Partition& partition);
    // Undo `extract` and extract the `most_changed` largest of its elements instead, with the threshold that is
    // returned, in bfloat16 bits. Of elements that agree in these bits those with the lowest part and index come
    // first.
    template <class Residual>
    uint16_t keep_largest(const Input& input, PartLists& lists, Levels<Residual> used, const EncodeOptions& options,
                          const Partition& partition);
    // Call f(part, listed word, its 64 values): of the residual, which f may change; or of the difference, if there is
    // no residual. Beyond the last element values are zero.
    template <class Residual, class F>
    void for_listed_words(const Input& input, const PartLists& lists, const Partition& partition, F f);
    // Send a difference as dense messages, without memory of its own, and without skipping anything.
    Encoded encode_dense_difference(const Input& input, DenseType dtype, const EncodeOptions& options,
                                    const Partition& partition) const;
    // Write a difference into the parts' messages; return how many values are not finite.
    template <class Residual>
    Extracted put_difference(const Input& input, DenseType dtype, const Partition& partition,
                             std::vector<MessageBytes>& messages) const;
    // Return a lower bound of the bytes of all messages, from the coding of their chunks.
    static uint64_t least_bytes(const PartLists& lists, const Partition& partition);
    void write_messages(const PartLists& lists, const EncodeOptions& options, uint16_t threshold,
                        const Partition& partition, std::vector<MessageBytes>& messages);
    unsigned threads_for(uint64_t words) const;
    // Call f(part, first word, end word) for parts of all words, one for each thread; return the number of parts.
    template <class F>
    unsigned for_words(F f) const;

    uint64_t numel_;
    Dtype dtype_;
    unsigned threads_;
    std::shared_ptr<uint8_t[]> own_;
    void* residual_;
    Buffer<MaskWord> words_;               // of all lists; the memory is reused
    std::vector<TernaryEncoder> ternary_;  // one for each part at work
};

}  // namespace gradwire
