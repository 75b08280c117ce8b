/* Products of many rows: strips of weights, and the way of floats, for CPUs without AVX-512 BF16, where torch's products
 * of bf16 are an order slower than those of floats. Weights are read once into strips of 32 outs, which stay in the
 * second-level cache while all rows of x, in panels of floats, pass over them. Sums stay in registers over all inputs. */

#include "products.h"

#define VECTORS (16 / LANES)               /* of half a strip */
#define PANEL (LANES == 16 ? 12 : 6)       /* rows: 6 x 2 sums are 12 of 16 registers, 12 are of 32 */
#define PANELS 512                         /* rows whose panels are there together */
#ifndef CHUNK
#define CHUNK 144                          /* rows that are taken through a strip at once */
#endif

typedef uint32_t eight __attribute__((vector_size(32)));

/* Rows of the next panel when `left` are left of a chunk. */
INLINE i64 panel_of(i64 left) { return left / ((left + PANEL - 1) / PANEL); }

#if defined(__clang__) || __GNUC__ >= 12
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (eight){__VA_ARGS__})
#endif

/* Turns 8 x 8 words: rows `from`, which are `ld` bf16 values apart, become columns of `to`, 16 words apart. */
INLINE void turn(const bf16 *from, i64 ld, bf16 *to) {
    eight r[8], s[8];
    for (int i = 0; i < 8; i++) memcpy(r + i, from + i * ld, 32);
    for (int i = 0; i < 8; i += 2) {
        s[i] = MIX(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = MIX(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = MIX(s[i + j], s[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[i + 2 * j + 1] = MIX(s[i + j], s[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = MIX(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        s[i + 4] = MIX(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) memcpy(to + 32 * i, s + i, 32);
}

/* 32 inputs of at most 16 outs, `n` apart: one tile of a strip. */
INLINE void pack_tile(const bf16 *from, i64 outs, i64 inputs, i64 n, bf16 *to) {
    if (outs == 16 && inputs >= 32) {
        for (int o = 0; o < 16; o++) __builtin_prefetch((const char *)(from + o * n) + 512, 0, 2);
        for (int half = 0; half < 2; half++)
            for (int pairs = 0; pairs < 2; pairs++)
                turn(from + 8 * half * n + 16 * pairs, n, to + 256 * pairs + 16 * half);
        return;
    }
    memset(to, 0, sizeof(bf16) * STEP / 2);
    for (i64 o = 0; o < outs; o++)
        for (i64 i = 0; i < MIN(32, inputs); i++) to[i / 2 * 32 + 2 * o + i % 2] = from[o * n + i];
}

void pack_strip(const Strip *w, i64 first, i64 inputs, bf16 *to) {
    for (i64 k = first; k < first + inputs; k += 32, to += STEP) {
        pack_tile(w->low + k, w->lows, first + inputs - k, w->n, to);
        pack_tile(w->high + k, w->highs, first + inputs - k, w->n, to + STEP / 2);
    }
}

/* Panels are floats, of a few rows each: [inputs][rows]. */
static void pack(const bf16 *x, i64 ldx, i64 rows, i64 n, void *to) {
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        float *panel = (float *)to + first * padded(n);
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < n; i++) panel[i * count + m] = from_bf16(x[(first + m) * ldx + i]);
        memset(panel + n * count, 0, sizeof(float) * (padded(n) - n) * count);
    }
}

static void put(const float *values, i64 ldv, i64 rows, i64 n, i64 at, void *to) {
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        float *panel = (float *)to + first * padded(n) + at * count;
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < 16; i++) panel[i * count + m] = values[(first + m) * ldv + i];
    }
}

/* c[m][0..16) = a panel of M rows times half a strip of `steps` times 32 inputs. */
#define TIMES(M)                                                                                                       \
    static void times_##M(const float *a, const bf16 *w, i64 steps, float *c) {                                        \
        floats acc[M][VECTORS];                                                                                        \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int v = 0; v < VECTORS; v++) acc[m][v] = (floats){0};                                                 \
        for (i64 k = 0; k < steps; k++, w += STEP, a += 32 * M)                                                        \
            for (i64 p = 0; p < 16; p++) {                                                                             \
                floats b[VECTORS];                                                                                     \
                for (int v = 0; v < VECTORS; v++) b[v] = even(load_pairs(w + 32 * p + 2 * LANES * v));                 \
                for (int m = 0; m < M; m++)                                                                            \
                    for (int v = 0; v < VECTORS; v++) acc[m][v] += a[2 * p * M + m] * b[v];                            \
                for (int v = 0; v < VECTORS; v++) b[v] = odd(load_pairs(w + 32 * p + 2 * LANES * v));                  \
                for (int m = 0; m < M; m++)                                                                            \
                    for (int v = 0; v < VECTORS; v++) acc[m][v] += a[(2 * p + 1) * M + m] * b[v];                      \
            }                                                                                                          \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int v = 0; v < VECTORS; v++) store(c + STRIP * m + LANES * v, acc[m][v]);                             \
    }
TIMES(1) TIMES(2) TIMES(3) TIMES(4) TIMES(5) TIMES(6)
typedef void (*Times)(const float *, const bf16 *, i64, float *);
#if LANES == 16
TIMES(7) TIMES(8) TIMES(9) TIMES(10) TIMES(11) TIMES(12)
static const Times times[] = {0, times_1, times_2, times_3, times_4, times_5, times_6,
                              times_7, times_8, times_9, times_10, times_11, times_12};
#else
static const Times times[] = {0, times_1, times_2, times_3, times_4, times_5, times_6};
#endif

static void times_packed(const float *panels, i64 rows, i64 n, const bf16 *strip, float *c) {
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        for (int half = 0; half < 2; half++)
            times[count](panels + first * padded(n), strip + half * STEP / 2, padded(n) / 32, c + STRIP * first + 16 * half);
    }
}

static void pack_and_times(const void *panels, i64 rows, i64 n, const Strip *w, bf16 *packed, float *c) {
    pack_strip(w, 0, n, packed);
    times_packed(panels, rows, n, packed, c);
}

const Many by_floats = {CHUNK, sizeof(float), pack, pack_and_times, put};

/* c[rows][32] -> columns [0, outs) of y. */
void store_strip(const float *c, i64 rows, i64 outs, bf16 *y, i64 ldy) {
    for (i64 m = 0; m < rows; m++, c += STRIP, y += ldy)
        if (outs >= STRIP)
            for (int i = 0; i < STRIP; i += LANES) store_bf16(y + i, load(c + i));
        else
            for (i64 i = 0; i < outs; i++) y[i] = to_bf16(c[i]);
}

i64 many_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 outs, i64 n, bf16 *y, i64 ldy, int threads) {
    i64 all = panel_bytes(&by_floats, MIN(rows, PANELS), n), each = sizeof(bf16) * STRIP * padded(n), lacking = 0;
    float *panels = room(0, all);
    if (!panels) return all;
    for (i64 r = 0; r < rows; r += PANELS, x += PANELS * ldx, y += PANELS * ldy) {
        i64 now = MIN(rows - r, PANELS);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(max : lacking)
        {
            bf16 *packed = room(1, each);
            if (!packed) lacking = each;
            float c[CHUNK * STRIP];
#pragma omp for schedule(static)
            for (i64 m = 0; m < now; m += CHUNK) pack(x + m * ldx, ldx, MIN(CHUNK, now - m), n, panels + m * padded(n));
#pragma omp for schedule(dynamic)
            for (i64 o = 0; o < outs; o += STRIP) {
                if (!packed) continue;
                Strip strip = strip_of(w, outs, n, o);
                pack_strip(&strip, 0, n, packed);
                for (i64 m = 0; m < now; m += CHUNK) {
                    i64 count = MIN(CHUNK, now - m);
                    times_packed(panels + m * padded(n), count, n, packed, c);
                    store_strip(c, count, MIN(STRIP, outs - o), y + m * ldy + o, ldy);
                }
            }
        }
    }
    return lacking;
}
