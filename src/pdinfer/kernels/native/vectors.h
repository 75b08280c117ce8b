/* What every kernel is made of: bfloat16, vectors of 16 lanes, and what they lack. Included by each source.
 *
 * bf16 values are uint16_t. A "pair" is two neighbouring bf16 values in 32 bits, the unit of vdpbf16ps: one such
 * instruction adds, for 16 lanes, the two products of a pair of one operand and a pair of the other, in float32.
 */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int64_t i64;

INLINE float from_bf16(bf16 x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}

INLINE bf16 to_bf16(float x) { return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0); }

INLINE __m512bh load32(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512 load16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

INLINE void store16(bf16 *p, __m512 x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

/* e^x for x <= 0, relative error below 2e-7: 2^n * p(f) with |f| <= 1/2, p a Taylor polynomial of 2^f. NaN stays NaN:
 * of two values that are not ordered vmaxps gives the second. */
INLINE __m512 exp16(__m512 x) {
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-126.0f), _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
    __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.54035304e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.33335581e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __m512 y = _mm512_scalef_ps(p, n);
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ), _mm512_setzero_ps());
}

/* The sums over the lanes of four vectors. */
INLINE __m128 sums4(const __m512 *v) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512 all = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Lane order of two vectors of sums whose weights came from unpacklo and unpackhi: back to that of the 32 columns. */
#define LOW _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0)
#define HIGH _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8)
