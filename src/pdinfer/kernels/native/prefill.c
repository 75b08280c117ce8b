/* Latent attention of many queries, with expanded keys and values: for 192 and 128 values a head, expanding a key costs
 * what about a hundred queries in the latent space cost with it, and each query then multiplies a third of the numbers.
 * Called through `ops.py`, which checks dtypes, shapes and strides; sizes here are numbers of elements. */

#include "attention.h"

/* sum + a . b in each lane, of the unit `a` and LANES units at b. */
INLINE floats add_products(floats sum, unit a, const unit *b) {
#ifdef HAVE_BF16
    return (floats)_mm512_dpbf16_ps((__m512)sum, pair_in_all(a), (__m512bh)_mm512_loadu_si512(b));
#elif PER == 2
    words ys = load_pairs((const bf16 *)b);
    return sum + from_bf16(a) * even(ys) + from_bf16(a >> 16) * odd(ys);
#else
    union { unit u; float f; } x = {a};
    return sum + x.f * load((const float *)b);
#endif
}

/* n bf16 values as units; n is a multiple of PER. */
INLINE void to_units(const bf16 *p, i64 n, unit *to) {
#if PER == 2
    memcpy(to, p, n * sizeof *p);
#else
    to_floats(p, n, (float *)to);
#endif
}

#define COLUMNS (LANES == 16 ? 4 : 2) /* vectors in a row of the sums: 6 x 4 in 32 registers, or 6 x 2 in 16 */
#define ROWS 6                        /* of the sums */
#define PANEL (LANES * COLUMNS)
#define QUERIES 48 /* of a block: so many pass over a block of keys while it is in the cache, and sums stay on the stack */

/* c[ROWS][PANEL] (+)= a . b over `units` units: a[row][unit] with `lda` units between rows, b[unit][PANEL]. Each vector
 * of b is loaded once for all rows, and lanes are columns of c: no sum has to be added up over lanes. */
INLINE void micro_kernel(const unit *a, i64 lda, const unit *b, i64 units, float *c, i64 ldc, int add) {
    floats acc[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < COLUMNS; k++) acc[r][k] = add ? load(c + r * ldc + LANES * k) : all_of(0);
    for (i64 u = 0; u < units; u++)
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < COLUMNS; k++)
                acc[r][k] = add_products(acc[r][k], a[r * lda + u], b + u * PANEL + LANES * k);
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < COLUMNS; k++) store(c + r * ldc + LANES * k, acc[r][k]);
}

/* Attention of `queries` rows of one head over `keys` keys of it, added to o, maxima and sums. Query i sees the keys up
 * to i + offset. q [queries, size] `ldq` apart; packed as `pack` leaves it. */
static void attend_block(const bf16 *q, i64 ldq, i64 queries, const unit *packed, i64 keys, i64 size, i64 values,
                         i64 offset, float scale, float *o, i64 ldo, float *maxima, float *sums, i64 ldm) {
    _Alignas(64) unit left[QUERIES * size / PER];
    _Alignas(64) float scores[QUERIES * TOKENS], sum[QUERIES * values];
    _Alignas(64) unit weights[QUERIES * TOKENS / PER];
    i64 units = size / PER, per_key = units + values / PER;
    memset(left, 0, sizeof left);
    for (i64 r = 0; r < queries; r++) {
        to_units(q + r * ldq, size, left + r * units);
        memcpy(sum + r * values, o + r * ldo, values * sizeof(float));
    }
    /* Rows up to QUERIES are there in any case, so that the last ones need no body of their own. */
    memset(sum + queries * values, 0, (QUERIES - queries) * values * sizeof(float));
    i64 seen = MIN(keys, offset + queries);
    for (i64 start = 0; start < seen; start += TOKENS, packed += TOKENS * per_key) {
        i64 visible[QUERIES / ROWS]; /* of this block, to any of ROWS rows: what none of them sees is not multiplied */
        for (i64 r = 0; r < queries; r += ROWS)
            visible[r / ROWS] = MIN(TOKENS, MIN(keys, offset + MIN(r + ROWS, queries)) - start);
        for (i64 t = 0; t < TOKENS; t += PANEL)
            for (i64 r = 0; r < queries; r += ROWS)
                if (t < visible[r / ROWS])
                    micro_kernel(left + r * units, units, packed + t * units, units, scores + r * TOKENS + t, TOKENS, 0);
        for (i64 r = 0; r < queries; r++) {
            floats s[VECTORS];
            weigh(scores + r * TOKENS, MIN(keys, offset + r + 1) - start, scale, s, sum + r * values, values,
                  maxima + r * ldm, sums + r * ldm);
            weights_to_units(s, weights + r * TOKENS / PER);
        }
        memset(weights + queries * TOKENS / PER, 0, (QUERIES - queries) * TOKENS / PER * sizeof(unit));
        const unit *v = packed + TOKENS * units;
        for (i64 i = 0; i < values; i += PANEL)
            for (i64 r = 0; r < queries; r += ROWS)
                if (visible[r / ROWS] > 0)
                    micro_kernel(weights + r * TOKENS / PER, TOKENS / PER, v + i * (TOKENS / PER),
                         (visible[r / ROWS] + PER - 1) / PER, sum + r * values + i, values, 1);
    }
    for (i64 r = 0; r < queries; r++) memcpy(o + r * ldo, sum + r * values, values * sizeof(float));
}

#if PER == 1 && (LANES == 16 || defined(HAVE_AVX2))
#define TRANSPOSE8

/* to[i][row] = rows[row][i], 8 x 8, `PANEL` apart in `to`. */
INLINE void transpose8(const bf16 *rows, i64 ldr, unit *to) {
    __m256 two[8], four[8];
    for (int k = 0; k < 8; k += 2) {
        __m256 both[2];
        for (int j = 0; j < 2; j++) {
            __m128i bits = _mm_loadu_si128((const void *)(rows + (k + j) * ldr));
            both[j] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        }
        two[k] = _mm256_unpacklo_ps(both[0], both[1]), two[k + 1] = _mm256_unpackhi_ps(both[0], both[1]);
    }
    for (int k = 0; k < 8; k += 4)
        for (int j = 0; j < 2; j++) {
            four[k + 2 * j] = _mm256_shuffle_ps(two[k + j], two[k + j + 2], 0x44);
            four[k + 2 * j + 1] = _mm256_shuffle_ps(two[k + j], two[k + j + 2], 0xee);
        }
    for (int k = 0; k < 4; k++) {
        _mm256_storeu_ps((float *)to + k * PANEL, _mm256_permute2f128_ps(four[k], four[k + 4], 0x20));
        _mm256_storeu_ps((float *)to + (k + 4) * PANEL, _mm256_permute2f128_ps(four[k], four[k + 4], 0x31));
    }
}

#endif

/* Keys are transposed, so that lanes are keys, and the softmax finds the scores of a query side by side.
 * to[unit][row] = the n values of each of `count` rows, `ldr` apart; there is room for PANEL rows. */
static void transpose(const bf16 *rows, i64 ldr, i64 count, i64 n, unit *to) {
    for (i64 t = 0; t < count; t++) {
        i64 i = 0;
#ifdef TRANSPOSE8
        if (t / 8 * 8 + 8 <= count) {
            for (; i + 8 <= n; i += 8)
                if (t % 8 == 0) transpose8(rows + t * ldr + i, ldr, to + i * PANEL + t);
        }
#endif
        for (; i < n; i += PER) to_units(rows + t * ldr + i, PER, to + i / PER * PANEL + t);
    }
}

/* Packs the keys and values of one head for `attend_block`, TOKENS keys after the other: K [TOKENS / PANEL][units of a
 * key][PANEL], V [values / PANEL][TOKENS / PER][PANEL]. kv [keys, .]: nope values of K, then `values` of V, rows `ldkv`
 * apart; rope [keys, rope_size], rows `ldr` apart. What lies beyond `keys` is 0. */
static void pack(const bf16 *kv, i64 ldkv, const bf16 *rope, i64 ldr, i64 keys, i64 nope, i64 rope_size, i64 values,
                 unit *to) {
    i64 units = (nope + rope_size) / PER;
    for (i64 start = 0; start < keys; start += TOKENS, to += TOKENS * (units + values / PER)) {
        i64 count = MIN(TOKENS, keys - start);
        const bf16 *row = kv + start * ldkv;
        unit *v = to + TOKENS * units;
        if (count < TOKENS) memset(to, 0, TOKENS * (units + values / PER) * sizeof *to);
        for (i64 t = 0; t < count; t += PANEL) {
            i64 some = MIN(PANEL, count - t);
            transpose(row + t * ldkv, ldkv, some, nope, to + t * units);
            transpose(rope + (start + t) * ldr, ldr, some, rope_size, to + t * units + nope / PER * PANEL);
        }
        for (i64 t = 0; t < count; t += PER)
            for (i64 i = 0; i < values; i += PANEL) {
                const bf16 *value_row = row + t * ldkv + nope + i;
                unit *at = v + i * (TOKENS / PER) + t / PER * PANEL;
#if PER == 2
                const bf16 *odd = t + 1 < count ? value_row + ldkv : NULL;
                for (i64 k = 0; k < PANEL; k++) at[k] = value_row[k] | (unit)(odd ? odd[k] : 0) << 16;
#else
                to_units(value_row, PANEL, at);
#endif
            }
    }
}

/* The units of scratch that `mla_prefill` needs for `keys` keys of all heads. */
EXPORT i64 prefill_scratch(i64 keys, i64 heads, i64 size, i64 values) {
    return heads * ((keys + TOKENS - 1) / TOKENS) * TOKENS * (size + values) / PER;
}

/* Adds to o [queries, heads, values] (float32, unnormalised, with maxima and sums [queries, heads]) the attention of
 * q [queries, heads, nope + rope] over `keys` keys: kv [keys, heads, nope + values], rope rows `ldr` apart. Query i sees
 * keys up to i + offset. scratch has room for `prefill_scratch` units. nope and rope are even, values is a multiple of
 * 64. */
EXPORT void mla_prefill(const bf16 *q, const bf16 *kv, const bf16 *rope, i64 ldr, i64 queries, i64 keys, i64 heads,
                        i64 nope, i64 rope_size, i64 values, i64 offset, float scale, unit *scratch, float *o,
                        float *maxima, float *sums, int threads) {
    i64 size = nope + rope_size, blocks = (queries + QUERIES - 1) / QUERIES;
    i64 per_head = prefill_scratch(keys, 1, size, values);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (i64 h = 0; h < heads; h++)
            pack(kv + h * (nope + values), heads * (nope + values), rope, ldr, keys, nope, rope_size, values,
                 scratch + h * per_head);
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < heads * blocks; item++) {
            /* The last queries see the most keys. They come first, so that all threads end together. */
            i64 h = item / blocks, first = (blocks - 1 - item % blocks) * QUERIES, row = first * heads + h;
            attend_block(q + row * size, heads * size, MIN(QUERIES, queries - first), scratch + h * per_head, keys, size,
                         values, offset + first, scale, o + row * values, heads * values, maxima + row, sums + row,
                         heads);
        }
    }
}
