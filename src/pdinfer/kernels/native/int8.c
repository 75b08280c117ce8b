/* Products of int8: weights as they are stored, with a scale per row, and activations that are rounded to int8 per row.
 * Sums are exact. Called through `ops.py`. */

#include "few_rows.h"
#include "thread_scratch.h"

#define MOST 4     /* rows of x that pass over a row of weights at once */
#define LINE 64    /* bytes of weights that are asked for at once */

/* A number is a rounded activation as the CPU multiplies it. VNNI multiplies bytes, the left ones without a sign: they
 * are OFFSET more than they stand for, and OFFSET times the sum of the weights comes off. Elsewhere both sides are
 * widened to 16 bits. */
#ifdef HAVE_VNNI
#define WIDTH 64 /* values that are multiplied at once */
#define PREFETCH_BYTES 2048 /* from the weights that are read to those that are asked for */
#define OFFSET 128
typedef uint8_t number;
typedef __m512i some_weights; /* WIDTH of them */

INLINE some_weights load_weights(const int8_t *p) { return _mm512_loadu_si512(p); }

INLINE ints add_products(ints sum, const number *x, some_weights w) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(x), w);
}

INLINE ints add_weights(ints sum, some_weights w) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi8(1), w);
}
#else
#define WIDTH (2 * LANES)
#define PREFETCH_BYTES 1024 /* 16 lines: a Zen 3 core waits for 24 at once, and twice as many made it a tenth slower */
#define OFFSET 0
typedef int16_t number;
typedef int16_t some_weights __attribute__((vector_size(2 * WIDTH)));

INLINE some_weights load_weights(const int8_t *p) {
#if LANES == 16
    return (some_weights)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
#elif defined(HAVE_AVX2)
    return (some_weights)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#else
    int8_t x __attribute__((vector_size(WIDTH)));
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, some_weights);
#endif
}

/* sum + a . b, of two neighbours in each lane. */
INLINE ints add_products(ints sum, const number *x, some_weights w) {
    some_weights a;
    memcpy(&a, x, sizeof a);
#if LANES == 16
    return sum + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#elif defined(HAVE_AVX2)
    return sum + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#else
    for (int i = 0; i < LANES; i++) sum[i] += a[2 * i] * w[2 * i] + a[2 * i + 1] * w[2 * i + 1];
    return sum;
#endif
}

INLINE ints add_weights(ints sum, some_weights w) { return (void)w, sum; }
#endif

typedef int32_t four __attribute__((vector_size(16)));
typedef number some_numbers __attribute__((vector_size(sizeof(number) * LANES)));

/* The sum of its quarters, or halves. */
INLINE four folded(ints x) {
    union { ints all; four parts[LANES / 4]; } v = {x};
    four sum = v.parts[0];
    for (int i = 1; i < LANES / 4; i++) sum += v.parts[i];
    return sum;
}

/* The sums over the lanes of four vectors, `apart` from each other. */
INLINE four totals_of(const ints *x, i64 apart) {
    four v[4], ab, cd;
    for (int i = 0; i < 4; i++) v[i] = folded(x[i * apart]);
    ab = MIX(four, v[0], v[1], 0, 4, 1, 5) + MIX(four, v[0], v[1], 2, 6, 3, 7);
    cd = MIX(four, v[2], v[3], 0, 4, 1, 5) + MIX(four, v[2], v[3], 2, 6, 3, 7);
    return MIX(four, ab, cd, 0, 1, 4, 5) + MIX(four, ab, cd, 2, 3, 6, 7);
}

/* A row of x -> numbers, padded up to `ldq`, and its scale max(amax, 1e-10) / 127. The scale of a row that is not finite
 * is not finite. */
static float quantize(const bf16 *x, i64 n, i64 ldq, number *to) {
    floats most = all_of(1e-10f), zeros = {0};
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) {
        floats v = load_bf16(x + i), size = choose(v < 0.0f, -v, v);
        most = choose(size > most, size, most);
        zeros += 0 * v;
    }
    float amax = largest_of(most), lost = sum_of(zeros);
    for (; i < n; i++) {
        float v = from_bf16(x[i]);
        amax = fmaxf(amax, fabsf(v));
        lost += 0 * v;
    }
    memset(to, 0, sizeof *to * ldq);
    if (lost != lost) return lost;
    float scale = amax / 127.0f;
    for (i = 0; i + LANES <= n; i += LANES) {
        /* 1.5 * 2^23 has no bits for fractions: adding it rounds to the nearest, ties to even, as torch.round does. */
        ints v = __builtin_convertvector((load_bf16(x + i) / scale + 12582912.0f) - 12582912.0f, ints);
        some_numbers q = __builtin_convertvector(v + OFFSET, some_numbers);
        memcpy(to + i, &q, sizeof q);
    }
    for (; i < n; i++) to[i] = (number)(OFFSET + (int)((from_bf16(x[i]) / scale + 12582912.0f) - 12582912.0f));
    return scale;
}

typedef struct {
    const number *numbers; /* [rows, ldq] */
    const float *scales;
    i64 ldq;
} Rows;

/* acc[m] += x[m] . w over WIDTH values, and *own += the sum of w. Weights may lie anywhere. */
INLINE void add_row(int rows, const number *x, i64 ldq, const int8_t *w, ints *acc, ints *own) {
    some_weights ws = load_weights(w);
    for (int m = 0; m < rows; m++) acc[m] = add_products(acc[m], x + m * ldq, ws);
    *own = add_weights(*own, ws);
}

/* The sum over the lanes of sums[m] = x[m] . w for `rows` rows of x. Rows of weights are read one by one, since memory
 * likes to be read in order. What lies `ahead` bytes behind is asked for; past the end of all weights that is harmless.
 * Sums may wrap: what is left when OFFSET has come off does not. */
INLINE void row_kernel_of(int rows, const number *x, i64 ldq, const int8_t *w, i64 n, i64 ahead, ints *sums) {
    ints acc[MOST], own = {0};
    for (int m = 0; m < rows; m++) acc[m] = (ints){0};
    i64 i = 0;
    while (i + LINE <= n) {
        __builtin_prefetch(w + i + ahead, 0, 3);
        for (int u = 0; u < LINE; u += WIDTH, i += WIDTH) add_row(rows, x + i, ldq, w + i, acc, &own);
    }
    for (; i < n; i += WIDTH) { /* a copy, as nothing behind the last row may be read */
        int8_t rest[WIDTH] = {0};
        memcpy(rest, w + i, MIN(WIDTH, n - i));
        add_row(rows, x + i, ldq, rest, acc, &own);
    }
    for (int m = 0; m < rows; m++) sums[m] = (ints)((words)acc[m] - OFFSET * (words)own);
}

NOINLINE void row_kernel(i64 rows, const number *x, i64 ldq, const int8_t *w, i64 n, i64 ahead, ints *sums) {
    WITH_CONSTANT(rows, MOST, row_kernel_of, x, ldq, w, n, ahead, sums)
}

/* y[m][o] = x[m] . w[o], times both scales, for o in [first, last). The lanes of LANES sums are added together: one by one
 * that took a fifth of the time. LANES rows of weights stay in the first-level cache while all of x passes over them. */
static void some_outs(Rows x, i64 rows, const int8_t *w, const float *scales, i64 n, i64 first, i64 last, bf16 *y,
                      i64 ldy) {
    for (i64 o = first, outs; o < last; o += outs) {
        outs = MIN(LANES, last - o);
        for (i64 m = 0, now; m < rows; m += now) {
            ints sums[LANES][MOST], c;
            i64 left = rows - m, passes = (left + MOST - 1) / MOST;
            now = left / passes;
            if (outs < LANES) memset(sums, 0, sizeof sums);
            for (i64 r = 0; r < outs; r++)
                row_kernel(now, x.numbers + m * x.ldq, x.ldq, w + (o + r) * n, n, m ? 0 : PREFETCH_BYTES, sums[r]);
            for (i64 k = 0; k < now; k++) {
                for (int r = 0; r < LANES; r += 4) {
                    four some = totals_of(&sums[r][k], MOST);
                    memcpy((int *)&c + r, &some, sizeof some);
                }
                floats of_x = __builtin_convertvector(c, floats) * x.scales[m + k];
                bf16 *to = y + (m + k) * ldy + o;
                if (outs == LANES) store_bf16(to, of_x * load(scales + o));
                else
                    for (i64 r = 0; r < outs; r++) to[r] = to_bf16(of_x[r] * scales[o + r]);
            }
        }
    }
}

/* Numbers of a row: whole vectors, and one more, so that rows do not lie a power of two apart and share cache lines. */
INLINE i64 padded_row(i64 n) { return (n + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH) + WIDTH; }

/* Whether a product of so many rows is one for these kernels. With VNNI torch's are good where rows are many. */
EXPORT int is_served_int8(i64 rows) {
#ifdef HAVE_VNNI
    return rows <= 16;
#else
    return (void)rows, 1;
#endif
}

/* y[rows, outs] = x[rows, n] . w[outs, n]^T with a scale per row of w. The bytes of memory that it could not have, or 0. */
EXPORT i64 linear_int8(const bf16 *x, i64 ldx, i64 rows, const int8_t *w, const float *scales, i64 outs, i64 n, bf16 *y,
                       int threads) {
    i64 ldq = padded_row(n), step = threads > 1 ? SHARE(outs, threads) : outs;
    i64 bytes = rows * (i64)(sizeof(number) * ldq + sizeof(float));
    number *numbers = thread_scratch(SCRATCH_NUMBERS, bytes);
    if (!numbers) return bytes;
    float *of_rows = (float *)(numbers + rows * ldq);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (i64 m = 0; m < rows; m++) of_rows[m] = quantize(x + m * ldx, n, ldq, numbers + m * ldq);
#pragma omp for schedule(static)
        for (i64 o = 0; o < outs; o += step)
            some_outs((Rows){numbers, of_rows, ldq}, rows, w, scales, n, o, MIN(o + step, outs), y, outs);
    }
    return 0;
}

/* Gated MLPs of rows sorted by expert, as `experts`, of int8 with scales gate_up_scales [experts, 2 * inner] and
 * down_scales [experts, width]. `hidden` has room for 3 * inner values per row. */
EXPORT i64 experts_int8(const bf16 *x, const i64 *counts, i64 num_experts, const int8_t *gate_up,
                        const float *gate_up_scales, const int8_t *down, const float *down_scales, i64 width, i64 inner,
                        bf16 *hidden, bf16 *y, int threads) {
    i64 rows = 0, starts[num_experts], active[num_experts], num_active = 0;
    for (i64 e = 0; e < num_experts; e++) {
        starts[e] = rows;
        rows += counts[e];
        if (counts[e]) active[num_active++] = e;
    }
    bf16 *wide = hidden, *narrow = hidden + rows * 2 * inner;
    i64 step = 128, ups = (2 * inner + step - 1) / step, downs = (width + step - 1) / step; /* as in experts.c */
    i64 ldq = padded_row(MAX(width, inner)), bytes = rows * (i64)(sizeof(number) * ldq + sizeof(float));
    number *numbers = thread_scratch(SCRATCH_NUMBERS, bytes);
    if (!numbers) return bytes;
    float *of_rows = (float *)(numbers + rows * ldq);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++) of_rows[r] = quantize(x + r * width, width, ldq, numbers + r * ldq);
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * ups; item++) {
            i64 e = active[item / ups], o = item % ups * step, first = starts[e];
            some_outs((Rows){numbers + first * ldq, of_rows + first, ldq}, counts[e], gate_up + e * 2 * inner * width,
                      gate_up_scales + e * 2 * inner, width, o, MIN(o + step, 2 * inner), wide + first * 2 * inner,
                      2 * inner);
        }
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++) {
            silu_times(wide + r * 2 * inner, wide + r * 2 * inner + inner, narrow + r * inner, inner);
            of_rows[r] = quantize(narrow + r * inner, inner, ldq, numbers + r * ldq);
        }
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * downs; item++) {
            i64 e = active[item / downs], o = item % downs * step, first = starts[e];
            some_outs((Rows){numbers + first * ldq, of_rows + first, ldq}, counts[e], down + e * width * inner,
                      down_scales + e * width, inner, o, MIN(o + step, width), y + first * width, width);
        }
    }
    return 0;
}
