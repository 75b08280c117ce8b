/* A call of `mla_decode`, and the bodies that compute a part of it. */

#pragma once

#include "attention.h"

/* The queries of `batch` sequences, the last ones of their lens[b] >= `queries` tokens; each sees the tokens up to its own.
 * latent [batch, queries, heads, rank] and rope [batch, queries, heads, width - rank] are two parts of them; table has
 * `pages_per_row` page ids per sequence. width and rank are multiples of 32. */
typedef struct {
    const bf16 *latent, *rope, *pages;
    const int32_t *table;
    i64 pages_per_row, page;
    const i64 *lens;
    i64 batch, queries, heads, width, rank;
    float scale;
} Decode;

/* Tokens that are asked for before they are needed: as tokens, which the table finds, since a page may end after a few
 * bytes. Asking for what lies 4 KiB ahead in memory gave less than half of what this does. */
#define PREFETCH_TOKENS 8

/* Token t of sequence b: `width` values, latent then rope. */
INLINE const bf16 *token_of(const Decode *of, i64 b, i64 t) {
    return of->pages + (of->table[b * of->pages_per_row + t / of->page] * of->page + t % of->page) * of->width;
}

/* What computes the attention of all queries of sequence b over part of its context, the tokens [first, last). It leaves
 * o[queries, heads, rank], not divided by its sums, with a maximum and a sum per query and head. */
typedef struct {
    i64 at_once;                    /* heads of queries; o has room for a multiple of so many */
    i64 (*bytes)(const Decode *of); /* of memory that a thread needs */
    void (*absorb)(const Decode *of, i64 b, i64 first, i64 last, void *memory, float *o, float *maxima, float *sums);
} Body;

/* The body of AMX tiles, or NULL where there are none. */
const Body *decode_by_tiles_or_null(void);
