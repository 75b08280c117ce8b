/* Experts: gated MLPs of rows that are sorted by expert. */

#include "products.h"

/* Rows of one expert: as many as a panel of its hidden values may have. */
typedef struct {
    const bf16 *x, *gate_up, *down;
    bf16 *y;
    i64 rows;
} Part;

/* With few rows an expert's products wait for its weights, so that all threads share each product. */
static void few_of_each(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down,
                        i64 width, i64 inner, bf16 *hidden, bf16 *y, int threads) {
    i64 rows = 0, starts[num_experts], active[num_experts], num_active = 0;
    for (i64 e = 0; e < num_experts; e++) {
        starts[e] = rows;
        rows += counts[e];
        if (counts[e]) active[num_active++] = e;
    }
    bf16 *wide = hidden, *narrow = hidden + rows * 2 * inner;
    i64 step = 128, ups = (2 * inner + step - 1) / step, downs = (width + step - 1) / step;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * ups; item++) {
            i64 e = active[item / ups], o = item % ups * step, first = starts[e];
            few_rows(x + first * width, width, counts[e], gate_up + e * 2 * inner * width, width, o,
                     MIN(o + step, 2 * inner), wide + first * 2 * inner, 2 * inner);
        }
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++)
            silu_times(wide + r * 2 * inner, wide + r * 2 * inner + inner, narrow + r * inner, inner);
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < num_active * downs; item++) {
            i64 e = active[item / downs], o = item % downs * step, first = starts[e];
            few_rows(narrow + first * inner, inner, counts[e], down + e * width * inner, inner, o,
                     MIN(o + step, width), y + first * width, width);
        }
    }
}

/* Strip s of an expert's gate and up, 16 outs of each -> these 16 inputs of the panels of its hidden values. */
static void gated_strip(const Part *part, const float *panels, i64 width, i64 inner, i64 s, float *hidden) {
    bf16 *strip = room(1, sizeof(bf16) * STRIP * padded(MAX(width, inner)));
    float c[CHUNK * STRIP];
    i64 there = MIN(16, inner - 16 * s);
    const bf16 *gate = part->gate_up + 16 * s * width;
    pack_strip(gate, there, gate + inner * width, there, width, strip);
    times_strip(panels, part->rows, width, strip, c);
    for (i64 first = 0, count; first < part->rows; first += count) {
        count = panel_of(part->rows - first);
        float *to = hidden + first * padded(inner) + 16 * s * count;
        for (i64 m = 0; m < count; m++) {
            const float *row = c + STRIP * (first + m);
            float h[16];
            for (int i = 0; i < 16; i += LANES)
                store(h + i, rounded(silu(rounded(load(row + i)), rounded(load(row + 16 + i)))));
            for (i64 i = 0; i < 16; i++) to[i * count + m] = i < there ? h[i] : 0;
        }
    }
}

/* Strip s of an expert's down, 32 outs -> these columns of y. */
static void down_strip(const Part *part, const float *hidden, i64 width, i64 inner, i64 s) {
    bf16 *strip = room(1, sizeof(bf16) * STRIP * padded(MAX(width, inner)));
    float c[CHUNK * STRIP];
    i64 there = MIN(STRIP, width - STRIP * s), high = MAX(0, there - 16);
    const bf16 *down = part->down + STRIP * s * inner;
    pack_strip(down, there - high, down + 16 * inner, high, inner, strip);
    times_strip(hidden, part->rows, inner, strip, c);
    store_strip(c, part->rows, there, part->y + STRIP * s, width);
}

/* Zeroes the inputs of panels of hidden values that no strip of 16 writes. */
static void no_more(float *hidden, i64 rows, i64 inner) {
    i64 written = (inner + 15) / 16 * 16;
    for (i64 first = 0, count; first < rows; first += count) {
        count = panel_of(rows - first);
        memset(hidden + first * padded(inner) + written * count, 0, sizeof(float) * (padded(inner) - written) * count);
    }
}

/* With many rows each thread takes an expert, or a part of its rows; where there are fewer parts than that all threads
 * share the strips of each. */
static void many_of_some(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down,
                         i64 width, i64 inner, bf16 *y, int threads) {
    i64 num_parts = 0, row = 0, ups = (inner + 15) / 16, downs = (width + STRIP - 1) / STRIP;
    for (i64 e = 0; e < num_experts; e++) num_parts += (counts[e] + CHUNK - 1) / CHUNK;
    Part *parts = malloc(sizeof *parts * num_parts), *part = parts;
    if (!parts) abort();
    for (i64 e = 0; e < num_experts; e++)
        for (i64 done = 0; done < counts[e]; done += part[-1].rows, row += part[-1].rows)
            *part++ = (Part){x + row * width, gate_up + e * 2 * inner * width, down + e * width * inner, y + row * width,
                             MIN(CHUNK, counts[e] - done)};
    i64 floats_of_panels = CHUNK * padded(width), floats_of_hidden = CHUNK * padded(inner);
    float *shared = room(2, sizeof(float) * (floats_of_panels + floats_of_hidden));
    int whole = threads == 1 || num_parts >= 4 * threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    if (whole) {
        float *panels = room(2, sizeof(float) * (floats_of_panels + floats_of_hidden)), *hidden = panels + floats_of_panels;
#pragma omp for schedule(dynamic)
        for (i64 p = 0; p < num_parts; p++) {
            pack_panels(parts[p].x, width, parts[p].rows, width, panels);
            no_more(hidden, parts[p].rows, inner);
            for (i64 s = 0; s < ups; s++) gated_strip(parts + p, panels, width, inner, s, hidden);
            for (i64 s = 0; s < downs; s++) down_strip(parts + p, hidden, width, inner, s);
        }
    } else {
        for (i64 p = 0; p < num_parts; p++) {
#pragma omp single
            {
                pack_panels(parts[p].x, width, parts[p].rows, width, shared);
                no_more(shared + floats_of_panels, parts[p].rows, inner);
            }
#pragma omp for schedule(dynamic)
            for (i64 s = 0; s < ups; s++) gated_strip(parts + p, shared, width, inner, s, shared + floats_of_panels);
#pragma omp for schedule(dynamic)
            for (i64 s = 0; s < downs; s++) down_strip(parts + p, shared + floats_of_panels, width, inner, s);
        }
    }
    free(parts);
}

/* Gated MLPs of rows sorted by expert, counts[e] of each: y = down . (silu(gate . x) * (up . x)). `hidden` has room for
 * 3 * inner values per row. Both products are such that they are served. */
EXPORT void experts(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down, i64 width,
                    i64 inner, bf16 *hidden, bf16 *y, int threads) {
    i64 most = 0;
    for (i64 e = 0; e < num_experts; e++) most = MAX(most, counts[e]);
    if (most > FEW_ROWS || width % 8 || inner % 8)
        many_of_some(x, counts, num_experts, gate_up, down, width, inner, y, threads);
    else
        few_of_each(x, counts, num_experts, gate_up, down, width, inner, hidden, y, threads);
}
