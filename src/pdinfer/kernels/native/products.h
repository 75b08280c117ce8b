/* Products that the sources share. Each has one body for CPUs with AVX-512 BF16 (pairs.c) and one for all others
 * (floats.c); products of many rows (strips.c) are those of the others, since torch's are good where there is AVX-512
 * BF16. */

#pragma once

#include "vectors.h"

#ifdef __AVX512BF16__
#define FEW_ROWS INT64_MAX /* these are given no others */
#define SHARE(outs, threads) 64 /* outs of a product, per thread and turn */
#else
#define FEW_ROWS 16
#define SHARE(outs, threads) MAX(64, ((outs) / (2 * (threads)) + 7) / 8 * 8) /* each turn makes floats of x */
#endif
#define WIDE 128 /* columns of `few_rows_in` */

/* Functions that need memory return the bytes of it that they could not have, else 0. What they were to write is then
 * undefined. */

/* y[m][o] = x[m] . w[o] for o in [first, last), a multiple of 8 apart. Weights come from memory once. */
i64 few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy);

/* y[m][0..WIDE) = sum over r of x[m][r] * w[r][0..WIDE); n is even, rows of w are `ldw` apart. The same of what lies
 * `next` values behind w may be asked for already. */
i64 few_rows_in(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy);

#define STRIP 32  /* outs of a strip of weights */
#define STEP 1024 /* values of a strip per 32 inputs */

/* Memory of this thread, kept from call to call; one of a few. What it held is lost when it grows. NULL when there is not
 * so much. */
void *room(int which, i64 bytes);

/* The inputs of a strip or a panel: those there are, and 0 up to a multiple of 32. */
INLINE i64 padded(i64 n) { return (n + 31) / 32 * 32; }

/* Two times at most 16 rows of weights, all `n` long. */
typedef struct {
    const bf16 *low, *high;
    i64 lows, highs, n;
} Strip;

/* Outs [o, o + 32) of w [outs, n]. */
INLINE Strip strip_of(const bf16 *w, i64 outs, i64 n, i64 o) {
    i64 there = MIN(STRIP, outs - o), highs = MAX(0, there - 16);
    return (Strip){w + o * n, w + (o + 16) * n, there - highs, highs, n};
}

/* `inputs` inputs of a strip from `first` -> [inputs / 32][2][16 pairs][16 outs][2]: what is multiplied side by side lies
 * so. Outs and inputs that are not there are 0. */
void pack_strip(const Strip *w, i64 first, i64 inputs, bf16 *to);

/* A way to multiply many rows by a strip. They are packed into panels first, of which only this way knows the form. */
typedef struct {
    i64 rows;     /* the most at once */
    i64 bytes;    /* of a value in a panel; rows take those of a multiple of 16 rows, inputs of a multiple of 32 */
    void (*pack)(const bf16 *x, i64 ldx, i64 rows, i64 n, void *panels);
    /* c[rows][32] = panels . strip; c has room for a multiple of 32 rows, `packed` for a strip. */
    void (*times)(const void *panels, i64 rows, i64 n, const Strip *w, bf16 *packed, float *c);
    /* Writes inputs [first, first + 16) of the panels: values[rows][16], rows `ldv` apart, of bf16 precision. */
    void (*put)(const float *values, i64 ldv, i64 rows, i64 n, i64 first, void *panels);
} Many;

#define MOST_AT_ONCE 256 /* rows, in any way */

extern const Many by_floats;

/* The way of AMX tiles, or NULL where there are none. */
const Many *by_tiles_or_null(void);

INLINE i64 panel_bytes(const Many *way, i64 rows, i64 n) { return way->bytes * ((rows + 15) / 16 * 16) * padded(n); }

/* c[rows][32] -> columns [0, outs) of y. */
void store_strip(const float *c, i64 rows, i64 outs, bf16 *y, i64 ldy);

/* y[rows, outs] = x[rows, n] . w[outs, n]^T, for any number of rows, by floats. */
i64 many_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 outs, i64 n, bf16 *y, i64 ldy, int threads);
