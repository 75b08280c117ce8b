/* Gated MLPs of many rows, part by part, by any way to multiply. */

#include "parts.h"

/* Rows of one expert: as many as a panel of its hidden values may have. */
typedef struct {
    Input x;
    Matrix gate_up, down;
    bf16 *y;
    i64 rows;
    char *panels, *hidden;
} Part;

/* Gate and up lie 16 outs beside 16, so that one strip has what silu needs of both, and hidden values never are a matrix in
 * memory. They are rounded as a model in bf16 rounds them: the products, then what silu makes of them.
 * Strip s of gate and up, 16 outs of each -> these 16 inputs of the panels of hidden values. */
static void gated_strip(const Way *way, const Part *part, i64 s, bf16 *packed) {
    _Alignas(64) float c[MOST_AT_ONCE * STRIP];
    i64 inner = part->down.n, there = MIN(16, inner - 16 * s);
    way->multiply(part->panels, part->rows, &part->gate_up, s, strip_of(&part->gate_up, s, packed), c);
    for (i64 m = 0; m < part->rows; m++) {
        float *row = c + STRIP * m;
        for (int i = 0; i < 16; i += LANES) store(row + i, rounded(silu(rounded(load(row + i)), rounded(load(row + 16 + i)))));
        for (i64 i = MAX(0, there); i < 16; i++) row[i] = 0;
    }
    way->store_panel(c, STRIP, part->rows, inner, 16 * s, part->hidden);
}

/* Strip s of down, 32 outs -> these columns of y. */
static void down_strip(const Way *way, const Part *part, i64 s, bf16 *packed) {
    _Alignas(64) float c[MOST_AT_ONCE * STRIP];
    way->multiply(part->hidden, part->rows, &part->down, s, strip_of(&part->down, s, packed), c);
    store_strip(&part->down, s, c, part->rows, part->y, part->down.outs);
}

/* With many parts each thread takes one at a time, whose panels stay in its cache; where there are few, threads share the
 * strips of all, as some would have nothing to do. */
static i64 run_parts(const Way *way, Part *parts, i64 num_parts, int threads) {
    i64 width = parts->gate_up.n, inner = parts->down.n, lacking = 0;
    i64 of_x = panel_bytes(way, way->rows, width), all = of_x + panel_bytes(way, way->rows, inner);
    i64 ups = padded(inner) / 16, downs = num_strips(&parts->down);
    i64 of_strip = MAX(packed_bytes(&parts->gate_up), packed_bytes(&parts->down));
    int whole = threads == 1 || num_parts >= 4 * threads;
    char *shared = whole ? NULL : thread_scratch(SCRATCH_PARTS, all * num_parts);
    if (!whole && !shared) return all * num_parts;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(max : lacking)
    {
        bf16 *packed = of_strip ? thread_scratch(SCRATCH_STRIP, of_strip) : NULL;
        char *own = whole ? thread_scratch(SCRATCH_PARTS, all) : shared;
        int able = own && (packed || !of_strip);
        if (!able) lacking = own ? of_strip : all;
#pragma omp for schedule(dynamic)
        for (i64 p = 0; p < num_parts; p++) {
            if (!own) continue;
            Part *part = parts + p;
            part->panels = whole ? own : shared + all * p;
            part->hidden = part->panels + of_x;
            way->pack(&part->x, part->rows, width, part->panels);
            if (!whole || !able) continue; /* a thread without memory for strips still packs for the others */
            for (i64 s = 0; s < ups; s++) gated_strip(way, part, s, packed);
            if (way->finish) way->finish(part->rows, inner, part->hidden);
            for (i64 s = 0; s < downs; s++) down_strip(way, part, s, packed);
        }
        if (!whole) {
#pragma omp for schedule(dynamic)
            for (i64 item = 0; item < num_parts * ups; item++)
                if (able) gated_strip(way, parts + item / ups, item % ups, packed);
#pragma omp for schedule(dynamic)
            for (i64 p = 0; p < num_parts; p++)
                if (able && way->finish) way->finish(parts[p].rows, inner, parts[p].hidden);
#pragma omp for schedule(dynamic)
            for (i64 item = 0; item < num_parts * downs; item++)
                if (able) down_strip(way, parts + item / downs, item % downs, packed);
        }
    }
    return lacking;
}

/* To the matrix of the next expert. */
static void to_next(Matrix *w) {
    i64 bytes = w->step_bytes ? num_strips(w) * (w->n / 32) * w->step_bytes : (i64)sizeof(bf16) * w->outs * w->n;
    w->weights = (const bf16 *)((const char *)w->weights + bytes);
    if (w->scales) w->scales = (const char *)w->scales + w->scale_bytes;
}

i64 by_parts(const Way *way, Input x, const i64 *counts, i64 num_experts, Matrix gate_up, Matrix down, bf16 *y,
             int threads) {
    i64 num_parts = 0, width = gate_up.n;
    for (i64 e = 0; e < num_experts; e++) num_parts += (counts[e] + way->rows - 1) / way->rows;
    if (!num_parts) return 0;
    Part *parts = malloc(sizeof *parts * num_parts), *part = parts;
    if (!parts) return sizeof *parts * num_parts;
    for (i64 e = 0; e < num_experts; e++) {
        for (i64 left = counts[e]; left > 0; left -= part->rows, y += part->rows * width, part++) {
            *part = (Part){x, gate_up, down, y, MIN(way->rows, left), NULL, NULL};
            x = from_row(x, part->rows);
        }
        to_next(&gate_up);
        to_next(&down);
    }
    i64 lacking = run_parts(way, parts, num_parts, threads);
    free(parts);
    return lacking;
}
