/* Products with FP8 weights that lie in strips, as bf16 weights do (strips.c). A block of a strip has 128 inputs, and
 * each of its halves one scale. Up to FEW rows multiply the numbers as they are read; for more a block becomes bf16 in
 * the first-level cache, and all panels pass over it there. Rows and weights stay whole numbers of their scales in either
 * case: both scales come to the sums of a block. */

#include "amx.h"
#include "fp8.h"
#include "parts.h"

#define HALF (STEP / 2)
#define DEPTH (BLOCK / 32) /* steps of a block */

/* Numbers are read as FLOATS that are 2^8 times too small, as fp8.h says, or as DENORMALS: in the place of a float's
 * exponent and mantissa a number is 2^120 times too small, and a denormal below 2^-6. The other side is then lifted, so
 * that products are normal. That needs no conversion, and one or two rows take a fifth less time, on AMD's CPUs alone:
 * they multiply denormals as fast as other numbers, on others one is an exception of a hundred cycles. No instruction set
 * tells which. Tests say themselves. */
enum { FLOATS, DENORMALS };

#ifndef HAVE_AVX2
#define READING FLOATS
#elif defined(FAST_DENORMALS)
#define READING (FAST_DENORMALS ? DENORMALS : FLOATS)
#else
#define READING (__builtin_cpu_is("amd") ? DENORMALS : FLOATS)
#endif

#define LIFT (READING == DENORMALS ? 0x1p112f : 1.0f) /* what the other side is multiplied by before */
#define LOWER 256                                     /* what products are then too small by */

/* 16 outs of two inputs, pair by pair -> those of input 0 or 1. DENORMALS are outs 0, 2, ... 14 and 1, 3, ... 15. */
INLINE void read_input(int reading, int input, const uint8_t *p, floats *to) {
    (void)reading;
#ifdef HAVE_FLOAT16
    __m256i x = _mm256_loadu_si256((const void *)p);
#ifdef HAVE_AVX2
    if (reading == DENORMALS) {
        const __m256i sign_and_size = _mm256_set1_epi32((int)0x87F00000);
        for (int v = 0; v < 2; v++) {
            __m256i high = _mm256_slli_epi32(x, 24 - 8 * (2 * v + input));
            to[v] = (floats)_mm256_and_si256(_mm256_srai_epi32(high, 4), sign_and_size);
        }
        return;
    }
#endif
    __m256i high = input ? x : _mm256_slli_epi16(x, 8);
    __m256i bits = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xBF80));
#if LANES == 16
    to[0] = (floats)_mm512_cvtph_ps(bits);
#else
    to[0] = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    to[1] = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#endif
#else
    for (int o = 0; o < 16; o++) to[o / LANES][o % LANES] = small(p[2 * o + input]);
#endif
}

/* Sums of outs as `read_input` leaves them -> in their order. */
INLINE void in_order(int reading, floats *v) {
    (void)reading, (void)v;
#ifdef HAVE_AVX2
    if (reading == DENORMALS) {
        __m256 low = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]), high = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
        v[0] = (floats)_mm256_permute2f128_ps(low, high, 0x20), v[1] = (floats)_mm256_permute2f128_ps(low, high, 0x31);
    }
#endif
}

/* c[m][0..32) = `rows` rows, [inputs][rows], times a block of a strip. Both halves of a strip side by side, so that each
 * value of x is read for 32 outs, and their 3 x 4 sums are 12 of 16 registers. */
INLINE void row_kernel_of(int rows, int reading, const float *a, const uint8_t *w, i64 steps, float *c) {
    floats acc[FEW][2][HALF_VECTORS], b[HALF_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int h = 0; h < 2; h++)
            for (int v = 0; v < HALF_VECTORS; v++) acc[m][h][v] = (floats){0};
    for (i64 k = 0; k < steps; k++, w += STEP)
        for (i64 p = 0; p < HALF; p += 32, a += 2 * rows) {
            __builtin_prefetch(w + 2 * p + PREFETCH_BYTES, 0, 3); /* one line for 2 x 32 bytes */
            for (int h = 0; h < 2; h++)
                for (int input = 0; input < 2; input++) {
                    read_input(reading, input, w + h * HALF + p, b);
                    for (int m = 0; m < rows; m++)
                        for (int v = 0; v < HALF_VECTORS; v++) acc[m][h][v] += a[input * rows + m] * b[v];
                }
        }
    for (int m = 0; m < rows; m++)
        for (int h = 0; h < 2; h++) {
            in_order(reading, acc[m][h]);
            for (int v = 0; v < HALF_VECTORS; v++) store(c + STRIP * m + 16 * h + LANES * v, acc[m][h][v]);
        }
}

NOINLINE void row_kernel(i64 rows, const float *panel, const uint8_t *strip, i64 steps, float *c) {
    if (READING == DENORMALS) WITH_CONSTANT(rows, FEW, row_kernel_of, DENORMALS, panel, strip, steps, c)
    else WITH_CONSTANT(rows, FEW, row_kernel_of, FLOATS, panel, strip, steps, c)
}

/* The bf16 that `widen` makes of a number. Its 4 bits of a mantissa are there as they are in either reading. */
INLINE bf16 widened(int reading, uint8_t code) {
    if (reading == DENORMALS) return (bf16)((code & 0x80) << 8 | (code & 0x7f) << 4);
    union { float f; uint32_t u; } v = {small(code)};
    return v.u >> 16;
}

/* `count` numbers, a multiple of 32, -> bf16, in the same order: pairs of inputs, as `micro_kernel` reads them. */
static void widen(const uint8_t *from, i64 count, int with_nan, bf16 *to) {
    const int reading = READING;
    if (with_nan) {
        for (i64 i = 0; i < count; i++) to[i] = (from[i] & 0x7f) == 0x7f ? 0x7fc0 : widened(reading, from[i]);
        return;
    }
    for (i64 i = 0; i < count; i += 32) {
        __builtin_prefetch(from + i + PREFETCH_BYTES, 0, 3);
#ifdef HAVE_AVX2
        if (reading == DENORMALS) {
            for (int u = 0; u < 32; u += 16) {
                __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(from + i + u))), 4);
                _mm256_storeu_si256((void *)(to + i + u), _mm256_and_si256(bits, _mm256_set1_epi16((short)0x87F0)));
            }
            continue;
        }
#endif
        floats first[HALF_VECTORS], second[HALF_VECTORS];
        read_input(FLOATS, 0, from + i, first);
        read_input(FLOATS, 1, from + i, second);
        for (int v = 0; v < HALF_VECTORS; v++) {
            words pairs = ((words)first[v] >> 16) | ((words)second[v] & 0xFFFF0000u);
            memcpy(to + i + 2 * LANES * v, &pairs, sizeof pairs);
        }
    }
}

/* Panels are floats, of a few rows each: [inputs][rows], of lifted numbers. Behind them are the scales, [rows][blocks];
 * bf16 values that have been stored, [rows][inputs]; and numbers made of these. */
#define BYTES 8 /* of a value: 4, less than 1, 2 and 1 */

typedef struct {
    float *values, *scales;
    bf16 *stored;
    uint8_t *numbers;
} Panels;

INLINE Panels panels_at(const void *at, i64 rows, i64 n) {
    i64 all = (rows + 15) / 16 * 16 * padded(n);
    char *bytes = (char *)at;
    return (Panels){(float *)bytes, (float *)(bytes + 4 * all), (bf16 *)(bytes + 5 * all), (uint8_t *)bytes + 7 * all};
}

/* `count` numbers -> their values, lifted. */
INLINE void lift(const uint8_t *from, i64 count, float *to) {
    float by = LIFT;
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

static void store_panel(const float *values, i64 ldv, i64 rows, i64 n, i64 at, void *to) {
    bf16 *stored = panels_at(to, rows, n).stored;
    for (i64 m = 0; m < rows; m++)
        for (int i = 0; i < 16; i += LANES) store_bf16(stored + m * n + at + i, load(values + m * ldv + i));
}

INLINE void round_all(i64 rows, i64 n, int ue8m0, void *at) {
    Panels panels = panels_at(at, rows, n);
    i64 blocks = blocks_of(n);
    for (i64 m = 0; m < rows; m++) quantize_row(panels.stored + m * n, n, ue8m0, panels.numbers + m * n, panels.scales + m * blocks);
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
        scales[h] = (const float *)w->scales + (half.first[h] / each * blocks_of(each) + half.first[h] % each / BLOCK) * blocks;
    for (i64 b = 0; b < blocks; b++, strip += DEPTH * STEP) {
        i64 steps = MIN(DEPTH, w->n / 32 - DEPTH * b);
        int lost = holds_nan(strip, steps * STEP), few = rows <= FEW && !lost;
        if (!few) widen(strip, steps * STEP, lost, wide);
        for (i64 first = 0, count; first < rows; first += count) {
            _Alignas(64) float sums[FEW * STRIP];
            count = panel_of(rows - first);
            const float *panel = panels->values + first * w->n + b * BLOCK * count;
            if (few) row_kernel(count, panel, strip, steps, sums);
            for (int h = 0; h < 2; h++) {
                float by[MOST_OF_PANEL], *to = c + STRIP * first + 16 * h;
                for (i64 m = 0; m < count; m++) by[m] = LOWER * scales[h][b] * panels->scales[(first + m) * blocks + b];
                if (few) add_scaled(sums + 16 * h, count, by, b > 0, to);
                else micro_kernel(count, panel, wide + h * HALF, steps, 0, by, b > 0, to);
            }
        }
    }
}

static void multiply(const void *at, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
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

/* Of weights [outs, n] of so many parts, which lie in strips. */
INLINE Matrix matrix_of(const uint8_t *strips, const float *scales, i64 outs, i64 n, int parts) {
    return (Matrix){(const bf16 *)strips, outs, n, parts, STEP, scales, sizeof(float) * parts * blocks_of(outs / parts) * blocks_of(n)};
}

/* FP8 numbers; activations that are stored are rounded to FP8, with scales that are powers of two in the second. */
static const Way by_fp8 = {CHUNK, BYTES, pack, multiply, store_panel, finish};
static const Way by_fp8_ue8m0 = {CHUNK, BYTES, pack, multiply, store_panel, finish_ue8m0};

/* y[rows, outs] = x . w^T for rows of FP8 numbers, whose scales are `lds` and `ldb` apart, and weights in strips. The bytes
 * of memory that it could not have, or 0. */
EXPORT i64 linear_fp8_strips(const uint8_t *numbers, const float *scales, i64 lds, i64 ldb, i64 rows, const uint8_t *weights,
                             const float *weight_scales, i64 outs, i64 parts, i64 n, bf16 *y, int threads) {
    Matrix w = matrix_of(weights, weight_scales, outs, n, (int)parts);
    return by_strips(&by_fp8, (Input){numbers, n, scales, lds, ldb}, rows, &w, y, outs, threads);
}

/* Gated MLPs of rows sorted by expert, as `experts_strips`, with FP8 numbers in strips, their scales, and rows of FP8
 * numbers, whose scales are `lds` and `ldb` apart. */
EXPORT i64 experts_fp8_strips(const uint8_t *numbers, const float *scales, i64 lds, i64 ldb, const i64 *counts,
                              i64 num_experts, const uint8_t *gate_up, const float *gate_up_scales, const uint8_t *down,
                              const float *down_scales, i64 width, i64 inner, int ue8m0, bf16 *y, int threads) {
    return by_parts(ue8m0 ? &by_fp8_ue8m0 : &by_fp8, (Input){numbers, width, scales, lds, ldb}, counts, num_experts,
                    matrix_of(gate_up, gate_up_scales, 2 * inner, width, 2), matrix_of(down, down_scales, width, inner, 1), y,
                    threads);
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
