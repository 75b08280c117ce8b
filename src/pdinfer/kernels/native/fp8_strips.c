/* Products with FP8 weights that lie in strips, as bf16 weights do (strips.c). A block of a strip has 128 inputs, and each of
 * its halves one scale. Up to FEW rows multiply the numbers as they are read; for more a block becomes bf16 in the
 * first-level cache, and all panels pass over it there. Rows and weights stay whole numbers of their scales in either case:
 * both scales come to the sums of a block. */

#include "amx.h"
#include "fp8.h"
#include "parts.h"

#define VECTORS (16 / LANES)        /* of half a strip */
#define HALF (STEP / 2)
#define DEPTH (BLOCK / 32)          /* steps of a block */
#define FEW 3                       /* rows */
#define FAR 4096                    /* bytes between the weights that are read and those that are asked for */
#define CHUNK 144                   /* rows that are taken through a strip at once */

/* What FP8 numbers become as they are read: floats that are 2^8 times too small, or denormals. */
#define LOWER 256 /* what products are too small by */

#ifdef HAVE_FLOAT16
/* Codes in the high bytes of 16 bits. */
INLINE void from_high(__m256i x, floats *to) {
    __m256i bits = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xBF80));
#if LANES == 16
    to[0] = (floats)_mm512_cvtph_ps(bits);
#else
    to[0] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    to[1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#endif
}

/* 16 outs of two inputs -> those of the first, or of the second. */
INLINE void firsts(const uint8_t *p, floats *to) {
    from_high(_mm256_slli_epi16(_mm256_loadu_si256((const void *)p), 8), to);
}

INLINE void seconds(const uint8_t *p, floats *to) { from_high(_mm256_loadu_si256((const void *)p), to); }
#else
INLINE void firsts(const uint8_t *p, floats *to) {
    for (int o = 0; o < 16; o++) to[o / LANES][o % LANES] = small(p[2 * o]);
}

INLINE void seconds(const uint8_t *p, floats *to) { firsts(p + 1, to); }
#endif

INLINE void as_they_are(floats *v) { (void)v; }

/* c[m][0..32) = M rows, [inputs][M], times a block of a strip, whose numbers FIRSTS and SECONDS read. */
#define SCAN(M, NAME, FIRSTS, SECONDS, IN_ORDER)                                                                       \
    static void NAME##_##M(const float *a, const uint8_t *w, i64 steps, float *c) {                                    \
        floats acc[M][2][VECTORS], b[VECTORS];                                                                         \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int h = 0; h < 2; h++)                                                                                \
                for (int v = 0; v < VECTORS; v++) acc[m][h][v] = (floats){0};                                          \
        for (i64 k = 0; k < steps; k++, w += STEP)                                                                     \
            for (i64 p = 0; p < HALF; p += 32, a += 2 * M) {                                                           \
                __builtin_prefetch(w + 2 * p + FAR, 0, 3);                                                             \
                for (int h = 0; h < 2; h++) {                                                                          \
                    FIRSTS(w + h * HALF + p, b);                                                                       \
                    for (int m = 0; m < M; m++)                                                                        \
                        for (int v = 0; v < VECTORS; v++) acc[m][h][v] += a[m] * b[v];                                 \
                    SECONDS(w + h * HALF + p, b);                                                                      \
                    for (int m = 0; m < M; m++)                                                                        \
                        for (int v = 0; v < VECTORS; v++) acc[m][h][v] += a[M + m] * b[v];                             \
                }                                                                                                      \
            }                                                                                                          \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int h = 0; h < 2; h++) {                                                                              \
                IN_ORDER(acc[m][h]);                                                                                   \
                for (int v = 0; v < VECTORS; v++) store(c + STRIP * m + 16 * h + LANES * v, acc[m][h][v]);             \
            }                                                                                                          \
    }
SCAN(1, floats_scan, firsts, seconds, as_they_are)
SCAN(2, floats_scan, firsts, seconds, as_they_are)
SCAN(3, floats_scan, firsts, seconds, as_they_are)

/* `count` numbers, a multiple of 32, -> bf16. What lies FAR behind is asked for. */
static void floats_widen(const uint8_t *from, i64 count, bf16 *to) {
    for (i64 i = 0; i < count; i += 32) {
        __builtin_prefetch(from + i + FAR, 0, 3);
        floats first[VECTORS], second[VECTORS];
        firsts(from + i, first);
        seconds(from + i, second);
        for (int v = 0; v < VECTORS; v++) {
            words pairs = ((words)first[v] >> 16) | ((words)second[v] & 0xFFFF0000u);
            memcpy(to + i + 2 * LANES * v, &pairs, sizeof pairs);
        }
    }
}

INLINE bf16 float_of(uint8_t code) {
    union { float f; uint32_t u; } v = {small(code)};
    return v.u >> 16;
}

/* A way to read numbers. */
typedef struct {
    void (*scan[FEW + 1])(const float *, const uint8_t *, i64, float *);
    void (*widen)(const uint8_t *from, i64 count, bf16 *to);
    bf16 (*one)(uint8_t code); /* as `widen` */
    float lift;                /* what the other side is multiplied by before */
} Reading;

static const Reading as_floats = {{0, floats_scan_1, floats_scan_2, floats_scan_3}, floats_widen, float_of, 1.0f};

#ifdef HAVE_AVX2
/* A number in the place of a float's exponent and mantissa is 2^120 times too small, and a denormal below 2^-6. The other
 * side is lifted, so that products are normal. Outs are 0, 2, ... 14 and 1, 3, ... 15 until `in_order`. */
#define BYTE(x, at) (floats)_mm256_and_si256(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * (at)), 4), mask)

INLINE void first_bytes(const uint8_t *p, floats *to) {
    __m256i x = _mm256_loadu_si256((const void *)p), mask = _mm256_set1_epi32((int)0x87F00000);
    to[0] = BYTE(x, 0), to[1] = BYTE(x, 2);
}

INLINE void second_bytes(const uint8_t *p, floats *to) {
    __m256i x = _mm256_loadu_si256((const void *)p), mask = _mm256_set1_epi32((int)0x87F00000);
    to[0] = BYTE(x, 1), to[1] = BYTE(x, 3);
}

INLINE void in_order(floats *v) {
    __m256 low = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]), high = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
    v[0] = (floats)_mm256_permute2f128_ps(low, high, 0x20), v[1] = (floats)_mm256_permute2f128_ps(low, high, 0x31);
}

SCAN(1, denormals_scan, first_bytes, second_bytes, in_order)
SCAN(2, denormals_scan, first_bytes, second_bytes, in_order)
SCAN(3, denormals_scan, first_bytes, second_bytes, in_order)

static void denormals_widen(const uint8_t *from, i64 count, bf16 *to) {
    for (i64 i = 0; i < count; i += 32) {
        __builtin_prefetch(from + i + FAR, 0, 3);
        for (int u = 0; u < 32; u += 16) {
            __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(from + i + u))), 4);
            _mm256_storeu_si256((void *)(to + i + u), _mm256_and_si256(bits, _mm256_set1_epi16((short)0x87F0)));
        }
    }
}

INLINE bf16 denormal_of(uint8_t code) { return (bf16)((code & 0x80) << 8 | (code & 0x7f) << 4); }

static const Reading as_denormals = {
    {0, denormals_scan_1, denormals_scan_2, denormals_scan_3}, denormals_widen, denormal_of, 0x1p112f};

/* AMD's CPUs multiply denormals as fast as other numbers, and then one or two rows take a fifth less time so. On others a
 * denormal is an exception of a hundred cycles. No instruction set tells which. Tests say themselves. */
#ifndef FAST_DENORMALS
#define FAST_DENORMALS __builtin_cpu_is("amd")
#endif

INLINE const Reading *reading(void) { return FAST_DENORMALS ? &as_denormals : &as_floats; }
#else
INLINE const Reading *reading(void) { return &as_floats; }
#endif

static void widen(const uint8_t *from, i64 count, int with_nan, bf16 *to) {
    const Reading *by = reading();
    if (!with_nan) by->widen(from, count, to);
    else
        for (i64 i = 0; i < count; i++) to[i] = (from[i] & 0x7f) == 0x7f ? 0x7fc0 : by->one(from[i]);
}

/* Panels are floats, of a few rows each: [inputs][rows], of lifted numbers. Behind them are the scales, [rows][blocks];
 * bf16 values that have been put, [rows][inputs]; and numbers made of these. */
#define BYTES 8 /* of a value: 4, less than 1, 2 and 1 */

typedef struct {
    float *values, *scales;
    bf16 *put;
    uint8_t *numbers;
} Panels;

INLINE Panels panels_at(const void *at, i64 rows, i64 n) {
    i64 all = (rows + 15) / 16 * 16 * padded(n);
    char *bytes = (char *)at;
    return (Panels){(float *)bytes, (float *)(bytes + 4 * all), (bf16 *)(bytes + 5 * all), (uint8_t *)bytes + 7 * all};
}

/* `count` numbers -> their values, lifted. */
INLINE void lift(const uint8_t *from, i64 count, float *to) {
    float by = reading()->lift;
    i64 i = 0, lost = holds_nan(from, count);
    for (floats low, high; !lost && i + TWO <= count; i += TWO) {
        load_small(from + i, &low, &high);
        store(to + i, low * (256 * by));
        store(to + i + LANES, high * (256 * by));
    }
    for (; i < count; i++) to[i] = from_e4m3(from[i]) * by;
}

static void pack(const Input *x, i64 rows, i64 n, void *to) {
    Panels panels = panels_at(to, rows, n);
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        float *panel = panels.values + first * padded(n);
        for (i64 m = 0; m < count; m++)
            for (i64 b = 0; b < blocks_of(n); b++) {
                float block[BLOCK], *at = panel + b * BLOCK * count + m;
                i64 there = MIN(BLOCK, n - b * BLOCK);
                lift((const uint8_t *)x->values + (first + m) * x->ld + b * BLOCK, there, block);
                for (i64 i = 0; i < there; i++) at[i * count] = block[i];
                panels.scales[(first + m) * blocks_of(n) + b] = x->scales[(first + m) * x->lds + b * x->ldb];
            }
    }
}

static void put(const float *values, i64 ldv, i64 rows, i64 n, i64 at, void *to) {
    bf16 *put = panels_at(to, rows, n).put;
    for (i64 m = 0; m < rows; m++)
        for (int i = 0; i < 16; i += LANES) store_bf16(put + m * n + at + i, load(values + m * ldv + i));
}

INLINE void round_all(i64 rows, i64 n, int ue8m0, void *at) {
    Panels panels = panels_at(at, rows, n);
    i64 blocks = blocks_of(n);
    for (i64 m = 0; m < rows; m++) quantize_row(panels.put + m * n, n, ue8m0, panels.numbers + m * n, panels.scales + m * blocks);
    pack(&(Input){panels.numbers, n, panels.scales, blocks, 1}, rows, n, at);
}

static void finish(i64 rows, i64 n, void *panels) { round_all(rows, n, 0, panels); }
static void finish_ue8m0(i64 rows, i64 n, void *panels) { round_all(rows, n, 1, panels); }

/* c[rows][0..16) (+)= sums, row m times by[m]. */
INLINE void add_scaled(const float *sums, i64 rows, const float *by, int add, float *c) {
    for (i64 m = 0; m < rows; m++)
        for (int v = 0; v < 16; v += LANES) {
            floats y = load(sums + STRIP * m + v) * by[m];
            store(c + STRIP * m + v, add ? load(c + STRIP * m + v) + y : y);
        }
}

static void multiply_rows(const Panels *panels, i64 rows, const Matrix *w, i64 s, const uint8_t *strip, float *c) {
    _Alignas(64) bf16 wide[DEPTH * STEP];
    i64 blocks = blocks_of(w->n), each = w->outs / w->parts;
    Halves half = halves_of(w, s);
    const float *scales[2];
    for (int h = 0; h < 2; h++)
        scales[h] = w->scales + (half.first[h] / each * blocks_of(each) + half.first[h] % each / BLOCK) * blocks;
    for (i64 b = 0; b < blocks; b++, strip += DEPTH * STEP) {
        i64 steps = MIN(DEPTH, w->n / 32 - DEPTH * b);
        int lost = holds_nan(strip, steps * STEP), few = rows <= FEW && !lost;
        if (!few) widen(strip, steps * STEP, lost, wide);
        for (i64 first = 0, count; first < rows; first += count) {
            _Alignas(64) float sums[FEW * STRIP];
            count = panel_of(rows - first);
            const float *panel = panels->values + first * w->n + b * BLOCK * count;
            if (few) reading()->scan[count](panel, strip, steps, sums);
            for (int h = 0; h < 2; h++) {
                float by[MOST_OF_PANEL], *to = c + STRIP * first + 16 * h;
                for (i64 m = 0; m < count; m++) by[m] = LOWER * scales[h][b] * panels->scales[(first + m) * blocks + b];
                if (few) add_scaled(sums + 16 * h, count, by, b > 0, to);
                else times_panel(count, panel, wide + h * HALF, steps, by, b > 0, to);
            }
        }
    }
}

static void times(const void *at, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    Panels panels = panels_at(at, rows, w->n);
#ifdef HAVE_AVX2
    unsigned before = _mm_getcsr(), needed = before & ~0x8040u; /* torch.set_flush_denormal makes zeros of denormals */
    if (needed != before) _mm_setcsr(needed);
    multiply_rows(&panels, rows, w, s, (const uint8_t *)strip, c);
    if (needed != before) _mm_setcsr(before);
#else
    multiply_rows(&panels, rows, w, s, (const uint8_t *)strip, c);
#endif
}

/* FP8 numbers; activations that are put are rounded to FP8, with scales that are powers of two in the second. */
static const Way by_fp8 = {CHUNK, BYTES, pack, times, put, finish};
static const Way by_fp8_ue8m0 = {CHUNK, BYTES, pack, times, put, finish_ue8m0};

/* y[rows, outs] = x . w^T for rows of FP8 numbers, whose scales are `lds` and `ldb` apart, and weights in strips. The bytes
 * of memory that it could not have, or 0. */
EXPORT i64 linear_fp8_strips(const uint8_t *numbers, const float *scales, i64 lds, i64 ldb, i64 rows, const uint8_t *weights,
                             const float *weight_scales, i64 outs, i64 parts, i64 n, bf16 *y, int threads) {
    Matrix w = {(const bf16 *)weights, outs, n, (int)parts, 1, weight_scales};
    return by_strips(&by_fp8, (Input){numbers, n, scales, lds, ldb}, rows, &w, y, outs, threads);
}

/* Gated MLPs of rows sorted by expert, as `experts_strips`, with FP8 numbers in strips, their scales, and rows of FP8
 * numbers, whose scales are `lds` and `ldb` apart. */
EXPORT i64 experts_fp8_strips(const uint8_t *numbers, const float *scales, i64 lds, i64 ldb, const i64 *counts,
                              i64 num_experts, const uint8_t *gate_up, const float *gate_up_scales, const uint8_t *down,
                              const float *down_scales, i64 width, i64 inner, int ue8m0, bf16 *y, int threads) {
    return by_parts(ue8m0 ? &by_fp8_ue8m0 : &by_fp8, (Input){numbers, width, scales, lds, ldb}, counts, num_experts,
                    (Matrix){(const bf16 *)gate_up, 2 * inner, width, 2, 1, gate_up_scales},
                    (Matrix){(const bf16 *)down, width, inner, 1, 1, down_scales}, y, threads);
}

/* Whether FP8 weights should lie in strips here, where they are then multiplied about as fast as bf16 or faster. AVX-512
 * BF16 and AMX multiply bf16 faster than others make it of FP8. */
EXPORT int fp8_strips_are_served(void) {
#if defined(HAVE_FLOAT16) && !defined(HAVE_BF16)
    return !tiles_work();
#else
    return 0;
#endif
}
