/* Included before a kernel's source, compiled for x86-64-v3: the instructions of AVX-512 and AMX that kernels use, in plain
 * C, so that the bodies for such CPUs run on others. Written after Intel's Software Developer's Manual: products of bf16
 * take and give denormals as 0, and a masked load reads nothing else. An intrinsic that is not here does not compile.
 *
 * LIKE is 1 for AVX-512 F, BW, DQ and VL, 2 with VNNI and BF16, 3 with AMX too. */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wpsabi"

#define IN_C static inline __attribute__((always_inline, unused))

typedef union {
    __m512 m;
    __m512i mi;
    __m512d md;
    __m512bh mbh;
    __m256 half[2];
    __m256i half_i[2];
    float f[16];
    double d[8];
    uint64_t u64[8];
    uint32_t u32[16];
    int32_t i32[16];
    uint16_t u16[32];
    int16_t i16[32];
    uint8_t u8[64];
    int8_t i8[64];
} All;

typedef union {
    __m256 m;
    __m256i mi;
    __m256bh mbh;
    float f[8];
    uint16_t u16[16];
    int8_t i8[32];
} Half;

typedef union {
    __m128 m;
    __m128i mi;
    __m128bh mbh;
    float f[4];
    uint16_t u16[8];
    uint8_t u8[16];
} Quarter;

IN_C float c_no_denormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

IN_C float c_from_bf16(uint16_t x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return c_no_denormal(v.f);
}

IN_C uint16_t c_to_bf16(float x) {
    union { float f; uint32_t u; } v = {c_no_denormal(x)};
    return x != x ? v.u >> 16 | 0x40 : (v.u + 0x7FFF + (v.u >> 16 & 1)) >> 16;
}

IN_C float c_add_product(float sum, uint16_t a, uint16_t b) {
    return c_no_denormal(fmaf(c_from_bf16(a), c_from_bf16(b), sum));
}

#define EACH(n) for (int i = 0; i < n; i++)
#define VECTOR(NAME, TYPE, MEMBER, N, VALUE, ...)                                                                      \
    IN_C TYPE NAME(__VA_ARGS__) {                                                                                      \
        All to;                                                                                                        \
        EACH(N) to.MEMBER[i] = VALUE;                                                                                  \
        return (TYPE)to.mi;                                                                                            \
    }
#define F(x) (((All){.m = x}).f[i])
#define I32(x) (((All){.mi = x}).i32[i])

/* Of single floats. */
VECTOR(c_add_ps, __m512, f, 16, F(a) + F(b), __m512 a, __m512 b)
VECTOR(c_sub_ps, __m512, f, 16, F(a) - F(b), __m512 a, __m512 b)
VECTOR(c_mul_ps, __m512, f, 16, F(a) * F(b), __m512 a, __m512 b)
VECTOR(c_max_ps, __m512, f, 16, F(a) > F(b) ? F(a) : F(b), __m512 a, __m512 b)
VECTOR(c_fmadd_ps, __m512, f, 16, fmaf(F(a), F(b), F(c)), __m512 a, __m512 b, __m512 c)
VECTOR(c_scalef_ps, __m512, f, 16, F(a) * exp2f(floorf(F(b))), __m512 a, __m512 b)
VECTOR(c_set1_ps, __m512, f, 16, x, float x)
VECTOR(c_setzero_ps, __m512, f, 16, 0, void)
VECTOR(c_mask_mov_ps, __m512, f, 16, mask >> i & 1 ? F(a) : F(other), __m512 other, __mmask16 mask, __m512 a)
VECTOR(c_roundscale, __m512, f, 16, nearbyintf(F(a)), __m512 a)
VECTOR(c_permutex2var_ps, __m512, f, 16, ((All){.m = at.i32[i] & 16 ? b : a}).f[at.i32[i] & 15], __m512 a, All at, __m512 b)

IN_C __mmask16 c_less_ps(__m512 a, __m512 b) {
    unsigned mask = 0;
    EACH(16) mask |= (unsigned)(F(a) < F(b)) << i;
    return (__mmask16)mask;
}

/* Of integers. */
VECTOR(c_and, __m512i, u64, 8, ((All){.mi = a}).u64[i] & ((All){.mi = b}).u64[i], __m512i a, __m512i b)
VECTOR(c_set1_epi16, __m512i, i16, 32, x, short x)
VECTOR(c_set1_epi32, __m512i, i32, 16, x, int x)
VECTOR(c_slli_epi16, __m512i, u16, 32, (uint16_t)(((All){.mi = a}).u16[i] << by), __m512i a, unsigned by)
VECTOR(c_slli_epi32, __m512i, u32, 16, ((All){.mi = a}).u32[i] << by, __m512i a, unsigned by)
VECTOR(c_srli_epi16, __m512i, u16, 32, (uint16_t)(((All){.mi = a}).u16[i] >> by), __m512i a, unsigned by)
VECTOR(c_permutexvar_epi16, __m512i, u16, 32, ((All){.mi = a}).u16[((All){.mi = at}).u16[i] & 31], __m512i at, __m512i a)
VECTOR(c_cvtepu8_epi32, __m512i, u32, 16, ((Quarter){.mi = a}).u8[i], __m128i a)
VECTOR(c_cvtepi8_epi16, __m512i, i16, 32, ((Half){.mi = a}).i8[i], __m256i a)
VECTOR(c_cvtepu16_epi32, __m512i, u32, 16, ((Half){.mi = a}).u16[i], __m256i a)
#define NEIGHBOURS                                                                                                     \
    ((All){.mi = a}).i16[2 * i] * ((All){.mi = b}).i16[2 * i] +                                                        \
        ((All){.mi = a}).i16[2 * i + 1] * ((All){.mi = b}).i16[2 * i + 1]
VECTOR(c_madd_epi16, __m512i, i32, 16, NEIGHBOURS, __m512i a, __m512i b)
#define BYTES(K) (unsigned)(((All){.mi = a}).u8[4 * i + K] * ((All){.mi = b}).i8[4 * i + K])
VECTOR(c_dpbusd_epi32, __m512i, u32, 16, (unsigned)I32(sum) + BYTES(0) + BYTES(1) + BYTES(2) + BYTES(3), __m512i sum,
       __m512i a, __m512i b)
VECTOR(c_set1_epi8, __m512i, i8, 64, x, char x)
VECTOR(c_maskz_loadu_epi16, __m512i, u16, 32, mask >> i & 1 ? ((const uint16_t *)p)[i] : 0, __mmask32 mask, const void *p)

/* The low or high values of each 128 bits of a and b, alternating. */
#define UNPACK(NAME, TYPE, FROM, MEMBER, N, PER, AT)                                                                   \
    IN_C TYPE NAME(TYPE x, TYPE y) {                                                                                   \
        All a = {.FROM = x}, b = {.FROM = y}, to;                                                                      \
        EACH(N) to.MEMBER[i] = (i & 1 ? b : a).MEMBER[i / PER * PER + (i % PER >> 1) + (AT)];                          \
        return to.FROM;                                                                                                \
    }
UNPACK(c_unpacklo_ps, __m512, m, f, 16, 4, 0)
UNPACK(c_unpackhi_ps, __m512, m, f, 16, 4, 2)
UNPACK(c_unpacklo_pd, __m512d, md, d, 8, 2, 0)
UNPACK(c_unpackhi_pd, __m512d, md, d, 8, 2, 1)
UNPACK(c_unpacklo_epi16, __m512i, mi, u16, 32, 8, 0)
UNPACK(c_unpackhi_epi16, __m512i, mi, u16, 32, 8, 4)

IN_C __m512i c_loadu(const void *p) {
    All x;
    memcpy(&x, p, sizeof x);
    return x.mi;
}

IN_C __m512i c_broadcast_i64x4(__m256i x) { return ((All){.half_i = {x, x}}).mi; }

IN_C void c_storeu(void *p, __m512i x) { memcpy(p, &x, sizeof x); }

IN_C __m512 c_cvtph_ps(__m256i x) {
    All to = {.half = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))}};
    return to.m;
}

/* Of bf16. */
VECTOR(c_cvtne2ps_pbh, __m512bh, u16, 32, c_to_bf16(((All){.m = i < 16 ? low : high}).f[i % 16]), __m512 high, __m512 low)

IN_C __m256bh c_cvtneps_pbh(__m512 x) {
    Half to;
    EACH(16) to.u16[i] = c_to_bf16(F(x));
    return to.mbh;
}

IN_C __m128bh c_cvtneps_pbh_256(__m256 x) {
    Quarter to;
    EACH(8) to.u16[i] = c_to_bf16(((Half){.m = x}).f[i]);
    return to.mbh;
}

IN_C __m128bh c_cvtneps_pbh_128(__m128 x) {
    Quarter to = {.u16 = {0}};
    EACH(4) to.u16[i] = c_to_bf16(((Quarter){.m = x}).f[i]);
    return to.mbh;
}

IN_C __m512 c_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
    All to = {.m = sum}, a = {.mbh = x}, b = {.mbh = y};
    EACH(16) {
        to.f[i] = c_add_product(to.f[i], a.u16[2 * i + 1], b.u16[2 * i + 1]);
        to.f[i] = c_add_product(to.f[i], a.u16[2 * i], b.u16[2 * i]);
    }
    return to.m;
}

#define _mm512_add_ps c_add_ps
#define _mm512_sub_ps c_sub_ps
#define _mm512_mul_ps c_mul_ps
#define _mm512_max_ps c_max_ps
#define _mm512_fmadd_ps c_fmadd_ps
#define _mm512_scalef_ps c_scalef_ps
#define _mm512_set1_ps c_set1_ps
#define _mm512_setzero_ps c_setzero_ps
#define _mm512_mask_mov_ps c_mask_mov_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(x, how) ({ _Static_assert((how) == 0, "to the nearest"); c_roundscale(x); })
#define _mm512_permutex2var_ps(a, at, b) c_permutex2var_ps(a, (All){.mi = at}, b)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, how) ({ _Static_assert((how) == _CMP_LT_OQ, "less"); c_less_ps(a, b); })
#define _mm512_and_si512 c_and
#define _mm512_set1_epi16 c_set1_epi16
#define _mm512_set1_epi32 c_set1_epi32
#define _mm512_set_epi32(p, o, n, m, l, k, j, i, h, g, f, e, d, c, b, a)                                               \
    (((All){.i32 = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p}}).mi)
#define _mm512_slli_epi16 c_slli_epi16
#define _mm512_slli_epi32 c_slli_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 c_srli_epi16
#define _mm512_permutexvar_epi16 c_permutexvar_epi16
#define _mm512_broadcast_i64x4 c_broadcast_i64x4
#define _mm512_cvtepu8_epi32 c_cvtepu8_epi32
#define _mm512_cvtepi8_epi16 c_cvtepi8_epi16
#define _mm512_cvtepu16_epi32 c_cvtepu16_epi32
#define _mm512_madd_epi16 c_madd_epi16
#define _mm512_dpbusd_epi32 c_dpbusd_epi32
#define _mm512_set1_epi8 c_set1_epi8
#define _mm512_maskz_loadu_epi16 c_maskz_loadu_epi16
#define _mm512_unpacklo_ps c_unpacklo_ps
#define _mm512_unpackhi_ps c_unpackhi_ps
#define _mm512_unpacklo_pd c_unpacklo_pd
#define _mm512_unpackhi_pd c_unpackhi_pd
#define _mm512_unpacklo_epi16 c_unpacklo_epi16
#define _mm512_unpackhi_epi16 c_unpackhi_epi16
#define _mm512_castps_pd(x) (((All){.m = x}).md)
#define _mm512_castpd_ps(x) (((All){.md = x}).m)
#define _mm512_castsi512_ps(x) (((All){.mi = x}).m)
#define _mm512_castps512_ps256(x) (((All){.m = x}).half[0])
#define _mm512_castsi512_si256(x) (((All){.mi = x}).half_i[0])
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(x, at) (((All){.m = x}).half[at])
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64(x, at) (((All){.mi = x}).half_i[at])
#define _mm512_loadu_si512 c_loadu
#define _mm512_storeu_si512 c_storeu
#define _mm512_loadu_ps(p) (((All){.mi = c_loadu(p)}).m)
#define _mm512_storeu_ps(p, x) c_storeu(p, ((All){.m = x}).mi)
#define _mm512_cvtph_ps c_cvtph_ps
#define _mm512_cvtne2ps_pbh c_cvtne2ps_pbh
#define _mm512_cvtneps_pbh c_cvtneps_pbh
#define _mm256_cvtneps_pbh c_cvtneps_pbh_256
#define _mm_cvtneps_pbh c_cvtneps_pbh_128
#define _mm512_dpbf16_ps c_dpbf16_ps

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if LIKE >= 2
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1
#endif
#if LIKE >= 3
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#endif

/* Tiles of this thread. Those that were not written hold NaN, though `ldtilecfg` makes zeros of them. */
typedef struct {
    uint8_t config[64];
    union {
        uint8_t bytes[16][64];
        uint16_t bf16[16][32];
        float f[16][16];
    } tile[8];
} Tiles;

#define SHARED __attribute__((weak, visibility("default")))

SHARED _Thread_local Tiles tiles_of_thread;
SHARED int tiles_allowed = 1; /* what the operating system says when it is asked */
SHARED int tiles_granted;     /* whether it was asked */
SHARED long tile_faults;      /* instructions that would have been signals */

SHARED void configure_tiles(const uint8_t *config) { memcpy(tiles_of_thread.config, config, 64); }
SHARED void configuration_of_tiles(uint8_t *config) { memcpy(config, tiles_of_thread.config, 64); }

IN_C void c_configure(const uint8_t *config) {
    memset(tiles_of_thread.tile, 0xFF, sizeof tiles_of_thread.tile);
    memcpy(tiles_of_thread.config, config, 64);
    tile_faults += !tiles_granted || config[0] != 1;
    EACH(8) tile_faults += config[48 + i] > 16 || config[16 + 2 * i] > 64 || config[17 + 2 * i];
}

IN_C int c_rows(int t) {
    int rows = tiles_of_thread.config[0] ? tiles_of_thread.config[48 + t] : 0;
    if (!rows) tile_faults++;
    return rows;
}

IN_C int c_bytes(int t) { return tiles_of_thread.config[16 + 2 * t]; }

IN_C void c_load_tile(int t, const char *from, long bytes) {
    memset(tiles_of_thread.tile[t].bytes, 0, 1024);
    for (int row = 0; row < c_rows(t); row++) memcpy(tiles_of_thread.tile[t].bytes[row], from + row * bytes, c_bytes(t));
}

IN_C void c_store_tile(int t, char *to, long bytes) {
    for (int row = 0; row < c_rows(t); row++) memcpy(to + row * bytes, tiles_of_thread.tile[t].bytes[row], c_bytes(t));
}

IN_C void c_zero_tile(int t) {
    if (c_rows(t)) memset(tiles_of_thread.tile[t].bytes, 0, 1024);
}

IN_C void c_multiply_tiles(int c, int a, int b) {
    tile_faults += c_bytes(a) / 4 != c_rows(b) || c_rows(c) != c_rows(a) || c_bytes(c) != c_bytes(b);
    for (int m = 0; m < c_rows(c); m++)
        for (int k = 0; k < 2 * c_rows(b); k++)
            for (int o = 0; o < c_bytes(c) / 4; o++) {
                float *sum = &tiles_of_thread.tile[c].f[m][o];
                *sum = c_add_product(*sum, tiles_of_thread.tile[a].bf16[m][k],
                                     tiles_of_thread.tile[b].bf16[k / 2][2 * o + k % 2]);
            }
}

IN_C long c_arch_prctl(long code, unsigned long *at) {
    if (!tiles_allowed) return -1;
    if (code == 0x1023) return tiles_granted = (unsigned long)at == 18, !tiles_granted;
    *at = (unsigned long)tiles_granted << 18;
    return 0;
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) c_configure((const uint8_t *)(config))
#define _tile_storeconfig(to) memcpy(to, tiles_of_thread.config, 64)
#define _tile_release() memset(&tiles_of_thread, 0, sizeof tiles_of_thread)
#define _tile_loadd(t, from, bytes) c_load_tile(t, (const char *)(from), bytes)
#define _tile_stored(t, to, bytes) c_store_tile(t, (char *)(to), bytes)
#define _tile_zero(t) c_zero_tile(t)
#define _tile_dpbf16ps(c, a, b) c_multiply_tiles(c, a, b)
#define syscall(number, code, value) c_arch_prctl(code, (unsigned long *)(value))
