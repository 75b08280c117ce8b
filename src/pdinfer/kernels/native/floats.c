/* Products of few rows on CPUs without AVX-512 BF16: weights become floats as they are read, which leaves enough time to
 * read them as fast as memory gives them. x becomes floats once, in the order in which weights do. */

#include "few_rows.h"
#include "thread_scratch.h"

#ifndef HAVE_BF16

#define PAIRS (2 * LANES)
#define OUTS 4 /* weight rows read side by side, so that what is read of x serves all of them */
#define MOST 3 /* rows of x that pass over a block of weights at once: 4 x 3 sums are 12 of 16 registers */

/* Rows of x as floats, `ldf` apart: of PAIRS values the even ones, then the odd ones; beyond n they are 0. A shift and a
 * mask make the same of weights, without a shuffle. */
static void to_floats(const bf16 *x, i64 ldx, i64 rows, i64 n, i64 ldf, float *to) {
    for (i64 m = 0; m < rows; m++) {
        float *row = to + m * ldf;
        i64 i = 0;
        for (; i + PAIRS <= n; i += PAIRS) {
            words pairs = load_pairs(x + m * ldx + i);
            store(row + i, even(pairs));
            store(row + i + LANES, odd(pairs));
        }
        if (i < n) {
            bf16 rest[PAIRS] = {0};
            memcpy(rest, x + m * ldx + i, sizeof(bf16) * (n - i));
            store(row + i, even(load_pairs(rest)));
            store(row + i + LANES, odd(load_pairs(rest)));
        }
    }
}

/* acc[r][m] += x[m] . w[r] over PAIRS values of OUTS rows of weights, `ldw` apart, which may lie anywhere. All even values
 * before all odd ones: there are too few registers for both halves of a row beside the sums. */
INLINE void add_products(int rows, const float *x, i64 ldf, const bf16 *w, i64 ldw, floats acc[OUTS][MOST]) {
    for (int r = 0; r < OUTS; r++) {
        words pairs = load_pairs(w + r * ldw);
        floats evens = even(pairs), odds = odd(pairs);
        for (int m = 0; m < rows; m++) acc[r][m] += load(x + m * ldf) * evens;
        for (int m = 0; m < rows; m++) acc[r][m] += load(x + m * ldf + LANES) * odds;
    }
}

/* y[m][0..OUTS) = x[m] . w[0..OUTS) for `rows` rows of x. What lies `ahead` values behind the weights is asked for, of
 * every `passes`-th row; past the end of all weights that is harmless. */
INLINE void row_kernel_of(int rows, const float *x, i64 ldf, const bf16 *w, i64 n, i64 ahead, i64 pass, i64 passes, bf16 *y,
                       i64 ldy) {
    floats acc[OUTS][MOST];
    const bf16 *next[OUTS];
    for (int r = 0; r < OUTS; r++) next[r] = w + r * n + (r % passes == pass ? ahead : 0);
    for (int r = 0; r < OUTS; r++)
        for (int m = 0; m < rows; m++) acc[r][m] = (floats){0};
    i64 i = 0;
    for (; i + PAIRS <= n; i += PAIRS) {
        for (int r = 0; r < OUTS; r++) __builtin_prefetch(next[r] + i, 0, 2);
        add_products(rows, x + i, ldf, w + i, n, acc);
    }
    if (i < n) { /* a copy, as nothing behind the last row may be read */
        bf16 rest[OUTS][PAIRS] = {{0}};
        for (int r = 0; r < OUTS; r++) memcpy(rest[r], w + r * n + i, sizeof(bf16) * (n - i));
        add_products(rows, x + i, ldf, rest[0], PAIRS, acc);
    }
    for (int m = 0; m < rows; m++)
        for (int r = 0; r < OUTS; r++) y[m * ldy + r] = to_bf16(sum_of(acc[r][m]));
}

NOINLINE void row_kernel(i64 rows, const float *x, i64 ldf, const bf16 *w, i64 n, i64 ahead, i64 pass, i64 passes, bf16 *y,
                        i64 ldy) {
    WITH_CONSTANT(rows, MOST, row_kernel_of, x, ldf, w, n, ahead, pass, passes, y, ldy)
}

i64 few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy) {
    i64 ldf = (n + PAIRS - 1) / PAIRS * PAIRS + LANES; /* rows that lie a power of two apart would share cache lines */
    i64 bytes = sizeof(float) * rows * ldf;
    float *floats_of = thread_scratch(SCRATCH_ROWS, bytes);
    if (!floats_of) return bytes;
    to_floats(x, ldx, rows, n, ldf, floats_of);
    i64 passes = (rows + MOST - 1) / MOST;
    /* Each pass asks for its share of the next block of weights, which is so far ahead that memory has the time of a whole
     * block to give it. */
    for (i64 o = first; o < last; o += OUTS)
        for (i64 pass = 0, m = 0; pass < passes; pass++) {
            i64 now = (rows - m) / (passes - pass);
            row_kernel(now, floats_of + m * ldf, ldf, w + o * n, n, OUTS * n, pass, passes, y + m * ldy + o, ldy);
            m += now;
        }
    return 0;
}

#define COLUMNS 2 /* vectors of pairs of columns side by side */
#define ROWS (LANES == 16 ? 3 : 2) /* of x: 3 x 2 x 2 sums of 32 registers, or 2 x 2 x 2 of 16 */

/* y[m][...] = sum over r of x[m][r] * w[r][...] for `rows` rows of x and COLUMNS * PAIRS columns. The columns
 * behind them are asked for, which come next; past the end of all weights that is harmless. */
INLINE void column_kernel_of(int rows, const float *x, i64 n, const bf16 *w, i64 ldw, bf16 *y, i64 ldy) {
    floats evens[ROWS][COLUMNS], odds[ROWS][COLUMNS];
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < COLUMNS; c++) evens[m][c] = odds[m][c] = (floats){0};
    for (i64 r = 0; r < n; r++, w += ldw) {
        for (int c = 0; c < COLUMNS * PAIRS; c += 32) __builtin_prefetch(w + COLUMNS * PAIRS + c, 0, 2);
        for (int c = 0; c < COLUMNS; c++) {
            words pairs = load_pairs(w + c * PAIRS);
            floats left = even(pairs), right = odd(pairs);
            for (int m = 0; m < rows; m++) {
                evens[m][c] += x[m * n + r] * left;
                odds[m][c] += x[m * n + r] * right;
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < COLUMNS; c++) { /* back to pairs of neighbours, by the shift and the mask that took them apart */
            words pairs = bf16_bits(evens[m][c]) | bf16_bits(odds[m][c]) << 16;
            memcpy(y + m * ldy + c * PAIRS, &pairs, sizeof pairs);
        }
}

NOINLINE void column_kernel(i64 rows, const float *x, i64 n, const bf16 *w, i64 ldw, bf16 *y, i64 ldy) {
    WITH_CONSTANT(rows, ROWS, column_kernel_of, x, n, w, ldw, y, ldy)
}

i64 few_rows_transposed(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy) {
    (void)next;
    i64 bytes = sizeof(float) * rows * n;
    float *to = thread_scratch(SCRATCH_ROWS, bytes);
    if (!to) return bytes;
    for (i64 m = 0; m < rows; m++)
        for (i64 r = 0; r < n; r++) to[m * n + r] = from_bf16(x[m * ldx + r]);
    for (i64 c = 0; c < WIDE; c += COLUMNS * PAIRS)
        for (i64 m = 0, now; m < rows; m += now) {
            now = rows - m == ROWS + 1 ? 2 : MIN(rows - m, ROWS); /* two and two rather than three and one */
            column_kernel(now, to + m * n, n, w + c, ldw, y + m * ldy + c, ldy);
        }
    return 0;
}

#endif
