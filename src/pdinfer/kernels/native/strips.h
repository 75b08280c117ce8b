/* Matrices in strips, and products of any number of rows with them.
 *
 * Where torch's products of bf16 are slow, those of many rows, and all products with weights that lie in strips from the
 * beginning, go this way: rows are packed into panels, weights into strips (or lie so), and a way to multiply (by_floats
 * here, by tiles in tiles.c, of FP8 numbers in fp8_strips.c) passes the panels over one strip after the other. Panels and
 * strips are laid out in the order in which they are multiplied, so that memory is read in order, and each strip once. */

#pragma once

#include "thread_scratch.h"
#include "vectors.h"

#define STRIP 32  /* outs of a strip of weights */
#define STEP 1024 /* values of a strip per 32 inputs */
#define STEP_BYTES (STEP * (i64)sizeof(bf16))
#define DEEP 8    /* steps of a strip that all rows pass over before the next: 16 KiB stay in the first-level cache */

#define HALF_VECTORS (16 / LANES) /* vectors of half a strip */
#define FEW 3      /* rows that pass over both halves of a strip at once: 3 x 4 sums are 12 of 16 registers */
#define CHUNK 144  /* rows of floats that pass over a strip before the next rows: 12 panels of 12, or 24 of 6 */
#define PREFETCH_BYTES 4096 /* from the weights that few rows read to those that are asked for: 64 cache lines */

/* The inputs of a strip or a panel: those there are, and 0 up to a multiple of 32. */
INLINE i64 padded(i64 n) { return (n + 31) / 32 * 32; }

/* A matrix [outs, n], or two of half as many outs, one below the other. A strip of it is 32 outs: of two matrices 16 of
 * each. What is multiplied side by side lies so: [n / 32][2][16 pairs][16 outs][2]. With `step_bytes` the weights lie in
 * such strips, of so many bytes per 32 inputs, and outs and n are multiples of 32; else they are packed as they are
 * needed, and outs and inputs that are not there are 0. With `scales` the weights are FP8 numbers or four bits each. */
typedef struct {
    const bf16 *weights;
    i64 outs, n;
    int parts;
    i64 step_bytes;
    const void *scales;
    i64 scale_bytes; /* of all scales */
} Matrix;

/* Where the two halves of a strip lie in their matrix: the first of up to 16 outs, and how many are there. */
typedef struct {
    i64 first[2], there[2];
} Halves;

Halves halves_of(const Matrix *w, i64 s);

/* Rows of bf16 values, `ld` apart, or with `scales` of FP8 numbers, whose scales per row are `lds` apart and those per 128
 * inputs `ldb`. */
typedef struct {
    const void *values;
    i64 ld;
    const float *scales;
    i64 lds, ldb;
} Input;

/* The same from row `first` on. */
INLINE Input from_row(Input x, i64 first) {
    i64 size = x.scales ? 1 : sizeof(bf16);
    return (Input){(const char *)x.values + size * x.ld * first, x.ld, x.scales ? x.scales + x.lds * first : NULL, x.lds,
                  x.ldb};
}

INLINE i64 num_strips(const Matrix *w) {
    return w->parts == 1 ? (w->outs + STRIP - 1) / STRIP : (w->outs / 2 + 15) / 16;
}

/* The bytes of memory that `strip_of` needs. */
INLINE i64 packed_bytes(const Matrix *w) { return w->step_bytes ? 0 : sizeof(bf16) * STRIP * padded(w->n); }

/* Strip s, there or at `packed`. */
const bf16 *strip_of(const Matrix *w, i64 s, bf16 *packed);

/* Values c[rows][32] of strip s -> their columns of y. */
void store_strip(const Matrix *w, i64 s, const float *c, i64 rows, bf16 *y, i64 ldy);

/* A way to multiply rows by a strip. They are packed into panels first, of which only this way knows the form. */
typedef struct {
    i64 rows;  /* the most at once */
    i64 bytes; /* of a value in a panel; rows take those of a multiple of 16 rows, inputs of a multiple of 32 */
    void (*pack)(const Input *x, i64 rows, i64 n, void *panels);
    /* c[rows][32] = panels . strip s of w; c has room for a multiple of 32 rows. What lies behind the strip may be asked
     * for. */
    void (*multiply)(const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c);
    /* Writes inputs [first, first + 16) of the panels: values[rows][16], rows `ldv` apart, of bf16 precision. */
    void (*store_panel)(const float *values, i64 ldv, i64 rows, i64 n, i64 first, void *panels);
    /* What is left to do when all inputs have been stored, or NULL. */
    void (*finish)(i64 rows, i64 n, void *panels);
} Way;

#define MOST_AT_ONCE 256 /* rows, in any way */

extern const Way by_floats;

/* The rows of the next panel of floats when `left` are left of a chunk. */
i64 panel_of(i64 left);

#define MOST_OF_PANEL (LANES == 16 ? 12 : 6) /* 6 x 2 sums are 12 of 16 registers, 12 are of 32 */

/* c[rows][0..16) (+)= a panel of floats, [inputs][rows], times half a strip of `steps` times 32 inputs, and row m times
 * by[m] if there is `by`. What lies `ahead` values behind the weights is asked for. */
void micro_kernel(i64 rows, const float *panel, const bf16 *half, i64 steps, i64 ahead, const float *by, int add, float *c);

INLINE i64 panel_bytes(const Way *way, i64 rows, i64 n) { return way->bytes * ((rows + 15) / 16 * 16) * padded(n); }

/* y[rows, outs] = x[rows, n] . w[outs, n]^T, for any number of rows. */
i64 by_strips(const Way *way, Input x, i64 rows, const Matrix *w, bf16 *y, i64 ldy, int threads);
