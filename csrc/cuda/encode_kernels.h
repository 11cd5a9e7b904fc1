// The kernels of the encoder as its host code sees them. nvcc compiles encode.cu alone; encoder.cpp is any C++
// compiler's.
#pragma once

#include "budget.h"
#include "encode_chunk.h"
#include "memory.h"
#include "policy.h"

namespace gradwire::cuda {

inline constexpr unsigned kBlock = 256;
inline constexpr unsigned kPlanBlock = 1024;

// Values of one message that only kernels use.
struct Scratch {
    Plan plan;
    uint64_t ties_before;  // with a budget: elements in the lowest bin in the parts before
    uint32_t crc;
    uint32_t sealed_blocks;
};

// Totals of the messages of one step.
struct StepTotals {
    unsigned long long count;
    unsigned long long message_bytes;
    uint32_t sealed_messages;
};

// The message of one part, and the memory of its pass 2.
struct PartWork {
    Masks masks;
    Scratch* scratch;
    ChunkRecord* records;
    uint8_t* message;
    uint8_t* copy;  // pinned; may be null
    MessageStatus* status;

    GRADWIRE_HD uint32_t* message_words() const { return reinterpret_cast<uint32_t*>(message); }
};

inline constexpr unsigned kMostParts = 32;  // of one launch

// The parts first, first + 1, ... as the argument of a kernel.
struct PartTable {
    uint32_t first = 0;
    uint32_t count = 0;
    PartWork parts[kMostParts];
};
static_assert(sizeof(PartTable) <= 3800, "fits beside a kernel's other arguments");

// The kernels for residuals of float or double, described in encode.cu.
template <class Residual>
struct EncodeKernels {
    // By the dtype of the update; kNone: the update is in the residual already. Updates of float64 need a residual of
    // it.
    void (*extract[kDtypes])(ArrayTable updates, ExtractTarget<Residual> to, const EncoderState* state,
                             double rounding_point, uint64_t first_group, bool dense);
    void (*deal)(Masks whole, Partition partition, PartTable table);
    void (*plan)(PartTable table, const EncoderState* state, bool skip_nonfinite, StepTotals* totals,
                 const Selection* only_over);
    void (*size)(PartTable table, const Selection* only_over);
    void (*layout)(PartTable table, const EncoderState* state, uint32_t key, const Selection* only_over);
    void (*weigh)(PartTable table, Budget budget, const EncoderState* state, Selection* selection);
    void (*put_back)(Masks whole, Residual* residual, const EncoderState* state, uint64_t* bins,
                     const Selection* selection);
    void (*choose)(uint64_t* bins, uint64_t most_changed, double rounding_point, Selection* selection,
                   EncoderState* state);
    void (*count_ties)(PartTable table, Partition partition, const Residual* residual, const Selection* selection);
    void (*order_ties)(PartTable table, Selection* selection);
    void (*keep_largest)(PartTable table, Partition partition, Residual* residual, const Selection* selection,
                         const EncoderState* state);
    void (*write)(PartTable table, Masks whole, Residual* residual, const EncoderState* state);
    void (*clip)(Residual* residual, uint64_t numel, double clip_limit, const Scratch* scratch, EncoderState* state);
    void (*values)(PartTable table, Partition partition, Residual* residual, DenseType dtype, uint32_t key,
                   const EncoderState* state);
    void (*seal)(PartTable table, uint32_t messages, uint64_t numel, Policy policy, bool follows, StepTotals* totals,
                 EncoderState* state);
    void (*publish)(PartTable table);
    void (*sample)(ArrayTable updates, const Residual* residual, uint64_t begin, uint64_t end, uint64_t numel,
                   uint64_t stride, uint32_t* bins, Policy policy, EncoderState* state);
    void (*quantile)(uint32_t* bins, Policy policy, EncoderState* state);
    void (*begin)(EncoderState* state, uint16_t threshold, uint32_t step);
    void (*learn)(Policy policy, EncoderState* state);
    void (*clear_sample)(EncoderState* state);
};
template <class Residual>
const EncodeKernels<Residual>& encode_kernels();

}  // namespace gradwire::cuda
