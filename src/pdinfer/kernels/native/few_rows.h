/* Products of few rows with weights as they are stored. There is one body for CPUs with AVX-512 BF16 (pairs.c) and one for
 * all others (floats.c). */

#pragma once

#include "vectors.h"

#ifdef HAVE_BF16
#define FEW_ROWS INT64_MAX /* torch's products are as fast from 17 rows on, and ops.py sends them there */
#define SHARE(outs, threads) 64 /* outs that a thread takes at a time: small, so that all end together */
#else
#define FEW_ROWS 16 /* with more rows the packing of strips.c pays */
#define SHARE(outs, threads) MAX(64, ((outs) / (2 * (threads)) + 7) / 8 * 8) /* large: each time x becomes floats */
#endif
#define WIDE 128 /* columns of `few_rows_transposed` */

/* Functions that need memory return the bytes of it that they could not have, else 0. What they were to write is then
 * undefined. */

/* y[m][o] = x[m] . w[o] for o in [first, last), a multiple of 8 apart. Weights come from memory once. */
i64 few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy);

/* The same with transposed weights: y[m][0..WIDE) = sum over r of x[m][r] * w[r][0..WIDE); n is even, rows of w are `ldw`
 * apart. The same of what lies `next` values behind w may be asked for already. */
i64 few_rows_transposed(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy);
