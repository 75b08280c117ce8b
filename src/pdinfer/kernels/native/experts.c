/* Experts: gated MLPs of rows that are sorted by expert. */

#include "products.h"

#define FEW_OF_EACH 16 /* rows of an expert whose products wait for its weights */

/* Rows of one expert: as many as a panel of its hidden values may have. */
typedef struct {
    const bf16 *x, *gate_up, *down;
    bf16 *y;
    i64 rows;
} Part;

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

/* Strip s of an expert's gate and up, 16 outs of each -> these 16 inputs of the panels of its hidden values. */
static void gated_strip(const Many *way, const Part *part, const void *panels, i64 width, i64 inner, i64 s, bf16 *packed,
                        void *hidden) {
    _Alignas(64) float c[MOST_AT_ONCE * STRIP];
    const bf16 *gate = part->gate_up + 16 * s * width;
    i64 there = MAX(0, MIN(16, inner - 16 * s));
    Strip strip = {gate, gate + inner * width, there, there, width};
    way->times(panels, part->rows, width, &strip, packed, c);
    for (i64 m = 0; m < part->rows; m++) {
        float *row = c + STRIP * m;
        for (int i = 0; i < 16; i += LANES) store(row + i, rounded(silu(rounded(load(row + i)), rounded(load(row + 16 + i)))));
        for (i64 i = there; i < 16; i++) row[i] = 0;
    }
    way->put(c, STRIP, part->rows, inner, 16 * s, hidden);
}

/* Strip s of an expert's down, 32 outs -> these columns of y. */
static void down_strip(const Many *way, const Part *part, const void *hidden, i64 width, i64 inner, i64 s, bf16 *packed) {
    _Alignas(64) float c[MOST_AT_ONCE * STRIP];
    Strip strip = strip_of(part->down, width, inner, STRIP * s);
    way->times(hidden, part->rows, inner, &strip, packed, c);
    store_strip(c, part->rows, MIN(STRIP, width - STRIP * s), part->y + STRIP * s, width);
}

/* With many rows each thread takes an expert, or a part of its rows; where there are fewer parts than that all threads
 * share the strips of each. */
static i64 many_of_some(const Many *way, const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up,
                        const bf16 *down, i64 width, i64 inner, bf16 *y, int threads) {
    i64 num_parts = 0, row = 0, ups = padded(inner) / 16, downs = (width + STRIP - 1) / STRIP;
    for (i64 e = 0; e < num_experts; e++) num_parts += (counts[e] + way->rows - 1) / way->rows;
    Part *parts = malloc(sizeof *parts * num_parts), *part = parts;
    if (!parts) return sizeof *parts * num_parts;
    for (i64 e = 0; e < num_experts; e++)
        for (i64 done = 0; done < counts[e]; done += part[-1].rows, row += part[-1].rows)
            *part++ = (Part){x + row * width, gate_up + e * 2 * inner * width, down + e * width * inner, y + row * width,
                             MIN(way->rows, counts[e] - done)};
    i64 bytes = panel_bytes(way, way->rows, width), all = bytes + panel_bytes(way, way->rows, inner);
    i64 of_strip = sizeof(bf16) * STRIP * padded(MAX(width, inner)), lacking = 0;
    char *shared = room(2, all);
    int whole = threads == 1 || num_parts >= 4 * threads;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(max : lacking)
    {
        bf16 *packed = room(1, of_strip);
        char *panels = whole ? room(2, all) : shared, *hidden = panels + bytes;
        int able = packed && panels;
        if (!able) lacking = packed ? all : of_strip;
        if (whole) {
#pragma omp for schedule(dynamic)
            for (i64 p = 0; p < num_parts; p++) {
                if (!able) continue;
                way->pack(parts[p].x, width, parts[p].rows, width, panels);
                for (i64 s = 0; s < ups; s++) gated_strip(way, parts + p, panels, width, inner, s, packed, hidden);
                for (i64 s = 0; s < downs; s++) down_strip(way, parts + p, hidden, width, inner, s, packed);
            }
        } else {
            for (i64 p = 0; p < num_parts; p++) {
#pragma omp single
                if (able) way->pack(parts[p].x, width, parts[p].rows, width, panels);
#pragma omp for schedule(dynamic)
                for (i64 s = 0; s < ups; s++)
                    if (able) gated_strip(way, parts + p, panels, width, inner, s, packed, hidden);
#pragma omp for schedule(dynamic)
                for (i64 s = 0; s < downs; s++)
                    if (able) down_strip(way, parts + p, hidden, width, inner, s, packed);
            }
        }
    }
    free(parts);
    return lacking;
}

/* How experts of up to `most` rows are multiplied where they are many: NULL where few are served or none. */
static const Many *way_of(i64 most, i64 width, i64 inner) {
    if (most <= FEW_OF_EACH && width % 8 == 0 && inner % 8 == 0) return NULL;
    const Many *tiles = by_tiles_or_null();
#ifdef __AVX512BF16__
    return tiles;
#else
    return tiles ? tiles : &by_floats;
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
    const Many *way = way_of(most, width, inner);
    if (way) return many_of_some(way, x, counts, num_experts, gate_up, down, width, inner, y, threads);
    return few_of_each(x, counts, num_experts, gate_up, down, width, inner, hidden, y, threads);
}
