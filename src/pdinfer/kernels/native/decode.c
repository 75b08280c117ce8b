/* Latent attention of few queries per sequence, over pages, in the latent space. Called through `ops.py`, which checks
 * dtypes, shapes and strides; sizes here are numbers of elements. */

#include "decode_body.h"
#include "thread_scratch.h"

/* The weight of token t. */
INLINE float weight_at(const unit *weights, i64 t) {
    return PER == 2 ? from_bf16(((const bf16 *)weights)[t]) : ((const float *)weights)[t];
}

#ifdef HAVE_BF16

typedef bf16 value; /* of a query, as decode reads it */

INLINE void to_values(const bf16 *p, i64 n, value *to) { memcpy(to, p, n * sizeof *p); }

/* scores[h][t] = q[h] . token[t], to a multiple of 4 tokens: [heads, TOKENS]. 4 heads by 4 tokens are 16 sums of 32
 * registers, and each vector that is loaded is multiplied four times. Tokens outside and heads inside: four tokens are
 * read from memory once, by the first heads, and are near for the others. Lanes are parts of a row, so that rows need not
 * be transposed; the sums over lanes are taken for four tokens together. */
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
                if (!h)
                    for (int b = 0; b < 4; b++) __builtin_prefetch(token[t + b + PREFETCH_TOKENS] + i, 0, 2);
                for (int a = 0; a < 4; a++) {
                    __m512bh x = load32(qs[a] + i);
                    for (int b = 0; b < 4; b++) acc[a][b] = _mm512_dpbf16_ps(acc[a][b], x, c[b]);
                }
            }
            for (int a = 0; a < some; a++)
                _mm_storeu_ps(scores + (h + a) * TOKENS + t, sums4(acc[a]));
        }
}

/* o[h] += the first `rank` values of each token, weighed. 8 heads by 2 vectors are 16 sums, which stay in registers over
 * all tokens of the block; o is read and written once. A pair has to be one value of two tokens: unpacking makes these
 * pairs, in an order that LOW and HIGH put right in the sums. */
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
                    __m512bh weight = pair_in_all(*p);
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

typedef float value; /* of a query, as decode reads it: of 2 * LANES values the even ones, then the odd ones */

INLINE void to_values(const bf16 *p, i64 n, value *to) {
    for (i64 i = 0; i < n; i += 2 * LANES) {
        words pairs = load_pairs(p + i);
        store(to + i, even(pairs)), store(to + i + LANES, odd(pairs));
    }
}

/* Two vectors of sums, of the even values and of the odd ones, in the order of the values: the first half, the last. */
#if LANES == 16
#define FIRST_OF(a, b) MIX(ints, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LAST_OF(a, b) MIX(ints, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define FIRST_OF(a, b) MIX(ints, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define LAST_OF(a, b) MIX(ints, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

#define HEADS 6 /* at once: by 2 tokens or 2 vectors these are 12 sums of 16 registers */

/* scores[h][t] = q[h] . token[t] for `some` <= HEADS heads, to a multiple of 2 tokens. With `ask` the tokens that come
 * PREFETCH_TOKENS later are asked for. */
INLINE void score_heads(int some, const value *q, const bf16 *const *token, i64 count, int ask, i64 width, float *scores) {
    for (i64 t = 0; t < count; t += 2) {
        floats acc[HEADS][2];
        for (int a = 0; a < some; a++) acc[a][0] = acc[a][1] = all_of(0);
        for (i64 i = 0; i < width; i += 2 * LANES) {
            if (ask && i % 32 == 0)
                for (int b = 0; b < 2; b++) __builtin_prefetch(token[t + b + PREFETCH_TOKENS] + i, 0, 2);
            const bf16 *one = token[t] + i, *other = token[t + 1] + i;
            floats left = even(load_pairs(one)), right = even(load_pairs(other));
            for (int a = 0; a < some; a++) {
                floats x = load(q + a * width + i);
                acc[a][0] += x * left;
                acc[a][1] += x * right;
            }
            __asm__("" : "+r"(one), "+r"(other)); /* read again: there are too few registers to keep both */
            left = odd(load_pairs(one)), right = odd(load_pairs(other));
            for (int a = 0; a < some; a++) {
                floats x = load(q + a * width + i + LANES);
                acc[a][0] += x * left;
                acc[a][1] += x * right;
            }
        }
        for (int a = 0; a < some; a++)
            for (int b = 0; b < 2; b++) scores[a * TOKENS + t + b] = sum_of(acc[a][b]);
    }
}

/* o[h][0..2 * LANES) += those values of each token, weighed, for `some` <= HEADS heads. Even and odd values have sums of
 * their own over all tokens of the block, and are put in order once. */
INLINE void value_heads(int some, const unit *weights, const bf16 *const *token, i64 i, i64 count, i64 rank, float *o) {
    floats acc[HEADS][2];
    for (int a = 0; a < some; a++) acc[a][0] = acc[a][1] = all_of(0);
    for (i64 t = 0; t < count; t++) {
        words pairs = load_pairs(token[t] + i);
        floats left = even(pairs), right = odd(pairs);
        for (int a = 0; a < some; a++) {
            float weight = weight_at(weights + a * (TOKENS / PER), t);
            acc[a][0] += weight * left;
            acc[a][1] += weight * right;
        }
    }
    for (int a = 0; a < some; a++) {
        float *to = o + a * rank + i;
        store(to, load(to) + FIRST_OF(acc[a][0], acc[a][1]));
        store(to + LANES, load(to + LANES) + LAST_OF(acc[a][0], acc[a][1]));
    }
}

/* scores[h][t] = q[h] . token[t], to a multiple of 2 tokens: [heads, TOKENS]. */
INLINE void score_block(const value *q, const bf16 *const *token, i64 count, i64 heads, i64 width, float *scores) {
    for (i64 h = 0; h < heads; h += HEADS)
        WITH_CONSTANT(MIN(HEADS, heads - h), HEADS, score_heads, q + h * width, token, count, !h, width, scores + h * TOKENS)
}

/* o[h] += the first `rank` values of each token, weighed. */
INLINE void value_block(const unit *weights, const bf16 *const *token, i64 count, i64 heads, i64 rank, float *o) {
    for (i64 i = 0; i < rank; i += 2 * LANES)
        for (i64 h = 0; h < heads; h += HEADS)
            WITH_CONSTANT(MIN(HEADS, heads - h), HEADS, value_heads, weights + h * (TOKENS / PER), token, i, count, rank,
                          o + h * rank)
}

#endif

/* One block of absorbed attention: all heads of one query over `count` tokens, added to o, maxima and sums. Beyond `count`
 * up to TOKENS, token[t] is a row that may be read and weighs nothing. width and rank are multiples of 32. */
static void absorb_block(const value *q, const bf16 *const *token, i64 count, i64 heads, i64 width, i64 rank,
                         float scale, float *o, float *maxima, float *sums) {
    float scores[heads * TOKENS];
    unit weights[heads * TOKENS / PER];
    score_block(q, token, count, heads, width, scores);
    for (i64 h = 0; h < heads; h++) {
        floats s[VECTORS];
        weigh(scores + h * TOKENS, count, scale, s, o + h * rank, rank, maxima + h, sums + h);
        weights_to_units(s, weights + h * TOKENS / PER);
    }
    value_block(weights, token, count, heads, rank, o);
}

static i64 bytes_of_queries(const Decode *of) { return sizeof(value) * of->queries * of->heads * of->width; }

/* Blocks outside and queries inside: all queries read a block of tokens while it is in the cache, and sequences of drafts
 * cost memory once. */
static void absorb(const Decode *of, i64 b, i64 first, i64 last, void *memory, float *o, float *maxima, float *sums) {
    i64 queries = of->queries, heads = of->heads, width = of->width, rank = of->rank, rows = queries * heads;
    i64 seen = of->lens[b] - queries + 1; /* by the first query */
    value *q = memory;
    const bf16 *token[TOKENS + PREFETCH_TOKENS];
    for (i64 r = 0; r < rows; r++) {
        to_values(of->latent + (b * rows + r) * rank, rank, q + r * width);
        to_values(of->rope + (b * rows + r) * (width - rank), width - rank, q + r * width + rank);
    }
    memset(o, 0, sizeof(float) * rows * rank);
    for (i64 row = 0; row < rows; row++) maxima[row] = -INFINITY, sums[row] = 0;
    for (i64 start = first; start < last; start += TOKENS)
        for (i64 n = 0; n < queries; n++) {
            i64 stop = MIN(MIN(start + TOKENS, last), seen + n), row = n * heads;
            if (stop <= start) continue;
            for (i64 t = 0; t < TOKENS + PREFETCH_TOKENS; t++) { /* beyond the end: the last one again, with weight 0 */
                i64 at = MIN(start + t, (t < TOKENS ? stop : last) - 1);
                token[t] = token_of(of, b, at);
            }
            absorb_block(q + row * width, token, stop - start, heads, width, rank, of->scale, o + row * rank,
                         maxima + row, sums + row);
        }
}

static const Body by_vectors = {1, bytes_of_queries, absorb};

/* out[rank] = row r of the parts [first, last), each of which has `rows` rows and `room` of o. */
static void join(i64 first, i64 last, i64 r, i64 rows, i64 room_for, i64 rank, const float *o, float *maxima,
                 const float *sums, bf16 *out) {
    float top = -INFINITY, total = 0;
    for (i64 k = first; k < last; k++) top = fmaxf(top, maxima[k * rows + r]);
    for (i64 k = first; k < last; k++) {
        maxima[k * rows + r] = expf(maxima[k * rows + r] - top);
        total += sums[k * rows + r] * maxima[k * rows + r];
    }
    for (i64 i = 0; i < rank; i += LANES) {
        floats sum = {0};
        for (i64 k = first; k < last; k++) sum += maxima[k * rows + r] * load(o + (k * room_for + r) * rank + i);
        store_bf16(out + i, sum * (1.0f / total));
    }
}

#define FEWEST 128 /* tokens of a part: joining many short ones costs more than it gives */

/* How many tokens of a context one thread reads: an eighth, so that a single sequence occupies all threads. It follows
 * from the length alone, so that a sequence has the same sums in every batch and with any number of threads. */
INLINE i64 part_of(i64 len, i64 most) { return MIN(most, MAX(1, (len / 8 + FEWEST - 1) / FEWEST) * FEWEST); }

/* Absorbed attention -> out [batch, queries, heads, rank]. The bytes of memory that it could not have, or 0. Contexts are
 * cut into parts of at most `most` tokens. */
EXPORT i64 mla_decode(const bf16 *latent, const bf16 *rope, const bf16 *pages, const int32_t *table, i64 pages_per_row,
                      i64 page, const i64 *lens, i64 batch, i64 queries, i64 heads, i64 width, i64 rank, float scale,
                      i64 most, bf16 *out, int threads) {
    const Decode of = {latent, rope, pages, table, pages_per_row, page, lens, batch, queries, heads, width, rank, scale};
    const Body *tiles = decode_by_tiles_or_null(), *body = tiles ? tiles : &by_vectors;
    i64 rows = queries * heads, room_for = (rows + body->at_once - 1) / body->at_once * body->at_once;
    i64 parts = 0, *begins = malloc(sizeof(i64) * (batch + 1));
    if (!begins) return sizeof(i64) * (batch + 1);
    for (i64 b = 0; b < batch; b++) {
        begins[b] = parts;
        i64 part = part_of(lens[b], most);
        parts += (lens[b] + part - 1) / part;
    }
    begins[batch] = parts;
    i64 bytes;
    int fits = !__builtin_mul_overflow(parts, (i64)sizeof(float) * (room_for * rank + 2 * rows), &bytes);
    void *results;
    if (!fits || posix_memalign(&results, 64, bytes)) {
        free(begins);
        return fits ? bytes : INT64_MAX;
    }
    float *o = results, *maxima = o + parts * room_for * rank, *sums = maxima + parts * rows;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        void *memory = thread_scratch(SCRATCH_ROWS, body->bytes(&of));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < parts; item++) {
            if (!memory) continue;
            i64 b = 0;
            while (begins[b + 1] <= item) b++;
            i64 part = part_of(lens[b], most), first = (item - begins[b]) * part;
            body->absorb(&of, b, first, MIN(first + part, lens[b]), memory, o + item * room_for * rank,
                         maxima + item * rows, sums + item * rows);
        }
#pragma omp for schedule(static)
        for (i64 row = 0; row < batch * rows; row++)
            join(begins[row / rows], begins[row / rows + 1], row % rows, rows, room_for, rank, o, maxima, sums,
                 out + row * rank);
    }
    free(results);
    free(begins);
    return failed ? body->bytes(&of) : 0;
}
