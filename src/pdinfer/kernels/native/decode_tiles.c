/* Latent attention of few queries by tiles, on CPUs with AMX. A row is a head of a query; the rows of all queries of a
 * sequence stand one below the other, and 16 of them are a group. Tokens are multiplied by the queries of a group, and the
 * weights that come of it by the tokens. */

#include "amx.h"
#include "decode_body.h"

#ifdef HAVE_TILES

#include <immintrin.h>

#define GROUP 16 /* rows or tokens of a tile */
#define PAIRS (TOKENS / 2)

/* to[u][k] = unit u of rows[k]: of four rows of n units each, a multiple of 4; `ldt` units between those of `to`. */
INLINE void to_columns(const void *const *rows, i64 n, void *to, i64 ldt) {
    for (i64 u = 0; u < n; u += 4) {
        __m128 x[4];
        for (int k = 0; k < 4; k++) x[k] = _mm_loadu_ps((const float *)rows[k] + u);
        _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
        for (int k = 0; k < 4; k++) _mm_storeu_ps((float *)to + (u + k) * ldt, x[k]);
    }
}

/* The queries of sequence b as right tiles: [groups][width / 2 pairs][GROUP]. Rows that are not there repeat the last. */
static void pack_queries(const Decode *of, i64 b, uint32_t *to) {
    i64 rows = of->queries * of->heads, rank = of->rank, rope_size = of->width - rank;
    for (i64 r = 0; r < (rows + GROUP - 1) / GROUP * GROUP; r += 4) {
        const void *latent[4], *rope[4];
        for (i64 k = 0; k < 4; k++) {
            i64 row = b * rows + MIN(r + k, rows - 1);
            latent[k] = of->latent + row * rank, rope[k] = of->rope + row * rope_size;
        }
        uint32_t *at = to + r / GROUP * (of->width / 2 * GROUP) + r % GROUP;
        to_columns(latent, rank / 2, at, GROUP);
        to_columns(rope, rope_size / 2, at + rank / 2 * GROUP, GROUP);
    }
}

/* The first `rank` values of TOKENS tokens as right tiles: [rank / 16][PAIRS][16]. Tokens from `count` on become 0,
 * whatever they hold. Memory is read here, row by row, before tiles read columns of it; the next PREFETCH_TOKENS rows are
 * asked for. */
static void pack_values(const bf16 *const *token, i64 count, i64 width, i64 rank, uint32_t *to) {
    for (i64 t = 0; t < TOKENS; t += 2) {
        const __m128i first = _mm_set1_epi16(t < count ? -1 : 0), second = _mm_set1_epi16(t + 1 < count ? -1 : 0);
        const bf16 *one = token[t + PREFETCH_TOKENS], *other = token[t + 1 + PREFETCH_TOKENS];
        for (i64 i = rank; i < width; i += 32) __builtin_prefetch(one + i, 0, 2), __builtin_prefetch(other + i, 0, 2);
        for (i64 i = 0; i < rank; i += 8) {
            if (i % 32 == 0) __builtin_prefetch(one + i, 0, 2), __builtin_prefetch(other + i, 0, 2);
            __m128i a = _mm_and_si128(_mm_loadu_si128((const void *)(token[t] + i)), first);
            __m128i b = _mm_and_si128(_mm_loadu_si128((const void *)(token[t + 1] + i)), second);
            uint32_t *at = to + i / 16 * (PAIRS * 16) + t / 2 * 16 + i % 16;
            _mm_storeu_si128((void *)at, _mm_unpacklo_epi16(a, b));
            _mm_storeu_si128((void *)(at + 4), _mm_unpackhi_epi16(a, b));
        }
    }
}

/* A left tile of GROUP tokens: where they lie, if each lies behind the one before, or else a copy. */
INLINE const bf16 *in_a_row(const bf16 *const *token, i64 width, bf16 *copy) {
    int apart = 0;
    for (i64 t = 1; t < GROUP; t++) apart |= token[t] != token[0] + t * width;
    if (!apart) return token[0];
    for (i64 t = 0; t < GROUP; t++) memcpy(copy + t * width, token[t], sizeof(bf16) * width);
    return copy;
}

/* scores[TOKENS][GROUP] = tokens . queries of a group. Tokens are the left side, which takes rows as they lie in their
 * pages; the right side takes pairs of them by columns, and queries are packed so once for many tokens. Of the 8 tiles 4
 * have sums of 16 tokens each, so that each tile of queries is loaded once for 64; one of tokens has to be used twice. */
static void score_group(const bf16 *const *tokens, i64 width, const uint32_t *q, float *scores) {
    FENCE();
    ZERO(0);
    ZERO(1);
    ZERO(2);
    ZERO(3);
    for (i64 i = 0; i < width; i += 32, q += 16 * GROUP) {
        LOAD(4, q, 64);
        LOAD(5, tokens[0] + i, sizeof(bf16) * width);
        LOAD(6, tokens[1] + i, sizeof(bf16) * width);
        LOAD(7, tokens[2] + i, sizeof(bf16) * width);
        MULTIPLY(0, 5, 4);
        LOAD(5, tokens[3] + i, sizeof(bf16) * width);
        MULTIPLY(1, 6, 4);
        MULTIPLY(2, 7, 4);
        MULTIPLY(3, 5, 4);
    }
    STORE(0, scores, 64);
    STORE(1, scores + 16 * GROUP, 64);
    STORE(2, scores + 32 * GROUP, 64);
    STORE(3, scores + 48 * GROUP, 64);
    FENCE();
}

/* o[GROUP][rank] += weights[GROUP][TOKENS] . tokens, packed by `pack_values`. Both tiles of weights stay loaded, while
 * those of o come and go: there are more of them than tiles. */
static void add_group(const bf16 *weights, const uint32_t *values, i64 rank, float *o) {
    FENCE();
    LOAD(4, weights, sizeof(bf16) * TOKENS);
    LOAD(5, weights + 32, sizeof(bf16) * TOKENS);
    for (i64 i = 0; i < rank; i += 32, values += 32 * PAIRS) {
        LOAD(0, o + i, sizeof(float) * rank);
        LOAD(1, o + i + 16, sizeof(float) * rank);
        LOAD(6, values, 64);
        LOAD(7, values + 16 * PAIRS, 64);
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 4, 7);
        LOAD(6, values + 16 * 16, 64);
        LOAD(7, values + 16 * PAIRS + 16 * 16, 64);
        MULTIPLY(0, 5, 6);
        MULTIPLY(1, 5, 7);
        STORE(0, o + i, sizeof(float) * rank);
        STORE(1, o + i + 16, sizeof(float) * rank);
    }
    FENCE();
}

/* o[rank] += the tokens [first, last), weighed. A tile of rows would multiply those that a row does not see as well, by 0;
 * of tokens that only some queries see that is not enough, as they may hold NaN. */
INLINE void add_tokens(const bf16 *weights, const bf16 *const *token, i64 first, i64 last, i64 rank, float *o) {
    for (i64 t = first; t < last; t++)
        for (i64 i = 0; i < rank; i += LANES)
            store(o + i, load(o + i) + from_bf16(weights[t]) * load_bf16(token[t] + i));
}

static i64 groups_of(const Decode *of) { return (of->queries * of->heads + GROUP - 1) / GROUP; }

static i64 bytes_of_tiles(const Decode *of) {
    return sizeof(bf16) * (groups_of(of) * GROUP * of->width + TOKENS * (of->rank + of->width));
}

static void absorb(const Decode *of, i64 b, i64 first, i64 last, void *memory, float *o, float *maxima, float *sums) {
    i64 width = of->width, rank = of->rank, rows = of->queries * of->heads, groups = groups_of(of);
    i64 seen = of->lens[b] - of->queries + 1; /* by the first query, and so by all */
    uint32_t *q = memory, *values = q + groups * GROUP * width / 2;
    bf16 *copies = (bf16 *)(values + TOKENS * rank / 2);
    _Alignas(64) float by_token[TOKENS * GROUP], scores[GROUP * TOKENS];
    _Alignas(64) bf16 weights[GROUP * TOKENS] = {0};
    memset(o, 0, sizeof(float) * groups * GROUP * rank);
    for (i64 row = 0; row < rows; row++) maxima[row] = -INFINITY, sums[row] = 0;
    pack_queries(of, b, q);
    Palette before;
    begin(&before); /* once for all blocks */
    for (i64 start = first; start < last; start += TOKENS) {
        i64 stop = MIN(start + TOKENS, last), shared = MIN(stop, seen) - start;
        const bf16 *token[TOKENS + PREFETCH_TOKENS], *tokens[TOKENS / GROUP];
        for (i64 t = 0; t < TOKENS + PREFETCH_TOKENS; t++) token[t] = token_of(of, b, MIN(start + t, last - 1));
        pack_values(token, shared, width, rank, values);
        for (i64 t = 0; t < TOKENS; t += GROUP) tokens[t / GROUP] = in_a_row(token + t, width, copies + t * width);
        for (i64 g = 0; g < groups; g++) {
            score_group(tokens, width, q + g * GROUP * width / 2, by_token);
            /* The softmax wants the scores of a query side by side. They are a thirtieth of the latents, which would have
             * to be transposed instead. */
            for (i64 t = 0; t < TOKENS; t += 4) {
                const float *four = by_token + t * GROUP;
                to_columns((const void *[]){four, four + GROUP, four + 2 * GROUP, four + 3 * GROUP}, GROUP, scores + t,
                           TOKENS);
            }
            for (i64 r = 0; r < MIN(GROUP, rows - g * GROUP); r++) {
                i64 row = g * GROUP + r, visible = MIN(stop, seen + row / of->heads) - start;
                floats s[VECTORS];
                weigh(scores + r * TOKENS, visible, of->scale, s, o + row * rank, rank, maxima + row, sums + row);
                weights_to_bf16(s, weights + r * TOKENS);
                add_tokens(weights + r * TOKENS, token, MAX(0, shared), visible, rank, o + row * rank);
            }
            add_group(weights, values, rank, o + g * GROUP * rank);
        }
    }
    end(&before);
}

static const Body by_tiles = {GROUP, bytes_of_tiles, absorb};

#endif

static int found;

/* As `find_tiles`, for attention. */
EXPORT int find_decode_tiles(void) { return found = tiles_work(); }

const Body *decode_by_tiles_or_null(void) {
#ifdef HAVE_TILES
    return found ? &by_tiles : NULL;
#else
    return NULL;
#endif
}
