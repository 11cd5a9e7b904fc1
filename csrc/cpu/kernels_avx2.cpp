// AVX2 with F16C and BMI2: 8 floats or 4 doubles at a time.
#include <immintrin.h>

#include "table.h"

namespace gradwire {
namespace {

struct Lanes32 {
    using Scalar = float;
    using Vector = __m256;
    using Flags = __m256i;
    static constexpr unsigned kLanes = 8;
    static Vector load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
    static Vector broadcast(float value) { return _mm256_set1_ps(value); }
    static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
    static Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
    static Vector magnitude(Vector value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), value); }
    static Flags no_flags() { return _mm256_setzero_si256(); }
    static void note_nonfinite(Flags& flags, Vector value) {
        const __m256i largest = _mm256_set1_epi32(0x7f7fffff);
        flags = _mm256_or_si256(flags, _mm256_cmpgt_epi32(_mm256_castps_si256(magnitude(value)), largest));
    }
    static bool any_nonfinite(Flags flags) { return !_mm256_testz_si256(flags, flags); }
    static Vector passing(Vector value, Vector threshold) {
        return _mm256_cmp_ps(magnitude(value), threshold, _CMP_GE_OQ);
    }
    static uint64_t bits(Vector passing) { return static_cast<uint32_t>(_mm256_movemask_ps(passing)); }
    static uint64_t negative(Vector value) { return static_cast<uint32_t>(_mm256_movemask_ps(value)); }
    static Vector lanes_of(uint64_t bits) {
        const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
        return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, own), own));
    }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = _mm256_blendv_ps(value, _mm256_add_ps(value, quantum), lanes_of(changed));
        return _mm256_blendv_ps(sum, _mm256_sub_ps(value, quantum), lanes_of(minus));
    }
    static Vector extract(Vector value, Vector passing, Vector threshold) {
        const Vector quantum = _mm256_or_ps(_mm256_and_ps(value, _mm256_set1_ps(-0.0F)), threshold);
        return _mm256_blendv_ps(value, _mm256_sub_ps(value, quantum), passing);
    }
};

struct Lanes64 {
    using Scalar = double;
    using Vector = __m256d;
    using Flags = __m256i;
    static constexpr unsigned kLanes = 4;
    static Vector load(const double* from) { return _mm256_loadu_pd(from); }
    static void store(double* to, Vector value) { _mm256_storeu_pd(to, value); }
    static Vector broadcast(double value) { return _mm256_set1_pd(value); }
    static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
    static Vector subtract(Vector a, Vector b) { return _mm256_sub_pd(a, b); }
    static Vector magnitude(Vector value) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), value); }
    static Flags no_flags() { return _mm256_setzero_si256(); }
    static void note_nonfinite(Flags& flags, Vector value) {
        const __m256i largest = _mm256_set1_epi64x(0x7fefffffffffffff);
        flags = _mm256_or_si256(flags, _mm256_cmpgt_epi64(_mm256_castpd_si256(magnitude(value)), largest));
    }
    static bool any_nonfinite(Flags flags) { return !_mm256_testz_si256(flags, flags); }
    static Vector passing(Vector value, Vector threshold) {
        return _mm256_cmp_pd(magnitude(value), threshold, _CMP_GE_OQ);
    }
    static uint64_t bits(Vector passing) { return static_cast<uint32_t>(_mm256_movemask_pd(passing)); }
    static uint64_t negative(Vector value) { return static_cast<uint32_t>(_mm256_movemask_pd(value)); }
    static Vector lanes_of(uint64_t bits) {
        const __m256i own = _mm256_setr_epi64x(1, 2, 4, 8);
        const __m256i all = _mm256_set1_epi64x(static_cast<int64_t>(bits));
        return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(all, own), own));
    }
    static Vector add_signed(Vector value, uint64_t changed, uint64_t minus, Vector quantum) {
        const Vector sum = _mm256_blendv_pd(value, _mm256_add_pd(value, quantum), lanes_of(changed));
        return _mm256_blendv_pd(sum, _mm256_sub_pd(value, quantum), lanes_of(minus));
    }
    static Vector extract(Vector value, Vector passing, Vector threshold) {
        const Vector quantum = _mm256_or_pd(_mm256_and_pd(value, _mm256_set1_pd(-0.0)), threshold);
        return _mm256_blendv_pd(value, _mm256_sub_pd(value, quantum), passing);
    }
};

struct Avx2Isa {
    using Lanes32 = gradwire::Lanes32;
    using Lanes64 = gradwire::Lanes64;
    struct Float32To32 {
        using Scalar = float;
        static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
    };
    struct HalfTo32 {
        using Scalar = Half;
        static __m256 load(const Half* from) {
            return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        }
        static __m256 rounded(__m256 value) {
            return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
    };
    struct Bfloat16To32 {
        using Scalar = Bfloat16;
        static __m256 load(const Bfloat16* from) {
            const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
        }
        static __m256 rounded(__m256 value) {
            const __m256i bits = _mm256_castps_si256(value);
            const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
            return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(-0x10000)));
        }
    };
    struct Float32To64 {
        using Scalar = float;
        static __m256d load(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
    };
    struct Float64To64 {
        using Scalar = double;
        static __m256d load(const double* from) { return _mm256_loadu_pd(from); }
    };
    struct HalfTo64 {
        using Scalar = Half;
        static __m256d load(const Half* from) {
            return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
        }
    };
    struct Bfloat16To64 {
        using Scalar = Bfloat16;
        static __m256d load(const Bfloat16* from) {
            const __m128i narrow = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
            return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(narrow), 16)));
        }
    };
};

}  // namespace

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = make_kernels<Avx2Isa>("avx2");

}  // namespace gradwire
