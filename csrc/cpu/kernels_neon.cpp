// NEON on aarch64: 4 floats or 2 doubles at a time.
#include <arm_neon.h>

#include "table.h"

namespace gradwire {
namespace {

struct Lanes32 {
    using Scalar = float;
    using Vector = float32x4_t;
    using Flags = uint32x4_t;
    static constexpr unsigned kLanes = 4;
    static Vector load(const float* from) { return vld1q_f32(from); }
    static void store(float* to, Vector value) { vst1q_f32(to, value); }
    static Vector broadcast(float value) { return vdupq_n_f32(value); }
    static Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
    static Vector subtract(Vector a, Vector b) { return vsubq_f32(a, b); }
    static Flags no_flags() { return vdupq_n_u32(0); }
    static void note_nonfinite(Flags& flags, Vector value) {
        const uint32x4_t magnitude = vreinterpretq_u32_f32(vabsq_f32(value));
        flags = vorrq_u32(flags, vcgtq_u32(magnitude, vdupq_n_u32(0x7f7fffffU)));
    }
    static bool any_nonfinite(Flags flags) { return vmaxvq_u32(flags) != 0; }
    static uint32x4_t passing(Vector value, Vector threshold) { return vcgeq_f32(vabsq_f32(value), threshold); }
    static uint64_t bits(uint32x4_t passing) {
        const uint32x4_t weights = {1, 2, 4, 8};
        return vaddvq_u32(vandq_u32(passing, weights));
    }
    static uint64_t negative(Vector value) {
        return bits(vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_f32(value), 31)));
    }
    static uint32x4_t lanes_of(uint64_t bits) {
        const uint32x4_t own = {1, 2, 4, 8};
        return vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(bits)), own);
    }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = vbslq_f32(lanes_of(changed), vaddq_f32(value, quantum), value);
        return vbslq_f32(lanes_of(minus), vsubq_f32(value, quantum), sum);
    }
    static Vector extract(Vector value, uint32x4_t passing, Vector threshold) {
        const Vector quantum = vbslq_f32(vdupq_n_u32(0x80000000U), value, threshold);
        return vbslq_f32(passing, vsubq_f32(value, quantum), value);
    }
};

struct Lanes64 {
    using Scalar = double;
    using Vector = float64x2_t;
    using Flags = uint64x2_t;
    static constexpr unsigned kLanes = 2;
    static Vector load(const double* from) { return vld1q_f64(from); }
    static void store(double* to, Vector value) { vst1q_f64(to, value); }
    static Vector broadcast(double value) { return vdupq_n_f64(value); }
    static Vector add(Vector a, Vector b) { return vaddq_f64(a, b); }
    static Vector subtract(Vector a, Vector b) { return vsubq_f64(a, b); }
    static Flags no_flags() { return vdupq_n_u64(0); }
    static void note_nonfinite(Flags& flags, Vector value) {
        const uint64x2_t magnitude = vreinterpretq_u64_f64(vabsq_f64(value));
        flags = vorrq_u64(flags, vcgtq_u64(magnitude, vdupq_n_u64(0x7fefffffffffffffU)));
    }
    static bool any_nonfinite(Flags flags) { return (vgetq_lane_u64(flags, 0) | vgetq_lane_u64(flags, 1)) != 0; }
    static uint64x2_t passing(Vector value, Vector threshold) { return vcgeq_f64(vabsq_f64(value), threshold); }
    static uint64_t bits(uint64x2_t passing) {
        return (vgetq_lane_u64(passing, 0) & 1) | (vgetq_lane_u64(passing, 1) & 2);
    }
    static uint64_t negative(Vector value) {
        return bits(vreinterpretq_u64_s64(vshrq_n_s64(vreinterpretq_s64_f64(value), 63)));
    }
    static uint64x2_t lanes_of(uint64_t bits) {
        const uint64x2_t own = {1, 2};
        return vtstq_u64(vdupq_n_u64(bits), own);
    }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = vbslq_f64(lanes_of(changed), vaddq_f64(value, quantum), value);
        return vbslq_f64(lanes_of(minus), vsubq_f64(value, quantum), sum);
    }
    static Vector extract(Vector value, uint64x2_t passing, Vector threshold) {
        const Vector quantum = vbslq_f64(vdupq_n_u64(0x8000000000000000U), value, threshold);
        return vbslq_f64(passing, vsubq_f64(value, quantum), value);
    }
};

float32x4_t load_half(const Half* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
}
float32x4_t load_bfloat16(const Bfloat16* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}

struct NeonIsa {
    using Lanes32 = gradwire::Lanes32;
    using Lanes64 = gradwire::Lanes64;
    struct Float32To32 {
        using Scalar = float;
        static float32x4_t load(const float* from) { return vld1q_f32(from); }
    };
    struct HalfTo32 {
        using Scalar = Half;
        static float32x4_t load(const Half* from) { return load_half(from); }
        static float32x4_t rounded(float32x4_t value) { return vcvt_f32_f16(vcvt_f16_f32(value)); }
    };
    struct Bfloat16To32 {
        using Scalar = Bfloat16;
        static float32x4_t load(const Bfloat16* from) { return load_bfloat16(from); }
        static float32x4_t rounded(float32x4_t value) {
            const uint32x4_t bits = vreinterpretq_u32_f32(value);
            const uint32x4_t last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
            const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last);
            return vreinterpretq_f32_u32(vandq_u32(sum, vdupq_n_u32(0xffff0000U)));
        }
    };
    struct Float32To64 {
        using Scalar = float;
        static float64x2_t load(const float* from) { return vcvt_f64_f32(vld1_f32(from)); }
    };
    struct Float64To64 {
        using Scalar = double;
        static float64x2_t load(const double* from) { return vld1q_f64(from); }
    };
    // Two values: reading four would run beyond the array's end.
    struct HalfTo64 {
        using Scalar = Half;
        static float64x2_t load(const Half* from) {
            return float64x2_t{to_scalar<double>(from[0]), to_scalar<double>(from[1])};
        }
    };
    struct Bfloat16To64 {
        using Scalar = Bfloat16;
        static float64x2_t load(const Bfloat16* from) {
            return float64x2_t{to_scalar<double>(from[0]), to_scalar<double>(from[1])};
        }
    };
};

}  // namespace

extern const Kernels kNeonKernels;
const Kernels kNeonKernels = make_kernels<NeonIsa>("neon");

}  // namespace gradwire
