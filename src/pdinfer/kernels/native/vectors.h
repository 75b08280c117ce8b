/* Values and vectors of all kernels. bf16 values are uint16_t. A vector is LANES float32 values, in GCC's vector
 * extensions: one source becomes AVX-512, AVX2 or whatever the compiler has. A "pair" is two neighbouring bf16 values in
 * 32 bits. Only CPUs with AVX-512 BF16 multiply pairs (vdpbf16ps); elsewhere a vector of pairs becomes two vectors of
 * floats, the even values and the odd ones, by a shift and a mask.
 */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sets.h"

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline)) /* so that no loop around it takes registers from the loops in it */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef uint16_t bf16;
typedef int64_t i64;

/* Calls an INLINE function with n, from 1 to `most` <= 12, as a constant. Loops up to n are then unrolled, and the sums in
 * them are registers; with an n that is known at run time alone they would be memory. A debugger can step through such a
 * function, and its arrays have one size for all n. */
#define WITH_CONSTANT(n, most, call, ...)                        \
    switch (n) {                                                 \
    case 1: call(1, __VA_ARGS__); break;                         \
    case 2: if ((most) >= 2) call(2, __VA_ARGS__); break;        \
    case 3: if ((most) >= 3) call(3, __VA_ARGS__); break;        \
    case 4: if ((most) >= 4) call(4, __VA_ARGS__); break;        \
    case 5: if ((most) >= 5) call(5, __VA_ARGS__); break;        \
    case 6: if ((most) >= 6) call(6, __VA_ARGS__); break;        \
    case 7: if ((most) >= 7) call(7, __VA_ARGS__); break;        \
    case 8: if ((most) >= 8) call(8, __VA_ARGS__); break;        \
    case 9: if ((most) >= 9) call(9, __VA_ARGS__); break;        \
    case 10: if ((most) >= 10) call(10, __VA_ARGS__); break;     \
    case 11: if ((most) >= 11) call(11, __VA_ARGS__); break;     \
    case 12: if ((most) >= 12) call(12, __VA_ARGS__); break;     \
    }

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* A vector of this type of words, of integers, with the values at these places in a and then b. */
#if defined(__clang__) || __GNUC__ >= 12
#define MIX(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

INLINE floats all_of(float x) { return x - (floats){0}; }

/* Where a lane of `mask` is set that of `a`, elsewhere that of `b`. */
INLINE floats choose(ints mask, floats a, floats b) { return (floats)(((ints)a & mask) | ((ints)b & ~mask)); }

INLINE floats load(const float *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store(float *p, floats x) { memcpy(p, &x, sizeof x); }

INLINE words load_pairs(const bf16 *p) {
    words x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE floats even(words pairs) { return (floats)(pairs << 16); }

INLINE floats odd(words pairs) { return (floats)(pairs & 0xFFFF0000u); }

typedef float quad __attribute__((vector_size(16)));

INLINE float sum_of(floats x) {
    union { floats all; quad parts[LANES / 4]; } v = {x};
    quad sum = v.parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += v.parts[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

INLINE float largest_of(floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

INLINE float from_bf16(bf16 x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}

/* GCC 12 makes five instructions of this conversion where there is one. */
INLINE floats load_bf16(const bf16 *p) {
#if LANES == 16
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#elif defined(HAVE_AVX2)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
#else
    halves x;
    memcpy(&x, p, sizeof x);
    return (floats)(__builtin_convertvector(x, words) << 16);
#endif
}

/* To the nearest bf16, ties to even; a NaN stays one. CPUs that have the instruction take denormals as 0. */
#ifdef HAVE_BF16
INLINE bf16 to_bf16(float x) { return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0); }

INLINE words bf16_bits(floats x) { return (words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }

INLINE void store_bf16(bf16 *p, floats x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
INLINE bf16 to_bf16(float x) {
    union { float f; uint32_t u; } v = {x};
    return x != x ? v.u >> 16 | 0x40 : (v.u + 0x7FFF + (v.u >> 16 & 1)) >> 16;
}

INLINE words bf16_bits(floats x) {
    words u = (words)x, nan = (words)(x != x);
    return (((u + 0x7FFF + (u >> 16 & 1)) & ~nan) | ((u | 0x400000) & nan)) >> 16;
}

INLINE void store_bf16(bf16 *p, floats x) {
    halves y = __builtin_convertvector(bf16_bits(x), halves);
    memcpy(p, &y, sizeof y);
}
#endif

/* The value after rounding to bf16. */
INLINE floats rounded(floats x) { return (floats)(bf16_bits(x) << 16); }

/* e^x for x <= 0, relative error below 2e-7: 2^n * p(f) with |f| <= 1/2, p a Taylor polynomial of 2^f. NaN stays NaN. */
INLINE floats exp_of(floats x) {
    floats t = x * 1.44269504f, p = all_of(1.54035304e-4f);
    t = choose(t < -126.0f, all_of(-126.0f), t);
    floats n = (t + 12582912.0f) - 12582912.0f, f = t - n;
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    floats y = (floats)((ints)p + (__builtin_convertvector(n, ints) << 23));
    return choose(x < -87.0f, all_of(0.0f), choose(x != x, x, y));
}

/* silu(gate) * up */
INLINE floats silu(floats gate, floats up) {
    floats e = exp_of(choose(gate < 0.0f, gate, -gate));
    return gate * (choose(gate < 0.0f, e, all_of(1.0f)) / (1.0f + e)) * up;
}

/* y = silu(gate) * up */
INLINE void silu_times(const bf16 *gate, const bf16 *up, bf16 *y, i64 n) {
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store_bf16(y + i, silu(load_bf16(gate + i), load_bf16(up + i)));
    for (; i < n; i++) {
        float g = from_bf16(gate[i]), v = g / (1.0f + expf(-g)) * from_bf16(up[i]);
        y[i] = to_bf16(v);
    }
}

#ifdef HAVE_BF16

INLINE __m512bh load32(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

/* A pair in all lanes. clang 16 crashes where it sees that the operand of a product is such a broadcast. */
INLINE __m512bh pair_in_all(uint32_t pair) {
    __m512i x = _mm512_set1_epi32((int)pair);
#if defined(__clang_major__) && __clang_major__ < 18
    __asm__("" : "+v"(x));
#endif
    return (__m512bh)x;
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

#endif
