// Plain C++, one element at a time: runs on every processor and is the most readable of the tables.
#include "table.h"

namespace gradwire {
namespace {

template <class Value>
struct ScalarLanes {
    using Scalar = Value;
    using Vector = Value;
    using Flags = bool;
    static constexpr unsigned kLanes = 1;
    static Vector load(const Scalar* from) { return *from; }
    static void store(Scalar* to, Vector value) { *to = value; }
    static Vector broadcast(Scalar value) { return value; }
    static Vector add(Vector a, Vector b) { return a + b; }
    static Vector subtract(Vector a, Vector b) { return a - b; }
    static Flags no_flags() { return false; }
    static void note_nonfinite(Flags& flags, Vector value) { flags |= !is_finite(value); }
    static bool any_nonfinite(Flags flags) { return flags; }
    static bool passing(Vector value, Vector threshold) { return absolute(value) >= threshold; }
    static uint64_t bits(bool passing) { return passing; }
    static uint64_t negative(Vector value) { return value < 0; }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        return changed & 1 ? value + (minus & 1 ? -quantum : quantum) : value;
    }
    static Vector extract(Vector value, bool passing, Vector threshold) {
        return passing ? value - (value < 0 ? -threshold : threshold) : value;
    }
};

template <class From, class To>
struct ScalarLoad {
    using Scalar = From;
    static To load(const From* from) { return to_scalar<To>(*from); }
};

template <class From>
struct ScalarHalf : ScalarLoad<From, float> {
    static float rounded(float value) { return rounded_to(From{}, value); }
};

struct ScalarIsa {
    using Lanes32 = ScalarLanes<float>;
    using Lanes64 = ScalarLanes<double>;
    using Float32To32 = ScalarLoad<float, float>;
    using HalfTo32 = ScalarHalf<Half>;
    using Bfloat16To32 = ScalarHalf<Bfloat16>;
    using Float32To64 = ScalarLoad<float, double>;
    using Float64To64 = ScalarLoad<double, double>;
    using HalfTo64 = ScalarLoad<Half, double>;
    using Bfloat16To64 = ScalarLoad<Bfloat16, double>;
};

}  // namespace

const Kernels kScalarKernels = make_kernels<ScalarIsa>("scalar");

}  // namespace gradwire
