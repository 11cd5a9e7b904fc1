// The codec on host memory: an encoder that owns a residual, and the application of messages.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk_coder.h"
#include "message.h"

namespace gradwire {

// A message's bytes, owned.
struct MessageBytes {
    Memory<uint8_t> bytes;
    uint64_t size = 0;
    MessageView view() const { return {header, bytes.get() + kHeaderBytes}; }
    Header header;
};

// One array of an update or a target: `numel` contiguous elements in host memory.
struct ConstArray {
    const void* data;
    uint64_t numel;
    Dtype dtype;
};
struct Array {
    void* data;
    uint64_t numel;
    Dtype dtype;  // kFloat32 or kFloat64
};

// The quantiles that TargetDensity predicts from; python/gradwire/policy.py says what each is.
struct Tail {
    double now = 0;
    double shuffled = 0;
    double next = 0;
    double same = 0;
    double agreement = 0.5;
};

struct EncodeOptions {
    uint16_t threshold = 0;  // bfloat16 bits
    uint8_t flags = 0;
    uint32_t key = 0;
    uint32_t step = 0;
    bool skip_nonfinite = false;
    double sample_density = 0;  // > 0: measure the tail for it
};

struct Encoded {
    MessageBytes message;
    uint64_t skipped = 0;  // non-finite elements left out
    Tail tail;
};

struct Clipped {
    uint64_t count = 0;
    double sum = 0;  // of what was removed, with its sign
};

class Encoder {
  public:
    Encoder(uint64_t numel, Dtype dtype, unsigned threads);
    // On a residual of the caller's, who keeps it.
    Encoder(void* residual, uint64_t numel, Dtype dtype, unsigned threads);

    // residual += update (skipped where `update` is null); takes +-threshold out of what passes, as a ternary message.
    // With a non-finite element and not `skip_nonfinite` nothing is taken and NonFiniteUpdate is thrown.
    Encoded encode(const std::vector<ConstArray>* update, const EncodeOptions& options);

    // The same with everything taken: the residual's values as a dense message of `dtype`.
    Encoded encode_dense(const std::vector<ConstArray>* update, DenseType dtype, const EncodeOptions& options);

    // residual = now - before: arrays of the same sizes and dtypes, float32 or float64.
    void hold_difference(const std::vector<ConstArray>& now, const std::vector<ConstArray>& before);

    // Cuts the residual to [-limit, limit].
    Clipped clip(double limit);

    void* residual() { return residual_; }
    uint64_t numel() const { return numel_; }
    Dtype dtype() const { return dtype_; }

  private:
    template <class Residual>
    Taken take(const std::vector<ConstArray>* update, Residual threshold);
    template <class Residual>
    void take_range(const std::vector<ConstArray>* update, Residual threshold, uint64_t from_word, uint64_t to_word,
                    MaskWord* out, Taken* taken);
    template <class Residual>
    Encoded encode_as(const std::vector<ConstArray>* update, const EncodeOptions& options);
    template <class Residual>
    void give_back(const Taken& taken, Residual threshold);
    unsigned threads_for(uint64_t words) const;
    // Calls f(part, first word, the one after the last) for parts of all words, one for each thread; returns how many.
    template <class F>
    unsigned for_words(F f) const;

    uint64_t numel_;
    Dtype dtype_;
    unsigned threads_;
    Memory<uint8_t> own_;
    void* residual_;
    Buffer<MaskWord> list_;  // pass 1's result, reused
    std::vector<ChunkCoder> coders_;
};

// Pass 2: codes a list of mask words as a ternary message. `header` needs flags, threshold, key, step and numel;
// `coders` is working memory.
MessageBytes code_ternary(const MaskWord* words, uint64_t word_count, uint64_t changed, Header header,
                          std::vector<ChunkCoder>& coders, unsigned threads = 1);

// The values of one array, raw; `dtype` kBfloat16 rounds to nearest-even.
MessageBytes code_dense(const ConstArray& values, DenseType dtype, uint32_t key, uint32_t step);

// The values of a dense message: float64 where it holds those, float32 otherwise.
void decode_dense(const MessageView& message, void* out);

// Arrays like the targets', to which the same is added on the way. They hold the message of number `own` already, so
// that one's factor is scale - 1.
struct Beside {
    std::vector<Array> targets;
    size_t own;
};

// targets += scale * decoded, for every message in turn, in one pass over the targets (and over those beside them), in
// parts on up to `threads` threads: the bits are the same at every number. Validates all payloads before the first
// write. Throws MessageError where numel differs.
void apply_messages(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                    const Beside* beside = nullptr, unsigned threads = 1);

// A velocity for each target, and what it is multiplied by at every call.
struct Momentum {
    std::vector<Array> velocity;  // like the targets
    double factor;
};

// Arrays like the targets', or none, and the messages that they hold already.
struct Holding {
    std::vector<Array> targets;
    std::vector<MessageView> held;
};

// Nesterov's momentum of what messages add: with added = scale * (sum of all decoded), velocity = factor * (velocity +
// added), targets += added + velocity. What holds some messages already gets the same without those. Threads,
// validation and errors as above.
void apply_with_momentum(const std::vector<MessageView>& messages, const std::vector<Array>& targets, double scale,
                         const Momentum& momentum, const Holding& beside, unsigned threads = 1);

// The changed elements of a ternary message in order, and which are negative: count of each. Throws MessageError.
void list_entries(const MessageView& message, int64_t* positions, bool* negative);

// Zero-filled memory, aligned to 64 bytes, in huge pages where the system has them.
Memory<uint8_t> allocate_zeroed(uint64_t bytes);

}  // namespace gradwire
