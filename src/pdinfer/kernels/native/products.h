/* Products that the sources share. Each has one body for CPUs with AVX-512 BF16 (pairs.c) and one for all others
 * (floats.c); products of many rows (strips.c) are those of the others, since torch's are good where there is AVX-512
 * BF16. */

#pragma once

#include "vectors.h"

#ifdef __AVX512BF16__
#define FEW_ROWS INT64_MAX /* these are given no others */
#define LEAST_OUTS 64      /* of a product, per thread and turn */
#else
#define FEW_ROWS 8
#define LEAST_OUTS 256
#endif
#define WIDE 128 /* columns of `few_rows_in` */

/* y[m][o] = x[m] . w[o] for o in [first, last), a multiple of 8 apart. Weights come from memory once. */
void few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy);

/* y[m][0..WIDE) = sum over r of x[m][r] * w[r][0..WIDE); n is even, rows of w are `ldw` apart. The same of what lies
 * `next` values behind w may be asked for already. */
void few_rows_in(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy);

#define STRIP 32  /* outs of a strip of packed weights */
#define STEP 1024 /* values of a strip per 32 inputs */
#define CHUNK 48  /* rows that are taken through a strip at once */

/* Memory of this thread, kept from call to call; one of a few. What it held is lost when it grows. */
void *room(int which, i64 bytes);

/* The inputs of a strip or a panel: those there are, and 0 up to a multiple of 32. */
INLINE i64 padded(i64 n) { return (n + 31) / 32 * 32; }

/* Rows low[0..lows) and high[0..highs) of weights, `n` long and at most 16 of each -> a strip [n / 32][2][16 pairs][16
 * outs][2]: what is read side by side lies so. Outs and inputs that are not there are 0. */
void pack_strip(const bf16 *low, i64 lows, const bf16 *high, i64 highs, i64 n, bf16 *to);

/* At most CHUNK rows of x -> panels of floats: of a few rows each (`panel_of`), [inputs][rows]. */
void pack_panels(const bf16 *x, i64 ldx, i64 rows, i64 n, float *to);

/* Rows of the next panel when `left` are left of a chunk. */
i64 panel_of(i64 left);

/* c[rows][32] = at most CHUNK rows, in panels, times a strip. */
void times_strip(const float *panels, i64 rows, i64 n, const bf16 *strip, float *c);

/* c[rows][32] -> columns [0, outs) of y. */
void store_strip(const float *c, i64 rows, i64 outs, bf16 *y, i64 ldy);

/* y[rows, outs] = x[rows, n] . w[outs, n]^T, for any number of rows. */
void many_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 outs, i64 n, bf16 *y, i64 ldy, int threads);
