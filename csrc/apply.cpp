// Decoding: messages onto targets.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "codec.h"
#include "cpu/scalars.h"
#include "error.h"

namespace gradwire {
namespace {

// Several messages go over the target together in blocks that stay in the second-level cache.
constexpr uint64_t kBlockBytes = uint64_t{256} << 10;

ApplyChunkFunction<float> apply_function(float) { return kernels().apply_float; }
ApplyChunkFunction<double> apply_function(double) { return kernels().apply_double; }

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
class Application {
  public:
    Application(const MessageView& message, double scale)
        : message_(message),
          scale_(scale),
          quantum_(static_cast<float>(scale * static_cast<double>(message.threshold()))),
          reader_(message.header.kind == Kind::kTernary ? message : MessageView{}) {}

    // Adds what falls on elements [first, stop) to target[0 ..].
    template <class Target>
    void advance(uint64_t first, uint64_t stop, Target* target) {
        if (message_.header.kind == Kind::kDense) return add_dense(first, stop, target);
        const auto apply = apply_function(Target{});
        while (has_chunk_ || next_chunk()) {
            if (cursor_.chunk.begin >= stop) return;
            apply(reader_.stream(), reader_.stream_bytes(), cursor_, target, first, stop, static_cast<Target>(quantum_));
            if (!cursor_.done) return;
            has_chunk_ = false;
        }
    }

  private:
    bool next_chunk() {
        cursor_ = ChunkCursor{};
        has_chunk_ = reader_.next(cursor_.chunk);
        return has_chunk_;
    }
    template <class Target>
    void add_dense(uint64_t first, uint64_t stop, Target* target) {
        const uint64_t count = stop - first;
        switch (message_.header.dtype) {
            case DenseType::kFloat32: return add_values<Target, float>(message_.payload, first, count, scale_, target);
            case DenseType::kFloat64: return add_values<Target, double>(message_.payload, first, count, scale_, target);
            case DenseType::kBfloat16:
                return add_values<Target, Bfloat16>(message_.payload, first, count, scale_, target);
            case DenseType::kNone: break;
        }
    }

    MessageView message_;
    double scale_;
    float quantum_;
    ChunkReader reader_;
    ChunkCursor cursor_;
    bool has_chunk_ = false;
};

template <class Target>
void apply_to(std::vector<Application>& messages, Target* target, uint64_t first, uint64_t numel) {
    const uint64_t block = messages.size() == 1 ? numel : kBlockBytes / sizeof(Target);
    for (uint64_t at = 0; at < numel; at += block) {
        const uint64_t stop = std::min(at + block, numel);
        for (Application& message : messages) message.advance(first + at, first + stop, target + at);
    }
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
                 << message.header.numel << ", the target " << numel << ": apply it to the parameters it was encoded for";
            throw MessageError(what.str());
        }
        validate_payload(message);
        applications.emplace_back(message, scale);
    }
    if (messages.empty()) return;
    uint64_t first = 0;
    for (const Array& target : targets) {
        if (target.dtype == Dtype::kFloat64)
            apply_to(applications, static_cast<double*>(target.data), first, target.numel);
        else
            apply_to(applications, static_cast<float*>(target.data), first, target.numel);
        first += target.numel;
    }
}

}  // namespace gradwire
