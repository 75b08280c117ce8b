/* Experts of bf16: gated MLPs of rows that are sorted by expert. */

#include "few_rows.h"
#include "parts.h"
#include "tiles.h"

#define FEW_OF_EACH 16 /* rows of an expert whose products wait for its weights */

/* With few rows an expert's products wait for its weights, so that all threads share each product. */
static i64 few_of_each(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down,
                       i64 width, i64 inner, bf16 *hidden, bf16 *y, int threads) {
    i64 rows = 0, starts[num_experts], active[num_experts], num_active = 0, lacking = 0;
    for (i64 e = 0; e < num_experts; e++) {
        starts[e] = rows;
        rows += counts[e];
        if (counts[e]) active[num_active++] = e;
    }
    bf16 *wide = hidden, *narrow = hidden + rows * 2 * inner;
    /* 128 outs at a time: enough to be read in order, and few enough that all threads end together. */
    i64 step = 128, ups = (2 * inner + step - 1) / step, downs = (width + step - 1) / step;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(max : lacking)
    {
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * ups; item++) {
            i64 e = active[item / ups], o = item % ups * step, first = starts[e];
            i64 lacks = few_rows(x + first * width, width, counts[e], gate_up + e * 2 * inner * width, width, o,
                                 MIN(o + step, 2 * inner), wide + first * 2 * inner, 2 * inner);
            lacking = MAX(lacking, lacks);
        }
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++)
            silu_times(wide + r * 2 * inner, wide + r * 2 * inner + inner, narrow + r * inner, inner);
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * downs; item++) {
            i64 e = active[item / downs], o = item % downs * step, first = starts[e];
            i64 lacks = few_rows(narrow + first * inner, inner, counts[e], down + e * width * inner, inner, o,
                                 MIN(o + step, width), y + first * width, width);
            lacking = MAX(lacking, lacks);
        }
    }
    return lacking;
}

/* How experts of up to `most` rows are multiplied where they are many: NULL where few are served or none. */
static const Way *way_of(i64 most, i64 width, i64 inner) {
    if (most <= FEW_OF_EACH && width % 8 == 0 && inner % 8 == 0) return NULL;
#ifdef HAVE_BF16
    return by_tiles_or_null();
#else
    return best_way();
#endif
}

/* Whether experts of at most so many rows are served here. With AVX-512 BF16 and no tiles torch's are good where rows are
 * many. */
EXPORT int experts_are_served(i64 most, i64 width, i64 inner) {
    return (most <= FEW_OF_EACH && width % 8 == 0 && inner % 8 == 0) || way_of(most, width, inner);
}

/* Gated MLPs of rows sorted by expert, counts[e] of each: y = down . (silu(gate . x) * (up . x)). `hidden` has room for
 * 3 * inner values per row. What `experts_are_served`. The bytes of memory that it could not have, or 0. */
EXPORT i64 experts(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down, i64 width,
                   i64 inner, bf16 *hidden, bf16 *y, int threads) {
    i64 most = 0;
    for (i64 e = 0; e < num_experts; e++) most = MAX(most, counts[e]);
    const Way *way = way_of(most, width, inner);
    if (!way) return few_of_each(x, counts, num_experts, gate_up, down, width, inner, hidden, y, threads);
    return by_parts(way, (Input){x, width}, counts, num_experts, (Matrix){gate_up, 2 * inner, width, 2, 0},
                    (Matrix){down, width, inner, 1, 0}, y, threads);
}

/* The same with weights that lie in strips, for any number of rows. */
EXPORT i64 experts_strips(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down,
                          i64 width, i64 inner, bf16 *y, int threads) {
    return by_parts(best_way(), (Input){x, width}, counts, num_experts, (Matrix){gate_up, 2 * inner, width, 2, STEP_BYTES},
                    (Matrix){down, width, inner, 1, STEP_BYTES}, y, threads);
}

/* Whether weights should lie in strips here. With AVX-512 BF16 and no tiles torch's products need them as they are. */
EXPORT int strips_are_served(void) { return way_of(INT64_MAX, STRIP, STRIP) != NULL; }
