/* Products with strips of weights, and the way of floats, for CPUs without AVX-512 BF16, where torch's products of bf16 are
 * an order slower than those of floats. Rows of x become panels of floats, which pass over a few steps of a strip at a
 * time, so that these come from memory once and stay in the first-level cache. */

#include "strips.h"

#define PANELS 512 /* rows whose panels are there together: weights that have to be packed are packed once for so many */

typedef uint32_t eight __attribute__((vector_size(32)));

/* As few panels as there can be, and those as equal as they can be: a panel of a row or two waits for its own sums. */
i64 panel_of(i64 left) {
    i64 panels = (left + MOST_OF_PANEL - 1) / MOST_OF_PANEL;
    return left / panels;
}

/* Transposes 8 x 8 words: rows `from`, which are `ld` bf16 values apart, become columns of `to`, 16 words apart. A word
 * is a pair of inputs, which stays together. Exchanging neighbours, then pairs, then fours takes 24 shuffles for 64
 * words. */
INLINE void transpose(const bf16 *from, i64 ld, bf16 *to) {
    eight r[8], s[8];
    for (int i = 0; i < 8; i++) memcpy(r + i, from + i * ld, 32);
    for (int i = 0; i < 8; i += 2) {
        s[i] = MIX(eight, r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = MIX(eight, r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = MIX(eight, s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[i + 2 * j + 1] = MIX(eight, s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = MIX(eight, r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        s[i + 4] = MIX(eight, r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) memcpy(to + 32 * i, s + i, 32);
}

/* 32 inputs of at most 16 outs, `n` apart: one tile of a strip. */
INLINE void pack_tile(const bf16 *from, i64 outs, i64 inputs, i64 n, bf16 *to) {
    if (outs == 16 && inputs >= 32) {
        /* 16 rows are too many for the prefetchers of CPUs; 8 lines of a row are the time that memory takes. */
        for (int o = 0; o < 16; o++) __builtin_prefetch((const char *)(from + o * n) + 512, 0, 2);
        for (int half = 0; half < 2; half++)
            for (int pairs = 0; pairs < 2; pairs++)
                transpose(from + 8 * half * n + 16 * pairs, n, to + 256 * pairs + 16 * half);
        return;
    }
    memset(to, 0, sizeof(bf16) * STEP / 2);
    for (i64 o = 0; o < outs; o++)
        for (i64 i = 0; i < MIN(32, inputs); i++) to[i / 2 * 32 + 2 * o + i % 2] = from[o * n + i];
}

Halves halves_of(const Matrix *w, i64 s) {
    i64 each = w->outs / w->parts, at = (w->parts == 1 ? STRIP : 16) * s, next = w->parts == 1 ? at + 16 : each + at;
    return (Halves){{at, next}, {MAX(0, MIN(16, each - at)), MAX(0, MIN(16, w->outs - next))}};
}

static void pack_strip(const Matrix *w, i64 s, bf16 *to) {
    Halves half = halves_of(w, s);
    for (i64 k = 0; k < w->n; k += 32)
        for (int h = 0; h < 2; h++, to += STEP / 2)
            pack_tile(w->weights + half.first[h] * w->n + k, half.there[h], w->n - k, w->n, to);
}

const bf16 *strip_of(const Matrix *w, i64 s, bf16 *packed) {
    if (w->step_bytes) return (const bf16 *)((const uint8_t *)w->weights + s * (w->n / 32) * w->step_bytes);
    pack_strip(w, s, packed);
    return packed;
}

/* Panels are floats, of a few rows each: [inputs][rows], so that the micro-kernel reads the values that one weight is
 * multiplied with side by side. */
static void pack(const Input *x, i64 rows, i64 n, void *to) {
    const bf16 *values = x->values;
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        float *panel = (float *)to + first * padded(n);
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < n; i++) panel[i * count + m] = from_bf16(values[(first + m) * x->ld + i]);
        memset(panel + n * count, 0, sizeof(float) * (padded(n) - n) * count);
    }
}

static void store_panel(const float *values, i64 ldv, i64 rows, i64 n, i64 at, void *to) {
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        float *panel = (float *)to + first * padded(n) + at * count;
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < 16; i++) panel[i * count + m] = values[(first + m) * ldv + i];
    }
}

/* As `micro_kernel`. A weight is loaded once for all rows, and each value of x is broadcast to the lanes, which are outs:
 * no sum has to be added up over lanes. The sums stay in registers from the first step to the last. */
INLINE void micro_kernel_of(int rows, const float *a, const bf16 *w, i64 steps, i64 ahead, const float *by, int add,
                            float *c) {
    floats acc[MOST_OF_PANEL][HALF_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < HALF_VECTORS; v++)
            acc[m][v] = add && !by ? load(c + STRIP * m + LANES * v) : (floats){0};
    for (i64 k = 0; k < steps; k++, w += STEP, a += 32 * rows)
        for (i64 p = 0; p < 16; p++) {
            floats b[HALF_VECTORS];
            __builtin_prefetch(w + 32 * p + ahead, 0, 2);
            /* First the even inputs of a pair, then the odd ones, in the registers of the former. */
            for (int v = 0; v < HALF_VECTORS; v++) b[v] = even(load_pairs(w + 32 * p + 2 * LANES * v));
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < HALF_VECTORS; v++) acc[m][v] += a[2 * p * rows + m] * b[v];
            for (int v = 0; v < HALF_VECTORS; v++) b[v] = odd(load_pairs(w + 32 * p + 2 * LANES * v));
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < HALF_VECTORS; v++) acc[m][v] += a[(2 * p + 1) * rows + m] * b[v];
        }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < HALF_VECTORS; v++) {
            float *to = c + STRIP * m + LANES * v;
            store(to, !by ? acc[m][v] : add ? load(to) + acc[m][v] * by[m] : acc[m][v] * by[m]);
        }
}

__attribute__((noinline)) void micro_kernel(i64 rows, const float *panel, const bf16 *half, i64 steps, i64 ahead,
                                            const float *by, int add, float *c) {
    WITH_CONSTANT(rows, MOST_OF_PANEL, micro_kernel_of, panel, half, steps, ahead, by, add, c)
}

/* c[m][0..32) = a panel of up to FEW rows times a whole strip. Few rows wait for memory, which gives most when it is read
 * in order: both halves of a step are read one behind the other, as they lie, and each has sums of its own. */
INLINE void row_kernel_of(int rows, const float *a, const bf16 *w, i64 steps, float *c) {
    floats acc[2][FEW][HALF_VECTORS];
    for (int h = 0; h < 2; h++)
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < HALF_VECTORS; v++) acc[h][m][v] = (floats){0};
    for (i64 k = 0; k < steps; k++, a += 32 * rows)
        for (int h = 0; h < 2; h++, w += STEP / 2)
            for (i64 p = 0; p < 16; p++) {
                __builtin_prefetch((const char *)(w + 32 * p) + PREFETCH_BYTES, 0, 2);
                for (int v = 0; v < HALF_VECTORS; v++) {
                    words pairs = load_pairs(w + 32 * p + 2 * LANES * v);
                    floats evens = even(pairs), odds = odd(pairs);
                    for (int m = 0; m < rows; m++) acc[h][m][v] += a[2 * p * rows + m] * evens;
                    for (int m = 0; m < rows; m++) acc[h][m][v] += a[(2 * p + 1) * rows + m] * odds;
                }
            }
    for (int h = 0; h < 2; h++)
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < HALF_VECTORS; v++) store(c + STRIP * m + 16 * h + LANES * v, acc[h][m][v]);
}

NOINLINE void row_kernel(i64 rows, const float *panel, const bf16 *strip, i64 steps, float *c) {
    WITH_CONSTANT(rows, FEW, row_kernel_of, panel, strip, steps, c)
}

static void multiply(const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    (void)s;
    i64 n = w->n, steps = padded(n) / 32;
    if (rows <= FEW) {
        row_kernel(rows, panels, strip, steps, c);
        return;
    }
    /* All panels pass over a few steps before the next, so that these stay in the first-level cache. The fewer rows, the
     * fewer steps: while there is little to compute memory is waited for, and is to be read in order. */
    i64 deep = rows < MOST_OF_PANEL ? 1 : rows < 16 ? 2 : DEEP;
    for (i64 k = 0; k < steps; k += deep)
        for (i64 first = 0, count; first < rows; first += count) {
            count = panel_of(rows - first);
            const float *panel = (const float *)panels + first * padded(n) + 32 * k * count;
            /* The first panel reads these steps from memory, and asks for the next. */
            for (int half = 0; half < 2; half++)
                micro_kernel(count, panel, strip + k * STEP + half * STEP / 2, MIN(deep, steps - k), first ? 0 : deep * STEP,
                             NULL, k > 0, c + STRIP * first + 16 * half);
        }
}

const Way by_floats = {CHUNK, sizeof(float), pack, multiply, store_panel, NULL};

void store_strip(const Matrix *w, i64 s, const float *c, i64 rows, bf16 *y, i64 ldy) {
    Halves half = halves_of(w, s);
    for (int h = 0; h < 2; h++)
        for (i64 m = 0; m < rows; m++) {
            const float *from = c + STRIP * m + 16 * h;
            bf16 *to = y + m * ldy + half.first[h];
            if (half.there[h] == 16)
                for (int i = 0; i < 16; i += LANES) store_bf16(to + i, load(from + i));
            else
                for (i64 i = 0; i < half.there[h]; i++) to[i] = to_bf16(from[i]);
        }
}

i64 by_strips(const Way *way, Input x, i64 rows, const Matrix *w, bf16 *y, i64 ldy, int threads) {
    i64 all = panel_bytes(way, MIN(rows, PANELS), w->n), each = packed_bytes(w), strips = num_strips(w), lacking = 0;
    /* Strips that a thread takes at a time: neighbours where they come from memory as they are, as that is read in order;
     * where they are packed first, that is the longer work, and one at a time lets all threads end together. */
    i64 share = w->step_bytes ? MAX(1, strips / (4 * threads)) : 1;
    char *panels = thread_scratch(SCRATCH_ROWS, all);
    if (!panels) return all;
    for (i64 r = 0; r < rows; r += PANELS, x = from_row(x, PANELS), y += PANELS * ldy) {
        i64 now = MIN(rows - r, PANELS);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(max : lacking)
        {
            bf16 *packed = each ? thread_scratch(SCRATCH_STRIP, each) : NULL;
            if (each && !packed) lacking = each;
            _Alignas(64) float c[MOST_AT_ONCE * STRIP]; /* sums of one strip, which stay in the cache until they are rounded */
#pragma omp for schedule(static)
            for (i64 m = 0; m < now; m += way->rows) {
                Input some = from_row(x, m);
                way->pack(&some, MIN(way->rows, now - m), w->n, panels + panel_bytes(way, m, w->n));
            }
#pragma omp for schedule(dynamic, share)
            for (i64 s = 0; s < strips; s++) {
                if (each && !packed) continue;
                const bf16 *strip = strip_of(w, s, packed);
                for (i64 m = 0; m < now; m += way->rows) {
                    i64 count = MIN(way->rows, now - m);
                    way->multiply(panels + panel_bytes(way, m, w->n), count, w, s, strip, c);
                    store_strip(w, s, c, count, y + m * ldy, ldy);
                }
            }
        }
    }
    return lacking;
}
