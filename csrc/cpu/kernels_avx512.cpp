// AVX-512 F, BW, DQ, VL with BMI2: 16 floats or 8 doubles at a time, masks straight from the comparison.
#include <immintrin.h>

#include "table.h"

namespace gradwire {
namespace {

struct Lanes32 {
    using Scalar = float;
    using Vector = __m512;
    using Flags = __mmask16;
    static constexpr unsigned kLanes = 16;
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
    static Vector broadcast(float value) { return _mm512_set1_ps(value); }
    static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
    static Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
    static Flags no_flags() { return 0; }
    // 0x99: quiet NaN, +infinity, -infinity, signalling NaN
    static void note_nonfinite(Flags& flags, Vector value) { flags |= _mm512_fpclass_ps_mask(value, 0x99); }
    static bool any_nonfinite(Flags flags) { return flags != 0; }
    static __mmask16 passing(Vector value, Vector threshold) {
        return _mm512_cmp_ps_mask(_mm512_abs_ps(value), threshold, _CMP_GE_OQ);
    }
    static uint64_t bits(__mmask16 passing) { return passing; }
    static uint64_t negative(Vector value) { return _mm512_movepi32_mask(_mm512_castps_si512(value)); }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = _mm512_mask_add_ps(value, static_cast<__mmask16>(changed), value, quantum);
        return _mm512_mask_sub_ps(sum, static_cast<__mmask16>(minus), value, quantum);
    }
    static Vector extract(Vector value, __mmask16 passing, Vector threshold) {
        // (value & sign bit) | threshold
        const __m512i quantum = _mm512_ternarylogic_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(INT32_MIN),
                                                          _mm512_castps_si512(threshold), 0xea);
        return _mm512_mask_sub_ps(value, passing, value, _mm512_castsi512_ps(quantum));
    }
};

struct Lanes64 {
    using Scalar = double;
    using Vector = __m512d;
    using Flags = __mmask8;
    static constexpr unsigned kLanes = 8;
    static Vector load(const double* from) { return _mm512_loadu_pd(from); }
    static void store(double* to, Vector value) { _mm512_storeu_pd(to, value); }
    static Vector broadcast(double value) { return _mm512_set1_pd(value); }
    static Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
    static Vector subtract(Vector a, Vector b) { return _mm512_sub_pd(a, b); }
    static Flags no_flags() { return 0; }
    static void note_nonfinite(Flags& flags, Vector value) {
        flags = static_cast<Flags>(flags | _mm512_fpclass_pd_mask(value, 0x99));
    }
    static bool any_nonfinite(Flags flags) { return flags != 0; }
    static __mmask8 passing(Vector value, Vector threshold) {
        return _mm512_cmp_pd_mask(_mm512_abs_pd(value), threshold, _CMP_GE_OQ);
    }
    static uint64_t bits(__mmask8 passing) { return passing; }
    static uint64_t negative(Vector value) { return _mm512_movepi64_mask(_mm512_castpd_si512(value)); }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = _mm512_mask_add_pd(value, static_cast<__mmask8>(changed), value, quantum);
        return _mm512_mask_sub_pd(sum, static_cast<__mmask8>(minus), value, quantum);
    }
    static Vector extract(Vector value, __mmask8 passing, Vector threshold) {
        const __m512i quantum = _mm512_ternarylogic_epi64(_mm512_castpd_si512(value), _mm512_set1_epi64(INT64_MIN),
                                                          _mm512_castpd_si512(threshold), 0xea);
        return _mm512_mask_sub_pd(value, passing, value, _mm512_castsi512_pd(quantum));
    }
};

struct Avx512Isa {
    using Lanes32 = gradwire::Lanes32;
    using Lanes64 = gradwire::Lanes64;
    struct Float32To32 {
        using Scalar = float;
        static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
    };
    struct HalfTo32 {
        using Scalar = Half;
        static __m512 load(const Half* from) {
            return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        }
        static __m512 rounded(__m512 value) {
            return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
    };
    struct Bfloat16To32 {
        using Scalar = Bfloat16;
        static __m512 load(const Bfloat16* from) {
            const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
        }
        static __m512 rounded(__m512 value) {
            const __m512i bits = _mm512_castps_si512(value);
            const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
            return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(-0x10000)));
        }
    };
    struct Float32To64 {
        using Scalar = float;
        static __m512d load(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
    };
    struct Float64To64 {
        using Scalar = double;
        static __m512d load(const double* from) { return _mm512_loadu_pd(from); }
    };
    struct HalfTo64 {
        using Scalar = Half;
        static __m512d load(const Half* from) {
            return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
        }
    };
    struct Bfloat16To64 {
        using Scalar = Bfloat16;
        static __m512d load(const Bfloat16* from) {
            const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16)));
        }
    };
};

}  // namespace

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = make_kernels<Avx512Isa>("avx512");

}  // namespace gradwire
