/* Products of few rows with FP8: e4m3 weights as they are stored, with a scale per block of 128 x 128, and activations with
 * a scale per row and 128 channels. Called through `ops.py`. */

#include "few_rows.h"
#include "fp8.h"
#include "thread_scratch.h"

typedef uint8_t some_codes __attribute__((vector_size(LANES)));

#define OUTS 4 /* weight rows read side by side, so that what is read of x serves all of them */
#define MOST 3 /* rows of x that pass over a block of weights at once */

typedef struct {
    const uint8_t *numbers; /* [outs, n] */
    const float *scales;    /* [parts * ceil(outs / parts / BLOCK), ceil(n / BLOCK)] */
    i64 outs, parts, n;
} Weight;

/* The scales of row o. */
INLINE const float *scales_of(const Weight *w, i64 o) {
    i64 rows = w->outs / w->parts;
    return w->scales + (o / rows * blocks_of(rows) + o % rows / BLOCK) * blocks_of(w->n);
}

/* y[m][r] = x[m] . w[first + r] for `rows` rows of x, `ldf` apart and 0 beyond n, and `outs` rows of weights. The sums of a
 * block are whole numbers of its scale, which is multiplied once per block. */
INLINE void row_kernel_of(int rows, int outs, const float *x, i64 ldf, const Weight *w, i64 first, i64 ahead, bf16 *y,
                          i64 ldy) {
    const float *scales[OUTS];
    const uint8_t *numbers[OUTS];
    uint8_t rest[OUTS][BLOCK] = {{0}};
    floats sums[OUTS][MOST];
    for (int r = 0; r < outs; r++) {
        numbers[r] = w->numbers + (first + r) * w->n;
        scales[r] = scales_of(w, first + r);
        for (int m = 0; m < rows; m++) sums[r][m] = (floats){0};
    }
    for (i64 b = 0; b * BLOCK < w->n; b++) {
        floats acc[OUTS][MOST];
        const uint8_t *at[OUTS];
        for (int r = 0; r < outs; r++) {
            at[r] = numbers[r] + b * BLOCK;
            __builtin_prefetch(at[r] + ahead, 0, 2); /* a block is two lines */
            __builtin_prefetch(at[r] + ahead + 64, 0, 2);
            if ((b + 1) * BLOCK > w->n) at[r] = memcpy(rest[r], at[r], w->n - b * BLOCK);
            for (int m = 0; m < rows; m++) acc[r][m] = (floats){0};
        }
        for (i64 i = 0; i < BLOCK; i += TWO)
            for (int r = 0; r < outs; r++) {
                floats low, high;
                load_small(at[r] + i, &low, &high);
                for (int m = 0; m < rows; m++) {
                    acc[r][m] += load(x + m * ldf + b * BLOCK + i) * low;
                    acc[r][m] += load(x + m * ldf + b * BLOCK + i + LANES) * high;
                }
            }
        for (int r = 0; r < outs; r++)
            for (int m = 0; m < rows; m++) sums[r][m] += acc[r][m] * (256 * scales[r][b]);
    }
    for (int r = 0; r < outs; r++) {
        /* Numbers are read without a look at NaN, which becomes a number: here, with the row in the cache, it costs
         * least. */
        float lost = holds_nan(numbers[r], w->n) ? NAN : 0;
        for (int m = 0; m < rows; m++) y[m * ldy + first + r] = to_bf16(sum_of(sums[r][m]) + lost);
    }
}

NOINLINE void row_kernel(i64 rows, int whole, const float *x, i64 ldf, const Weight *w, i64 first, i64 ahead, bf16 *y,
                         i64 ldy) {
    if (whole) WITH_CONSTANT(rows, MOST, row_kernel_of, OUTS, x, ldf, w, first, ahead, y, ldy)
    else WITH_CONSTANT(rows, MOST, row_kernel_of, 1, x, ldf, w, first, ahead, y, ldy)
}

/* y[rows, outs] = x . w^T for x = numbers[rows, n] * scales[rows, ceil(n / BLOCK)], whose rows are `lds` apart and columns
 * `ldb`. The bytes of memory that it could not have, or 0. */
EXPORT i64 linear_fp8(const uint8_t *numbers, const float *scales, i64 lds, i64 ldb, i64 rows, const uint8_t *weights,
                      const float *weight_scales, i64 outs, i64 parts, i64 n, bf16 *y, int threads) {
    Weight w = {weights, weight_scales, outs, parts, n};
    i64 ldf = blocks_of(n) * BLOCK + LANES, step = threads > 1 ? SHARE(outs, threads) : outs;
    i64 bytes = sizeof(float) * rows * ldf; /* x becomes floats once, not once per row of weights */
    float *x = thread_scratch(SCRATCH_NUMBERS, bytes);
    if (!x) return bytes;
    for (i64 m = 0; m < rows; m++) {
        for (i64 i = 0; i < n; i++) x[m * ldf + i] = from_e4m3(numbers[m * n + i]) * scales[m * lds + i / BLOCK * ldb];
        memset(x + m * ldf + n, 0, sizeof(float) * (ldf - n));
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 first = 0; first < outs; first += step)
        for (i64 o = first, last = MIN(first + step, outs), some; o < last; o += some) {
            some = last - o >= OUTS ? OUTS : 1;
            for (i64 m = 0, now; m < rows; m += now) {
                now = rows - m == 4 ? 2 : MIN(MOST, rows - m);
                row_kernel(now, some > 1, x + m * ldf, ldf, &w, o, m ? 0 : OUTS * n, y + m * outs, outs);
            }
        }
    return 0;
}

/* Rows [first, first + count) of weights -> bf16 [count, n]: their values, rounded once. */
EXPORT void dequantize_fp8(const uint8_t *weights, const float *weight_scales, i64 outs, i64 parts, i64 n, i64 first,
                           i64 count, bf16 *to, int threads) {
    Weight w = {weights, weight_scales, outs, parts, n};
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 o = 0; o < count; o++) {
        const float *scales = scales_of(&w, first + o);
        const uint8_t *row = weights + (first + o) * n;
        for (i64 b = 0; b * BLOCK < n; b++) {
            i64 i = b * BLOCK, end = MIN(n, i + BLOCK);
            floats scale = all_of(256 * scales[b]), low, high;
            int lost = holds_nan(row + i, end - i); /* a block with NaN goes number by number, which knows of it */
            for (; !lost && i + TWO <= end; i += TWO) {
                load_small(row + i, &low, &high);
                store_bf16(to + o * n + i, low * scale);
                store_bf16(to + o * n + i + LANES, high * scale);
            }
            for (; i < end; i++) to[o * n + i] = to_bf16(from_e4m3(row[i]) * scales[b]);
        }
    }
}

/* To the nearest e4m3 numbers, ties to even; at most 448. */
INLINE words to_e4m3(floats x) {
    words sign = ((words)x >> 24) & 0x80, nan = (words)(x != x);
    floats size = (floats)((words)x & 0x7fffffff);
    size = choose(size > 448.0f, all_of(448.0f), size);
    words bits = (words)size, tiny = (words)(size * 512 + 12582912.0f) & 0xff; /* below 2^-6 a step is 2^-9 */
    words code = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    words below = (words)(size < 0x1p-6f);
    code = (tiny & below) | (code & ~below) | sign;
    return (code & ~nan) | (nan & 0x7f);
}

/* x[i..end) -> their largest absolute value, and NaN where one is NaN, else 0. */
INLINE float amax_of(const bf16 *x, i64 n, float *lost) {
    floats most = {0}, nans = {0};
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats v = load_bf16(x + i), size = (floats)((words)v & 0x7fffffff);
        most = choose(size > most, size, most);
        nans = choose(v != v, v, nans);
    }
    float amax = largest_of(most);
    *lost = sum_of(nans);
    for (; i < n; i++) {
        float v = from_bf16(x[i]);
        amax = fmaxf(amax, fabsf(v));
        if (v != v) *lost = NAN;
    }
    return amax;
}

void quantize_row(const bf16 *x, i64 n, int ue8m0, uint8_t *numbers, float *scales) {
    for (i64 b = 0; b * BLOCK < n; b++) {
        i64 count = MIN(BLOCK, n - b * BLOCK), i = 0;
        const bf16 *from = x + b * BLOCK;
        uint8_t *to = numbers + b * BLOCK;
        float lost, scale = fmaxf(1e-4f, amax_of(from, count, &lost)) / 448 + lost;
        if (ue8m0 && scale < INFINITY) { /* the next power of two, which frexp gives unless the scale is one already */
            int exponent;
            float fraction = frexpf(scale, &exponent);
            scale = ldexpf(1, exponent - (fraction == 0.5f));
        }
        scales[b] = scale;
        for (; i + LANES <= count; i += LANES) {
            words code = to_e4m3(load_bf16(from + i) / scale);
            some_codes narrow = __builtin_convertvector(code, some_codes);
            memcpy(to + i, &narrow, sizeof narrow);
        }
        for (; i < count; i++) to[i] = (uint8_t)to_e4m3(all_of(from_bf16(from[i]) / scale))[0];
    }
}

/* x[rows, n] -> numbers [rows, n] and scales [rows, ceil(n / BLOCK)]: max(amax, 1e-4) / 448 of each block, or the next
 * power of two. */
EXPORT void quantize_fp8(const bf16 *x, i64 ldx, i64 rows, i64 n, int ue8m0, uint8_t *numbers, float *scales, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 16)
    for (i64 m = 0; m < rows; m++) quantize_row(x + m * ldx, n, ue8m0, numbers + m * n, scales + m * blocks_of(n));
}
