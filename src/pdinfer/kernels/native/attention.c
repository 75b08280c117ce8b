/* Latent attention over pages: many queries with expanded keys and values, few queries in the latent space. Called through
 * `ops.py`, which checks dtypes, shapes and strides; sizes here are numbers of elements. */

#include "vectors.h"

#define TOKENS 64 /* of a context, in one block */

/* A unit is what a lane multiplies at a time: a pair of bf16 values where the CPU has vdpbf16ps, elsewhere one float.
 * PAIRS_IN_C is for tests: pairs, on any CPU. */
typedef uint32_t unit;

#if defined(__AVX512BF16__) || defined(PAIRS_IN_C)
#define PER 2 /* values in a unit */
#else
#define PER 1
#endif

/* sum + a . b in each lane, of the unit `a` and LANES units at b. */
INLINE floats add_products(floats sum, unit a, const unit *b) {
#ifdef __AVX512BF16__
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_loadu_si512(b));
#elif PER == 2
    words ys = load_pairs((const bf16 *)b);
    return sum + from_bf16(a) * even(ys) + from_bf16(a >> 16) * odd(ys);
#else
    union { unit u; float f; } x = {a};
    return sum + x.f * load((const float *)b);
#endif
}

INLINE void to_floats(const bf16 *p, i64 n, float *to) {
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load_bf16(p + i));
    for (; i < n; i++) to[i] = from_bf16(p[i]);
}

/* n bf16 values as units; n is a multiple of PER. */
INLINE void to_units(const bf16 *p, i64 n, unit *to) {
#if PER == 2
    memcpy(to, p, n * sizeof *p);
#else
    to_floats(p, n, (float *)to);
#endif
}

#define VECTORS (TOKENS / LANES) /* of floats for a block */

/* The weights of a block as units: rounded to bf16 where these are pairs. */
INLINE void weights_to_units(const floats *s, unit *to) {
#ifdef __AVX512BF16__
    for (int k = 0; k < 4; k += 2)
        _mm512_storeu_si512(to + 8 * k, (__m512i)_mm512_cvtne2ps_pbh((__m512)s[k + 1], (__m512)s[k]));
#elif PER == 2
    for (int k = 0; k < VECTORS; k++) store_bf16((bf16 *)to + LANES * k, s[k]);
#else
    for (int k = 0; k < VECTORS; k++) store((float *)to + LANES * k, s[k]);
#endif
}

/* The weight of token t. */
INLINE float weight_at(const unit *weights, i64 t) {
    return PER == 2 ? from_bf16(((const bf16 *)weights)[t]) : ((const float *)weights)[t];
}

/* One block of a running softmax: weights, as units, of `count` scores (of one block; those that are not there weigh
 * nothing), added to `sum`. When the maximum rises, `sum` and what was weighed before, o[n], shrink accordingly. A score
 * that is not finite makes `sum` NaN for good, whatever becomes of the maximum. */
INLINE void weigh(const float *scores, i64 count, float scale, unit *weights, float *o, i64 n, float *maximum, float *sum) {
    const floats none = all_of(-INFINITY);
    floats s[VECTORS], top = none, total = {0};
    ints place;
    for (int i = 0; i < LANES; i++) place[i] = i;
    for (int k = 0; k < VECTORS; k++) {
        ints there = place + LANES * k < (int)count;
        floats scaled = scale * load(scores + LANES * k);
        s[k] = choose(there, scaled, none);
        top = choose(s[k] > top, s[k], top);
        total += choose(there, 0 * scaled, all_of(0)); /* 0, or NaN */
    }
    float before = *maximum, now = fmaxf(before, largest_of(top));
    if (now == -INFINITY) { /* none of these is there and none was before, or they are not finite */
        memset(weights, 0, TOKENS / PER * sizeof(unit));
        *sum += sum_of(total);
        return;
    }
    for (int k = 0; k < VECTORS; k++) {
        s[k] = exp_of(s[k] - now);
        total += s[k];
    }
    weights_to_units(s, weights);
    if (now > before) {
        float shrink = expf(before - now);
        *sum *= shrink;
        *maximum = now;
        for (i64 i = 0; i < n; i += LANES) store(o + i, shrink * load(o + i));
    }
    *sum += sum_of(total);
}

#ifdef __AVX512BF16__

typedef bf16 value; /* of a query, as decode reads it */

INLINE void to_values(const bf16 *p, i64 n, value *to) { memcpy(to, p, n * sizeof *p); }

/* scores[h][t] = q[h] . token[t], to a multiple of 4 tokens: [heads, TOKENS]. */
INLINE void score_block(const value *q, const bf16 *const *token, i64 count, i64 heads, i64 width, float *scores) {
    for (i64 t = 0; t < count; t += 4)
        for (i64 h = 0; h < heads; h += 4) {
            __m512 acc[4][4];
            i64 some = MIN(4, heads - h);
            for (int a = 0; a < 4; a++)
                for (int b = 0; b < 4; b++) acc[a][b] = _mm512_setzero_ps();
            const bf16 *qs[4];
            for (int a = 0; a < 4; a++) qs[a] = q + (h + MIN(a, some - 1)) * width;
            for (i64 i = 0; i < width; i += 32) {
                __m512bh c[4];
                for (int b = 0; b < 4; b++) c[b] = load32(token[t + b] + i);
                for (int a = 0; a < 4; a++) {
                    __m512bh x = load32(qs[a] + i);
                    for (int b = 0; b < 4; b++) acc[a][b] = _mm512_dpbf16_ps(acc[a][b], x, c[b]);
                }
            }
            for (int a = 0; a < some; a++)
                _mm_storeu_ps(scores + (h + a) * TOKENS + t, sums4(acc[a]));
        }
}

/* o[h] += the first `rank` values of each token, weighed. */
INLINE void value_block(const unit *weights, const bf16 *const *token, i64 count, i64 heads, i64 rank, float *o) {
    for (i64 h = 0; h < heads; h += 8) {
        i64 some = MIN(8, heads - h);
        for (i64 i = 0; i < rank; i += 32) {
            __m512 acc[8][2];
            for (int a = 0; a < 8; a++) acc[a][0] = acc[a][1] = _mm512_setzero_ps();
            for (i64 t = 0; t < count; t += 2) {
                __m512i even = _mm512_loadu_si512(token[t] + i), odd = _mm512_loadu_si512(token[t + 1] + i);
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(even, odd);
                for (int a = 0; a < 8; a++) {
                    const unit *p = weights + (h + MIN(a, some - 1)) * (TOKENS / 2) + t / 2;
                    __m512bh weight = (__m512bh)_mm512_set1_epi32((int)*p);
                    acc[a][0] = _mm512_dpbf16_ps(acc[a][0], weight, lo);
                    acc[a][1] = _mm512_dpbf16_ps(acc[a][1], weight, hi);
                }
            }
            for (int a = 0; a < some; a++) {
                float *to = o + (h + a) * rank + i;
                __m512 left = _mm512_permutex2var_ps(acc[a][0], LOW, acc[a][1]);
                __m512 right = _mm512_permutex2var_ps(acc[a][0], HIGH, acc[a][1]);
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), left));
                _mm512_storeu_ps(to + 16, _mm512_add_ps(_mm512_loadu_ps(to + 16), right));
            }
        }
    }
}

#else

typedef float value; /* of a query, as decode reads it */

INLINE void to_values(const bf16 *p, i64 n, value *to) { to_floats(p, n, to); }

/* scores[h][t] = q[h] . token[t], to a multiple of 2 tokens: [heads, TOKENS]. */
INLINE void score_block(const value *q, const bf16 *const *token, i64 count, i64 heads, i64 width, float *scores) {
    for (i64 h = 0; h < heads; h += 4) {
        i64 some = MIN(4, heads - h);
        const float *qs[4];
        for (int a = 0; a < 4; a++) qs[a] = q + (h + MIN(a, some - 1)) * width;
        for (i64 t = 0; t < count; t += 2) {
            floats acc[4][2];
            for (int a = 0; a < 4; a++) acc[a][0] = acc[a][1] = all_of(0);
            for (i64 i = 0; i < width; i += LANES) {
                floats one = load_bf16(token[t] + i), other = load_bf16(token[t + 1] + i);
                for (int a = 0; a < 4; a++) {
                    acc[a][0] += load(qs[a] + i) * one;
                    acc[a][1] += load(qs[a] + i) * other;
                }
            }
            for (int a = 0; a < some; a++)
                for (int b = 0; b < 2; b++) scores[(h + a) * TOKENS + t + b] = sum_of(acc[a][b]);
        }
    }
}

/* o[h] += the first `rank` values of each token, weighed. */
INLINE void value_block(const unit *weights, const bf16 *const *token, i64 count, i64 heads, i64 rank, float *o) {
    for (i64 h = 0; h < heads; h += 4) {
        i64 some = MIN(4, heads - h);
        for (i64 i = 0; i < rank; i += 2 * LANES) {
            floats acc[4][2];
            for (int a = 0; a < 4; a++) acc[a][0] = acc[a][1] = all_of(0);
            for (i64 t = 0; t < count; t++) {
                floats left = load_bf16(token[t] + i), right = load_bf16(token[t] + i + LANES);
                for (int a = 0; a < 4; a++) {
                    float weight = weight_at(weights + (h + MIN(a, some - 1)) * (TOKENS / PER), t);
                    acc[a][0] += weight * left;
                    acc[a][1] += weight * right;
                }
            }
            for (int a = 0; a < some; a++)
                for (int k = 0; k < 2; k++) {
                    float *to = o + (h + a) * rank + i + k * LANES;
                    store(to, load(to) + acc[a][k]);
                }
        }
    }
}

#endif

/* One block of absorbed attention: all heads of one query over `count` tokens, added to o, maxima and sums. Beyond `count`
 * up to TOKENS, token[t] is a row that may be read and weighs nothing. width and rank are multiples of 32. */
static void absorb_block(const value *q, const bf16 *const *token, i64 count, i64 heads, i64 width, i64 rank,
                         float scale, float *o, float *maxima, float *sums) {
    float scores[heads * TOKENS];
    unit weights[heads * TOKENS / PER];
    score_block(q, token, count, heads, width, scores);
    for (i64 h = 0; h < heads; h++)
        weigh(scores + h * TOKENS, count, scale, weights + h * TOKENS / PER, o + h * rank, rank, maxima + h, sums + h);
    value_block(weights, token, count, heads, rank, o);
}

/* Absorbed attention of `queries` queries of one sequence over part of its context, tokens [first, last). Query i sees
 * those before `seen` + i. All queries read a block of tokens while it is in the cache.
 * q [queries, heads, width]: latent then rope. pages: token t lies at row table[t / page] * page + t % page, `width`
 * values. Leaves, unnormalised, o[queries, heads, rank] with its maximum and sum per query and head. */
static void absorb(const value *q, const bf16 *pages, const int32_t *table, i64 page, i64 first, i64 last, i64 queries,
                   i64 seen, i64 heads, i64 width, i64 rank, float scale, float *o, float *maxima, float *sums) {
    const bf16 *token[TOKENS];
    memset(o, 0, sizeof(float) * queries * heads * rank);
    for (i64 row = 0; row < queries * heads; row++) maxima[row] = -INFINITY, sums[row] = 0;
    for (i64 start = first; start < last; start += TOKENS)
        for (i64 n = 0; n < queries; n++) {
            i64 stop = MIN(MIN(start + TOKENS, last), seen + n), row = n * heads;
            if (stop <= start) continue;
            for (i64 t = 0; t < TOKENS; t++) { /* beyond the end: the last one again, with weight 0 */
                i64 at = MIN(start + t, stop - 1);
                token[t] = pages + (table[at / page] * page + at % page) * width;
            }
            absorb_block(q + row * width, token, stop - start, heads, width, rank, scale, o + row * rank, maxima + row,
                         sums + row);
        }
}

/* Absorbed attention of `queries` queries in each of `batch` sequences, the last ones of its lens[b] >= `queries` tokens;
 * each sees the tokens up to its own -> out [batch, queries, heads, rank]. The bytes of memory that it could not have, or 0.
 * latent [batch, queries, heads, rank] and rope [batch, queries, heads, width - rank] are their two parts; table has
 * `pages_per_row` page ids per sequence. Contexts are cut into parts of `part` tokens, so that few sequences still occupy
 * all threads. */
EXPORT i64 mla_decode(const bf16 *latent, const bf16 *rope, const bf16 *pages, const int32_t *table, i64 pages_per_row,
                      i64 page, const i64 *lens, i64 batch, i64 queries, i64 heads, i64 width, i64 rank, float scale,
                      i64 part, bf16 *out, int threads) {
    i64 rows = queries * heads, parts = 0, *begins = malloc(sizeof(i64) * (batch + 1));
    if (!begins) return sizeof(i64) * (batch + 1);
    for (i64 b = 0; b < batch; b++) {
        begins[b] = parts;
        parts += (lens[b] + part - 1) / part;
    }
    begins[batch] = parts;
    i64 bytes;
    int fits = !__builtin_mul_overflow(parts, (i64)sizeof(float) * rows * (rank + 2), &bytes);
    float *o = fits ? malloc(bytes) : NULL;
    if (!o) {
        free(begins);
        return fits ? bytes : INT64_MAX;
    }
    float *maxima = o + parts * rows * rank, *sums = maxima + parts * rows;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        value *q = malloc(sizeof *q * rows * width);
        if (!q) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < parts; item++) {
            if (!q) continue;
            i64 b = 0;
            while (begins[b + 1] <= item) b++;
            i64 first = (item - begins[b]) * part;
            for (i64 r = 0; r < rows; r++) {
                to_values(latent + (b * rows + r) * rank, rank, q + r * width);
                to_values(rope + (b * rows + r) * (width - rank), width - rank, q + r * width + rank);
            }
            absorb(q, pages, table + b * pages_per_row, page, first, MIN(first + part, lens[b]), queries,
                   lens[b] - queries + 1, heads, width, rank, scale, o + item * rows * rank, maxima + item * rows,
                   sums + item * rows);
        }
#pragma omp for schedule(static)
        for (i64 row = 0; row < batch * rows; row++) {
            i64 b = row / rows, r = row % rows;
            float top = -INFINITY, total = 0;
            for (i64 k = begins[b]; k < begins[b + 1]; k++) top = fmaxf(top, maxima[k * rows + r]);
            for (i64 k = begins[b]; k < begins[b + 1]; k++) {
                maxima[k * rows + r] = expf(maxima[k * rows + r] - top);
                total += sums[k * rows + r] * maxima[k * rows + r];
            }
            for (i64 i = 0; i < rank; i += LANES) {
                floats sum = {0};
                for (i64 k = begins[b]; k < begins[b + 1]; k++)
                    sum += maxima[k * rows + r] * load(o + (k * rows + r) * rank + i);
                store_bf16(out + row * rank + i, sum * (1.0f / total));
            }
        }
        free(q);
    }
    free(o);
    free(begins);
    return failed ? (i64)sizeof(value) * rows * width : 0;
}

#define COLUMNS (LANES == 16 ? 4 : 2) /* vectors in a row of a tile: 6 x 4 sums in 32 registers, or 6 x 2 in 16 */
#define ROWS 6                        /* of a tile */
#define STRIP (LANES * COLUMNS)
#define QUERIES 48 /* of a block */

/* c[ROWS][STRIP] (+)= a . b over `units` units: a[row][unit] with `lda` units between rows, b[unit][STRIP]. */
INLINE void tile(const unit *a, i64 lda, const unit *b, i64 units, float *c, i64 ldc, int add) {
    floats acc[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < COLUMNS; k++) acc[r][k] = add ? load(c + r * ldc + LANES * k) : all_of(0);
    for (i64 u = 0; u < units; u++)
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < COLUMNS; k++)
                acc[r][k] = add_products(acc[r][k], a[r * lda + u], b + u * STRIP + LANES * k);
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
    memset(sum + queries * values, 0, (QUERIES - queries) * values * sizeof(float));
    i64 seen = MIN(keys, offset + queries);
    for (i64 start = 0; start < seen; start += TOKENS, packed += TOKENS * per_key) {
        i64 visible[QUERIES / ROWS]; /* of this block, to any row of a tile */
        for (i64 r = 0; r < queries; r += ROWS)
            visible[r / ROWS] = MIN(TOKENS, MIN(keys, offset + MIN(r + ROWS, queries)) - start);
        for (i64 t = 0; t < TOKENS; t += STRIP)
            for (i64 r = 0; r < queries; r += ROWS)
                if (t < visible[r / ROWS])
                    tile(left + r * units, units, packed + t * units, units, scores + r * TOKENS + t, TOKENS, 0);
        for (i64 r = 0; r < queries; r++)
            weigh(scores + r * TOKENS, MIN(keys, offset + r + 1) - start, scale, weights + r * TOKENS / PER,
                  sum + r * values, values, maxima + r * ldm, sums + r * ldm);
        memset(weights + queries * TOKENS / PER, 0, (QUERIES - queries) * TOKENS / PER * sizeof(unit));
        const unit *v = packed + TOKENS * units;
        for (i64 i = 0; i < values; i += STRIP)
            for (i64 r = 0; r < queries; r += ROWS)
                if (visible[r / ROWS] > 0)
                    tile(weights + r * TOKENS / PER, TOKENS / PER, v + i * (TOKENS / PER),
                         (visible[r / ROWS] + PER - 1) / PER, sum + r * values + i, values, 1);
    }
    for (i64 r = 0; r < queries; r++) memcpy(o + r * ldo, sum + r * values, values * sizeof(float));
}

#if PER == 1 && defined(__AVX2__)
#define TRANSPOSE8

/* to[i][row] = rows[row][i], 8 x 8, `STRIP` apart in `to`. */
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
        _mm256_storeu_ps((float *)to + k * STRIP, _mm256_permute2f128_ps(four[k], four[k + 4], 0x20));
        _mm256_storeu_ps((float *)to + (k + 4) * STRIP, _mm256_permute2f128_ps(four[k], four[k + 4], 0x31));
    }
}

#endif

/* to[unit][row] = the n values of each of `count` rows, `ldr` apart; there is room for STRIP rows. */
static void transpose(const bf16 *rows, i64 ldr, i64 count, i64 n, unit *to) {
    for (i64 t = 0; t < count; t++) {
        i64 i = 0;
#ifdef TRANSPOSE8
        if (t / 8 * 8 + 8 <= count) {
            for (; i + 8 <= n; i += 8)
                if (t % 8 == 0) transpose8(rows + t * ldr + i, ldr, to + i * STRIP + t);
        }
#endif
        for (; i < n; i += PER) to_units(rows + t * ldr + i, PER, to + i / PER * STRIP + t);
    }
}

/* Packs the keys and values of one head for `attend_block`, TOKENS keys after the other: K [TOKENS / STRIP][units of a
 * key][STRIP], V [values / STRIP][TOKENS / PER][STRIP]. kv [keys, .]: nope values of K, then `values` of V, rows `ldkv`
 * apart; rope [keys, rope_size], rows `ldr` apart. What lies beyond `keys` is 0. */
static void pack(const bf16 *kv, i64 ldkv, const bf16 *rope, i64 ldr, i64 keys, i64 nope, i64 rope_size, i64 values,
                 unit *to) {
    i64 units = (nope + rope_size) / PER;
    for (i64 start = 0; start < keys; start += TOKENS, to += TOKENS * (units + values / PER)) {
        i64 count = MIN(TOKENS, keys - start);
        const bf16 *row = kv + start * ldkv;
        unit *v = to + TOKENS * units;
        if (count < TOKENS) memset(to, 0, TOKENS * (units + values / PER) * sizeof *to);
        for (i64 t = 0; t < count; t += STRIP) {
            i64 some = MIN(STRIP, count - t);
            transpose(row + t * ldkv, ldkv, some, nope, to + t * units);
            transpose(rope + (start + t) * ldr, ldr, some, rope_size, to + t * units + nope / PER * STRIP);
        }
        for (i64 t = 0; t < count; t += PER)
            for (i64 i = 0; i < values; i += STRIP) {
                const bf16 *value_row = row + t * ldkv + nope + i;
                unit *at = v + i * (TOKENS / PER) + t / PER * STRIP;
#if PER == 2
                const bf16 *odd = t + 1 < count ? value_row + ldkv : NULL;
                for (i64 k = 0; k < STRIP; k++) at[k] = value_row[k] | (unit)(odd ? odd[k] : 0) << 16;
#else
                to_units(value_row, STRIP, at);
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
            i64 h = item / blocks, first = (blocks - 1 - item % blocks) * QUERIES, row = first * heads + h;
            attend_block(q + row * size, heads * size, MIN(QUERIES, queries - first), scratch + h * per_head, keys, size,
                         values, offset + first, scale, o + row * values, heads * values, maxima + row, sums + row,
                         heads);
        }
    }
}
