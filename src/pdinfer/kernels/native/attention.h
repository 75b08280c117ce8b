/* What attention of few queries (decode.c, decode_tiles.c) and of many (prefill.c) share. */

#pragma once

#include "vectors.h"

#define TOKENS 64 /* of a context, in one block */

/* A unit is what a lane multiplies at a time: a pair of bf16 values where the CPU has vdpbf16ps, elsewhere one float.
 * PAIRS_IN_C is for tests: pairs, on any CPU. */
typedef uint32_t unit;

#if defined(HAVE_BF16) || defined(PAIRS_IN_C)
#define PER 2 /* values in a unit */
#else
#define PER 1
#endif

INLINE void to_floats(const bf16 *p, i64 n, float *to) {
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load_bf16(p + i));
    for (; i < n; i++) to[i] = from_bf16(p[i]);
}

#define VECTORS (TOKENS / LANES) /* of floats for a block */

/* The weights of a block, rounded to bf16. */
INLINE void weights_to_bf16(const floats *s, bf16 *to) {
#ifdef HAVE_BF16
    for (int k = 0; k < 4; k += 2)
        _mm512_storeu_si512(to + 16 * k, (__m512i)_mm512_cvtne2ps_pbh((__m512)s[k + 1], (__m512)s[k]));
#else
    for (int k = 0; k < VECTORS; k++) store_bf16(to + LANES * k, s[k]);
#endif
}

/* The weights of a block as units: rounded to bf16 where these are pairs. */
INLINE void weights_to_units(const floats *s, unit *to) {
#if PER == 2
    weights_to_bf16(s, (bf16 *)to);
#else
    for (int k = 0; k < VECTORS; k++) store((float *)to + LANES * k, s[k]);
#endif
}

/* One block of a running softmax: weights s[VECTORS] of `count` scores (of one block; those that are not there weigh
 * nothing), added to `sum`. When the maximum rises, `sum` and what was weighed before, o[n], shrink accordingly. A score
 * that is not finite makes `sum` NaN for good, whatever becomes of the maximum. */
INLINE void weigh(const float *scores, i64 count, float scale, floats *s, float *o, i64 n, float *maximum, float *sum) {
    const floats none = all_of(-INFINITY);
    floats top = none, total = {0};
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
        for (int k = 0; k < VECTORS; k++) s[k] = all_of(0);
        *sum += sum_of(total);
        return;
    }
    for (int k = 0; k < VECTORS; k++) {
        s[k] = exp_of(s[k] - now);
        total += s[k];
    }
    if (now > before) {
        float shrink = expf(before - now);
        *sum *= shrink;
        *maximum = now;
        for (i64 i = 0; i < n; i += LANES) store(o + i, shrink * load(o + i));
    }
    *sum += sum_of(total);
}
