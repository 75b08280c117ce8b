/* Latent attention over pages: many queries with expanded keys and values, few queries in the latent space. Called through
 * `ops.py`, which checks dtypes, shapes and strides; sizes here are numbers of elements. */

#include "vectors.h"

#define TOKENS 64 /* of a context, in one block */

/* One block of a running softmax: weights, as bf16 pairs, of `count` scores (of one block; those that are not there weigh
 * nothing), added to `sum`. When the maximum rises, `sum` and what was weighed before, o[n], shrink accordingly. A score
 * that is not finite makes `sum` NaN for good, whatever becomes of the maximum. */
INLINE void weigh(const float *scores, i64 count, float scale, uint32_t *pairs, float *o, i64 n, float *maximum,
                  float *sum) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 s[4], top = _mm512_set1_ps(-INFINITY), total = zero;
    for (int k = 0; k < 4; k++) {
        i64 left = count - 16 * k;
        __mmask16 there = left >= 16 ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0;
        s[k] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), there, _mm512_loadu_ps(scores + 16 * k),
                                  _mm512_set1_ps(scale));
        top = _mm512_max_ps(top, s[k]);
        total = _mm512_mask3_fmadd_ps(s[k], zero, total, there); /* 0 * score: 0, or NaN */
    }
    float before = *maximum, now = fmaxf(before, _mm512_reduce_max_ps(top));
    if (now == -INFINITY) { /* none of these is there and none was before, or they are not finite */
        memset(pairs, 0, TOKENS * sizeof(bf16));
        *sum += _mm512_reduce_add_ps(total);
        return;
    }
    for (int k = 0; k < 4; k++) {
        s[k] = exp16(_mm512_sub_ps(s[k], _mm512_set1_ps(now)));
        total = _mm512_add_ps(total, s[k]);
    }
    for (int k = 0; k < 4; k += 2)
        _mm512_storeu_si512(pairs + 8 * k, (__m512i)_mm512_cvtne2ps_pbh(s[k + 1], s[k]));
    if (now > before) {
        float shrink = expf(before - now);
        *sum *= shrink;
        *maximum = now;
        for (i64 i = 0; i < n; i += 16)
            _mm512_storeu_ps(o + i, _mm512_mul_ps(_mm512_loadu_ps(o + i), _mm512_set1_ps(shrink)));
    }
    *sum += _mm512_reduce_add_ps(total);
}

/* One block of absorbed attention: all heads of one query over `count` tokens, added to o, maxima and sums. Beyond `count`
 * up to TOKENS, token[t] is a row that may be read and weighs nothing. width and rank are multiples of 32. */
static void absorb_block(const bf16 *q, const bf16 *const *token, i64 count, i64 heads, i64 width, i64 rank, float scale,
                         float *o, float *maxima, float *sums) {
    float scores[heads * TOKENS];
    uint32_t pairs[heads * TOKENS / 2];
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
    for (i64 h = 0; h < heads; h++)
        weigh(scores + h * TOKENS, count, scale, pairs + h * TOKENS / 2, o + h * rank, rank, maxima + h, sums + h);
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
                    const uint32_t *p = pairs + (h + MIN(a, some - 1)) * (TOKENS / 2) + t / 2;
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

/* Absorbed attention of `queries` queries of one sequence over part of its context, tokens [first, last). Query i sees
 * those before `seen` + i. All queries read a block of tokens while it is in the cache.
 * q [queries, heads, width]: latent then rope. pages: token t lies at row table[t / page] * page + t % page, `width`
 * values. Leaves, unnormalised, o[queries, heads, rank] with its maximum and sum per query and head. */
static void absorb(const bf16 *q, const bf16 *pages, const int32_t *table, i64 page, i64 first, i64 last, i64 queries,
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
        bf16 *q = malloc(sizeof *q * rows * width);
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
                memcpy(q + r * width, latent + (b * rows + r) * rank, rank * sizeof *q);
                memcpy(q + r * width + rank, rope + (b * rows + r) * (width - rank), (width - rank) * sizeof *q);
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
            for (i64 i = 0; i < rank; i += 16) {
                __m512 sum = _mm512_setzero_ps();
                for (i64 k = begins[b]; k < begins[b + 1]; k++)
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(o + (k * rows + r) * rank + i),
                                          _mm512_set1_ps(maxima[k * rows + r]), sum);
                store16(out + row * rank + i, _mm512_mul_ps(sum, _mm512_set1_ps(1.0f / total)));
            }
        }
        free(q);
    }
    free(o);
    free(begins);
    return failed ? (i64)sizeof(bf16) * rows * width : 0;
}

#define ROWS 6     /* of a tile: 6 x 64 float32 sums are 24 of the 32 registers */
#define QUERIES 48 /* of a block */

/* c[6][64] (+)= a . b over `pairs` pairs: a[row][pair] with `lda` pairs between rows, b[pair][64]. */
INLINE void tile(const uint32_t *a, i64 lda, const uint32_t *b, i64 ldb, i64 pairs, float *c, i64 ldc, int add) {
    __m512 acc[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < 4; k++) acc[r][k] = add ? _mm512_loadu_ps(c + r * ldc + 16 * k) : _mm512_setzero_ps();
    for (i64 p = 0; p < pairs; p++) {
        __m512bh col[4];
        for (int k = 0; k < 4; k++) col[k] = (__m512bh)_mm512_loadu_si512(b + p * ldb + 16 * k);
        for (int r = 0; r < ROWS; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * lda + p]);
            for (int k = 0; k < 4; k++) acc[r][k] = _mm512_dpbf16_ps(acc[r][k], x, col[k]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < 4; k++) _mm512_storeu_ps(c + r * ldc + 16 * k, acc[r][k]);
}

/* Attention of `queries` rows of one head over `keys` keys of it, added to o, maxima and sums. Query i sees the keys up
 * to i + offset. q [queries, size] `ldq` apart; packed: per 64 keys, size/2 x 64 pairs of K, then 32 x values pairs of V. */
static void attend_block(const bf16 *q, i64 ldq, i64 queries, const uint32_t *packed, i64 keys, i64 size, i64 values,
                         i64 offset, float scale, float *o, i64 ldo, float *maxima, float *sums, i64 ldm) {
    _Alignas(64) uint32_t left[QUERIES * size / 2];
    _Alignas(64) float scores[QUERIES * TOKENS], sum[QUERIES * values];
    _Alignas(64) uint32_t weights[QUERIES * TOKENS / 2];
    i64 padded = (queries + ROWS - 1) / ROWS * ROWS, per_block = TOKENS * size / 2 + TOKENS / 2 * values;
    memset(left, 0, sizeof left);
    for (i64 r = 0; r < queries; r++) {
        memcpy(left + r * size / 2, q + r * ldq, size * sizeof(bf16));
        memcpy(sum + r * values, o + r * ldo, values * sizeof(float));
    }
    memset(sum + queries * values, 0, (QUERIES - queries) * values * sizeof(float));
    i64 seen = MIN(keys, offset + queries);
    for (i64 start = 0; start < seen; start += TOKENS, packed += per_block) {
        for (i64 r = 0; r < padded; r += ROWS)
            tile(left + r * size / 2, size / 2, packed, TOKENS, size / 2, scores + r * TOKENS, TOKENS, 0);
        for (i64 r = 0; r < queries; r++)
            weigh(scores + r * TOKENS, MIN(keys, offset + r + 1) - start, scale, weights + r * TOKENS / 2,
                  sum + r * values, values, maxima + r * ldm, sums + r * ldm);
        memset(weights + queries * TOKENS / 2, 0, (QUERIES - queries) * TOKENS * sizeof(bf16));
        const uint32_t *v = packed + TOKENS * size / 2;
        for (i64 i = 0; i < values; i += 64)
            for (i64 r = 0; r < padded; r += ROWS)
                tile(weights + r * TOKENS / 2, TOKENS / 2, v + i, values, TOKENS / 2, sum + r * values + i, values, 1);
    }
    for (i64 r = 0; r < queries; r++) memcpy(o + r * ldo, sum + r * values, values * sizeof(float));
}

/* Packs the keys and values of one head for `attend_block`. kv [keys, .]: nope values of K, then `values` of V, rows
 * `ldkv` apart; rope [keys, rope_size], rows `ldr` apart. What lies beyond `keys` is 0. */
static void pack(const bf16 *kv, i64 ldkv, const bf16 *rope, i64 ldr, i64 keys, i64 nope, i64 rope_size, i64 values,
                 uint32_t *to) {
    i64 size = nope + rope_size;
    for (i64 start = 0; start < keys; start += TOKENS, to += TOKENS * size / 2 + TOKENS / 2 * values) {
        i64 count = MIN(TOKENS, keys - start);
        uint32_t *v = to + TOKENS * size / 2;
        if (count < TOKENS) memset(to, 0, (TOKENS * size / 2 + TOKENS / 2 * values) * sizeof *to);
        for (i64 t = 0; t < count; t++) {
            const bf16 *row = kv + (start + t) * ldkv, *key = rope + (start + t) * ldr;
            for (i64 i = 0; i < nope / 2; i++) memcpy(to + i * TOKENS + t, row + 2 * i, 4);
            for (i64 i = 0; i < rope_size / 2; i++) memcpy(to + (nope / 2 + i) * TOKENS + t, key + 2 * i, 4);
        }
        for (i64 t = 0; t < count; t += 2) {
            const bf16 *even = kv + (start + t) * ldkv + nope, *odd = even + ldkv;
            uint32_t *row = v + t / 2 * values;
            if (t + 1 < count)
                for (i64 i = 0; i < values; i++) row[i] = even[i] | (uint32_t)odd[i] << 16;
            else
                for (i64 i = 0; i < values; i++) row[i] = even[i];
        }
    }
}

/* Adds to o [queries, heads, values] (float32, unnormalised, with maxima and sums [queries, heads]) the attention of
 * q [queries, heads, nope + rope] over `keys` keys: kv [keys, heads, nope + values], rope rows `ldr` apart. Query i sees
 * keys up to i + offset. scratch has room, per head, for ceil(keys / 64) * 32 * (nope + rope + values) pairs. nope and
 * rope are even, values is a multiple of 64. */
EXPORT void mla_prefill(const bf16 *q, const bf16 *kv, const bf16 *rope, i64 ldr, i64 queries, i64 keys, i64 heads,
                        i64 nope, i64 rope_size, i64 values, i64 offset, float scale, uint32_t *scratch, float *o,
                        float *maxima, float *sums, int threads) {
    i64 size = nope + rope_size, blocks = (queries + QUERIES - 1) / QUERIES;
    i64 per_head = (keys + TOKENS - 1) / TOKENS * (TOKENS * size / 2 + TOKENS / 2 * values);
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
