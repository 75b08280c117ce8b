/* Products with weights of four bits that lie in strips. A step of a strip has 512 bytes, and a scale for each of its 32
 * outs. Each half is 4 chunks of 16 words, one for each out: 8 inputs, the first in the lowest bits. Codes become bf16
 * values, which are not scaled yet and therefore exact; a sum of 32 inputs is scaled once. */

#include "parts.h"

#define HALF 256 /* bytes of codes */
#define CHUNK_BYTES 64

enum { INT4, MXFP4 };

/* What codes stand for, in bf16. */
static const bf16 VALUES[2][16] = {
    {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0,
     0x40E0},
    {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080,
     0xC0C0},
};

/* Whether codes become values as fast as a row is multiplied with them. */
#if LANES == 16 || defined(HAVE_AVX2)
#define HAS_SHUFFLES 1
#else
#define HAS_SHUFFLES 0
#endif

/* The values of 16 outs, in pairs of inputs, as those of a strip of bf16 are. */
typedef words Pairs[HALF_VECTORS];

/* Of a chunk with inputs 0 to 7 `read_pairs` makes the pairs of a half, 0 or 1, then those of the other one. They are what
 * is together in a word already, (0, 4) and (1, 5), then (2, 6) and (3, 7), or with AVX2, which has words of bytes, (0, 2)
 * and (4, 6), then (1, 3) and (5, 7). PLACE says where panels have input i, and APART how far a pair is apart there. */
#define FIRST(pair) (APART == 1 ? 2 * (pair) : (pair))
#if LANES == 16

#define PLACE(i) (2 * ((i) % 4) + (i) / 4)
#define APART 1

/* All values twice, as of an index of a word 5 bits count, of which the fifth is none of its own. */
typedef __m512i Table;

INLINE Table table_of(int format) { return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)VALUES[format])); }

INLINE void read_pairs(Table table, const uint8_t *chunk, int half, Pairs *to) {
    __m512i codes = _mm512_loadu_si512(chunk);
    for (int i = 0; i < 2; i++) to[i][0] = (words)_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8 * half + 4 * i), table);
}

#elif defined(HAVE_AVX2)

#define PLACE(i) (4 * ((i) % 2) + 2 * ((i) / 2 % 2) + (i) / 4)
#define APART 2

/* The low bytes of all values, and the high ones. */
typedef struct {
    __m256i low, high;
} Table;

INLINE Table table_of(int format) {
    const __m256i halves = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14,
                                            1, 3, 5, 7, 9, 11, 13, 15);
    __m256i values = _mm256_shuffle_epi8(_mm256_loadu_si256((const void *)VALUES[format]), halves);
    values = _mm256_permute4x64_epi64(values, 0xD8);
    return (Table){_mm256_permute2x128_si256(values, values, 0x00), _mm256_permute2x128_si256(values, values, 0x11)};
}

/* Of 8 outs both pairs side by side: of outs 0, 1, 4 and 5, and of the others. */
INLINE void read_both(Table table, const uint8_t *codes_of_outs, int half, words *to) {
    __m256i codes = _mm256_loadu_si256((const void *)codes_of_outs);
    codes = _mm256_and_si256(half ? _mm256_srli_epi16(codes, 4) : codes, _mm256_set1_epi8(15));
    __m256i low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
    to[0] = (words)_mm256_unpacklo_epi8(low, high), to[1] = (words)_mm256_unpackhi_epi8(low, high);
}

INLINE void read_pairs(Table table, const uint8_t *chunk, int half, Pairs *to) {
    for (int v = 0; v < HALF_VECTORS; v++) {
        words both[2];
        read_both(table, chunk + 32 * v, half, both);
        to[0][v] = (words)_mm256_shuffle_ps((__m256)both[0], (__m256)both[1], 0x88);
        to[1][v] = (words)_mm256_shuffle_ps((__m256)both[0], (__m256)both[1], 0xDD);
    }
}

/* acc = one row times a half of a step. Its values come in twos, so that nothing but sums has to be brought in order. */
INLINE void multiply_one(Table table, const float *a, const uint8_t *w, floats *acc) {
    floats sums[HALF_VECTORS][2][2] = {0};
    for (int c = 0; c < HALF; c += 64)
        for (int half = 0; half < 2; half++, a += 4) {
            floats x[2] = {(floats)_mm256_broadcast_sd((const double *)a), (floats)_mm256_broadcast_sd((const double *)(a + 2))};
            for (int v = 0; v < HALF_VECTORS; v++) {
                words both[2];
                read_both(table, w + c + 32 * v, half, both);
                for (int i = 0; i < 2; i++) sums[v][i][0] += x[0] * even(both[i]), sums[v][i][1] += x[1] * odd(both[i]);
            }
        }
    for (int v = 0; v < HALF_VECTORS; v++)
        acc[v] = (floats)_mm256_hadd_ps((__m256)(sums[v][0][0] + sums[v][0][1]), (__m256)(sums[v][1][0] + sums[v][1][1]));
}

#else

#define PLACE(i) (2 * ((i) % 4) + (i) / 4)
#define APART 1

typedef const bf16 *Table;

INLINE Table table_of(int format) { return VALUES[format]; }

INLINE void read_pairs(Table table, const uint8_t *chunk, int half, Pairs *to) {
    for (int i = 0; i < 2; i++)
        for (int o = 0; o < 16; o++) {
            const uint8_t *codes = chunk + 4 * o + half;
            to[i][o / LANES][o % LANES] = table[codes[0] >> (4 * i) & 15] | (uint32_t)table[codes[2] >> (4 * i) & 15] << 16;
        }
}

#endif

/* The scales of 16 outs, bf16 or the exponents of powers of two, from `first` on. */
INLINE void read_scales(int format, const void *scales, i64 first, floats *to) {
    for (int v = 0; v < HALF_VECTORS; v++, first += LANES) {
        if (format == INT4) {
            to[v] = load_bf16((const bf16 *)scales + first);
            continue;
        }
        const uint8_t *from = (const uint8_t *)scales + first;
#if LANES == 16
        words e = (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
#elif defined(HAVE_AVX2)
        words e = (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
#else
        words e;
        for (int o = 0; o < LANES; o++) e[o] = from[o];
#endif
        floats power = choose((ints)(e == 0), all_of(0x1p-127f), (floats)(e << 23));
        to[v] = choose((ints)(e == 255), all_of(NAN), power);
    }
}

/* Panels have the inputs of a few rows in the order of PLACE, [inputs][rows]: pairs of bf16 where the CPU multiplies these,
 * else floats. */
#ifdef HAVE_BF16
typedef uint32_t value;
#define VALUE_BYTES sizeof(bf16)
#else
typedef float value;
#define VALUE_BYTES sizeof(float)
#endif
#define STEP_VALUES (32 * VALUE_BYTES / sizeof(value)) /* of a row */

INLINE value *panel_at(const void *panels, i64 first, i64 n) {
    return (value *)((char *)panels + (i64)VALUE_BYTES * first * padded(n));
}

/* Input i of row m, of `rows` in a panel. */
INLINE void set(value *panel, i64 i, i64 m, i64 rows, bf16 x) {
    i64 place = i / 8 * 8 + PLACE(i % 8);
#ifdef HAVE_BF16
    ((bf16 *)panel)[2 * (place / 2 * rows + m) + place % 2] = x;
#else
    panel[place * rows + m] = from_bf16(x);
#endif
}

static void pack(const Input *x, i64 rows, i64 n, void *to) {
    const bf16 *values = x->values;
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < n; i++) set(panel_at(to, first, n), i, m, count, values[(first + m) * x->ld + i]);
    }
}

static void store_panel(const float *values, i64 ldv, i64 rows, i64 n, i64 at, void *to) {
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        for (i64 m = 0; m < count; m++)
            for (i64 i = 0; i < 16; i++)
                set(panel_at(to, first, n), at + i, m, count, to_bf16(values[(first + m) * ldv + i]));
    }
}

/* sums[u][m] += rows times a half of a chunk. */
INLINE void add_pairs(int rows, int chains, Table table, const value *a, const uint8_t *chunk, int half,
                      floats (*sums)[MOST_OF_PANEL][HALF_VECTORS]) {
    Pairs pairs[2];
    read_pairs(table, chunk, half, pairs);
    for (int i = 0; i < 2; i++) {
#ifdef HAVE_BF16
        for (int m = 0; m < rows; m++) {
            floats *sum = &sums[i % chains][m][0];
            *sum = (floats)_mm512_dpbf16_ps((__m512)*sum, (__m512bh)pairs[i][0], pair_in_all(a[i * rows + m]));
        }
#else
        for (int input = 0; input < 2; input++) {
            floats b[HALF_VECTORS];
            for (int v = 0; v < HALF_VECTORS; v++) b[v] = input ? odd(pairs[i][v]) : even(pairs[i][v]);
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < HALF_VECTORS; v++) sums[i % chains][m][v] += a[(FIRST(i) + APART * input) * rows + m] * b[v];
        }
#endif
    }
}

/* acc[m] = rows times a half of a step. */
INLINE void multiply_half(int rows, Table table, const value *a, const uint8_t *w, floats (*acc)[HALF_VECTORS]) {
#ifdef HAVE_AVX2
    if (rows == 1) {
        multiply_one(table, a, w, acc[0]);
        return;
    }
#endif
    /* An instruction that adds to a sum waits several cycles for the one before: few rows have two sums each. */
    const int chains = rows * HALF_VECTORS > 6 ? 1 : 2, values = STEP_VALUES / 8 * rows;
    floats sums[2][MOST_OF_PANEL][HALF_VECTORS];
    for (int u = 0; u < chains; u++)
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < HALF_VECTORS; v++) sums[u][m][v] = (floats){0};
    for (int c = 0; c < HALF; c += CHUNK_BYTES, a += 2 * values) {
        add_pairs(rows, chains, table, a, w + c, 0, sums);
        add_pairs(rows, chains, table, a + values, w + c, 1, sums);
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < HALF_VECTORS; v++) acc[m][v] = chains == 1 ? sums[0][m][v] : sums[0][m][v] + sums[1][m][v];
}

/* c[0..16) += sums, scaled. */
INLINE void add_scaled(const floats *sums, const floats *scales, float *c) {
    for (int v = 0; v < HALF_VECTORS; v++) store(c + LANES * v, load(c + LANES * v) + sums[v] * scales[v]);
}

/* c[m][0..32) += `rows` rows times some steps of a strip. */
INLINE void row_kernel_of(int rows, int format, const value *a, const uint8_t *w, const void *scales, i64 at, i64 steps,
                          float *c) {
    Table table = table_of(format);
    for (i64 k = 0; k < steps; k++, a += STEP_VALUES * rows)
        for (int h = 0; h < 2; h++, w += HALF, at += 16) {
            floats acc[MOST_OF_PANEL][HALF_VECTORS], of_outs[HALF_VECTORS];
            for (int line = 0; line < HALF; line += 64) __builtin_prefetch(w + line + PREFETCH_BYTES, 0, 3);
            multiply_half(rows, table, a, w, acc);
            read_scales(format, scales, at, of_outs);
            for (int m = 0; m < rows; m++) add_scaled(acc[m], of_outs, c + STRIP * m + 16 * h);
        }
}

NOINLINE void row_kernel(i64 rows, int format, const value *a, const uint8_t *w, const void *scales, i64 at, i64 steps,
                         float *c) {
    if (format == INT4) WITH_CONSTANT(rows, MOST_OF_PANEL, row_kernel_of, INT4, a, w, scales, at, steps, c)
    else WITH_CONSTANT(rows, MOST_OF_PANEL, row_kernel_of, MXFP4, a, w, scales, at, steps, c)
}

#if LANES == 8

/* With 16 registers there is none left to keep what is read for several panels, and without shuffles reading takes
 * longest: codes become scaled floats first, which hold the 4 bits of one times the 8 of the other. A half of a step ->
 * [inputs][16 outs]. */
INLINE void widen(int format, const uint8_t *w, const void *scales, i64 at, float *to) {
    Table table = table_of(format);
    floats of_outs[HALF_VECTORS];
    read_scales(format, scales, at, of_outs);
    for (int part = 0; part < 8; part++) {
        Pairs pairs[2];
        __builtin_prefetch(w + 32 * part + PREFETCH_BYTES, 0, 3);
        if (part % 2) read_pairs(table, w + part / 2 * CHUNK_BYTES, 1, pairs);
        else read_pairs(table, w + part / 2 * CHUNK_BYTES, 0, pairs);
        for (int i = 0; i < 2; i++)
            for (int v = 0; v < HALF_VECTORS; v++) {
                float *place = to + 64 * part + 16 * FIRST(i) + LANES * v;
                store(place, even(pairs[i][v]) * of_outs[v]);
                store(place + 16 * APART, odd(pairs[i][v]) * of_outs[v]);
            }
    }
}

/* c[m][0..16) += `rows` rows times these. */
INLINE void wide_kernel_of(int rows, const float *a, const float *w, i64 inputs, float *c) {
    floats acc[MOST_OF_PANEL][HALF_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < HALF_VECTORS; v++) acc[m][v] = load(c + STRIP * m + LANES * v);
    for (i64 i = 0; i < inputs; i++, a += rows, w += 16) {
        floats b[HALF_VECTORS];
        for (int v = 0; v < HALF_VECTORS; v++) b[v] = load(w + LANES * v);
        for (int m = 0; m < rows; m++)
            for (int v = 0; v < HALF_VECTORS; v++) acc[m][v] += a[m] * b[v];
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < HALF_VECTORS; v++) store(c + STRIP * m + LANES * v, acc[m][v]);
}

NOINLINE void wide_kernel(i64 rows, const float *a, const float *w, i64 inputs, float *c) {
    WITH_CONSTANT(rows, MOST_OF_PANEL, wide_kernel_of, a, w, inputs, c)
}

#endif

/* c[rows][0..32) += all panels times some steps of a strip. */
INLINE void multiply_steps(int format, const void *panels, i64 rows, const Matrix *w, const uint8_t *codes, i64 at, i64 step,
                           i64 steps, float *c) {
#if LANES == 16
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        const value *a = panel_at(panels, first, w->n) + STEP_VALUES * step * count;
        row_kernel(count, format, a, codes, w->scales, at, steps, c + STRIP * first);
    }
#else
    _Alignas(64) float wide[DEEP * STEP / 2];
    for (int h = 0; h < 2; h++) {
        for (i64 k = 0; k < steps; k++)
            widen(format, codes + HALF * (2 * k + h), w->scales, at + STRIP * k + 16 * h, wide + STEP / 2 * k);
        for (i64 first = 0, count; first < rows; first += count) {
            count = panel_of(rows - first);
            const value *a = panel_at(panels, first, w->n) + STEP_VALUES * step * count;
            wide_kernel(count, a, wide, 32 * steps, c + STRIP * first + 16 * h);
        }
    }
#endif
}

INLINE void multiply(int format, const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    i64 steps = w->n / 32, at = s * w->n;
    const uint8_t *codes = (const uint8_t *)strip;
    memset(c, 0, sizeof *c * STRIP * rows);
    if (HAS_SHUFFLES && rows <= MOST_OF_PANEL) row_kernel(rows, format, panels, codes, w->scales, at, steps, c);
    else /* all panels pass over a few steps before the next, so that these stay in the first-level cache */
        for (i64 k = 0; k < steps; k += DEEP, codes += 2 * HALF * DEEP, at += STRIP * DEEP)
            multiply_steps(format, panels, rows, w, codes, at, k, MIN(DEEP, steps - k), c);
}

static void multiply_int4(const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    multiply(INT4, panels, rows, w, s, strip, c);
}

static void multiply_mxfp4(const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    multiply(MXFP4, panels, rows, w, s, strip, c);
}

static const Way ways[] = {
    {CHUNK, VALUE_BYTES, pack, multiply_int4, store_panel, NULL},
    {CHUNK, VALUE_BYTES, pack, multiply_mxfp4, store_panel, NULL},
};

/* Of weights [outs, n] of so many parts, which lie in strips. */
INLINE Matrix matrix_of(int format, const uint8_t *codes, const void *scales, i64 outs, i64 n, int parts) {
    i64 scale_bytes = outs * n / 32 * (format == INT4 ? (i64)sizeof(bf16) : 1);
    return (Matrix){(const bf16 *)codes, outs, n, parts, 2 * HALF, scales, scale_bytes};
}

/* y[rows, outs] = x[rows, n] . w[outs, n]^T with weights of that format in strips: INT4 with scales of bf16, or MXFP4 with
 * their exponents. The bytes of memory that it could not have, or 0. */
EXPORT i64 linear_four_bits(const bf16 *x, i64 ldx, i64 rows, int format, const uint8_t *codes, const void *scales, i64 outs,
                            i64 n, int parts, bf16 *y, int threads) {
    Matrix w = matrix_of(format, codes, scales, outs, n, parts);
    return by_strips(&ways[format], (Input){x, ldx}, rows, &w, y, outs, threads);
}

/* Gated MLPs of rows sorted by expert, as `experts_strips`, with weights of that format. */
EXPORT i64 experts_four_bits(const bf16 *x, const i64 *counts, i64 num_experts, int format, const uint8_t *gate_up,
                             const void *gate_up_scales, const uint8_t *down, const void *down_scales, i64 width, i64 inner,
                             bf16 *y, int threads) {
    return by_parts(&ways[format], (Input){x, width}, counts, num_experts,
                    matrix_of(format, gate_up, gate_up_scales, 2 * inner, width, 2),
                    matrix_of(format, down, down_scales, width, inner, 1), y, threads);
}
