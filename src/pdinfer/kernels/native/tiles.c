/* Products of many rows on CPUs with AMX. */

#include "amx.h"
#include "tiles.h"

#ifdef HAVE_TILES

#define TILE 512 /* values */

/* Panels are tiles: [rows / 16][n / 32][16 rows][32]. Rows and inputs that are not there are 0. */
INLINE bf16 *at_row(bf16 *panels, i64 m, i64 n) { return panels + m / 16 * 16 * padded(n) + m % 16 * 32; }

static void pack(const Input *x, i64 rows, i64 n, void *to) {
    for (i64 m = 0; m < (rows + 15) / 16 * 16; m++)
        for (i64 k = 0; k < n; k += 32) {
            bf16 *row = at_row(to, m, n) + k * 16;
            i64 there = m < rows ? MIN(32, n - k) : 0;
            if (there) memcpy(row, (const bf16 *)x->values + m * x->ld + k, sizeof(bf16) * there);
            memset(row + there, 0, sizeof(bf16) * (32 - there));
        }
}

static void store_panel(const float *values, i64 ldv, i64 rows, i64 n, i64 first, void *to) {
    for (i64 m = 0; m < (rows + 15) / 16 * 16; m++) {
        bf16 *row = at_row(to, m, n) + first / 32 * TILE + first % 32;
        if (m < rows)
            for (int i = 0; i < 16; i += LANES) store_bf16(row + i, load(values + ldv * m + i));
        else
            memset(row, 0, sizeof(bf16) * 16);
    }
}

/* c[32][32] with `two` tiles of rows, else c[16][32], (+)= rows times some steps of a strip. Of the 8 tiles there are 4
 * have sums, so that each of the other 4, two of rows and two of weights, is multiplied twice once it is loaded. Of each
 * step the lines [line, end) of what lies `ahead` are asked for: all at once they would hold up what is needed now. */
INLINE void tile_kernel(const int two, const bf16 *a, const bf16 *strip, i64 steps, i64 n, i64 ahead, i64 line, i64 end,
                        int add, float *c) {
    const bf16 *b = a + 16 * padded(n);
    FENCE();
    if (add) {
        LOAD(0, c, 128);
        LOAD(1, c + 16, 128);
        if (two) { LOAD(2, c + 512, 128); }
        if (two) { LOAD(3, c + 528, 128); }
    } else {
        ZERO(0);
        ZERO(1);
        if (two) { ZERO(2); }
        if (two) { ZERO(3); }
    }
    for (i64 k = 0; k < steps; k++, strip += STEP, a += TILE, b += TILE) {
        LOAD(4, a, 64);
        LOAD(6, strip, 64);
        if (two) { LOAD(5, b, 64); }
        LOAD(7, strip + TILE, 64);
        for (i64 l = line; l < end; l++) __builtin_prefetch(strip + ahead + 32 * l, 0, 2);
        MULTIPLY(0, 4, 6);
        if (two) { MULTIPLY(2, 5, 6); }
        MULTIPLY(1, 4, 7);
        if (two) { MULTIPLY(3, 5, 7); }
    }
    STORE(0, c, 128);
    STORE(1, c + 16, 128);
    if (two) { STORE(2, c + 512, 128); }
    if (two) { STORE(3, c + 528, 128); }
    FENCE();
}

#define LINES 32 /* cache lines of a step */

static void multiply(const void *panels, i64 rows, const Matrix *w, i64 s, const bf16 *strip, float *c) {
    (void)s;
    i64 n = w->n;
    Palette before;
    begin(&before);
    /* All rows pass over DEEP steps before the next, which stay in the first-level cache. Meanwhile each pass asks for its
     * share of the steps after these; a single pass has no time to lose, and asks for what is near. */
    i64 passes = (rows + 31) / 32, ahead = passes > 1 ? DEEP * STEP : PREFETCH_BYTES / (i64)sizeof(bf16);
    for (i64 k = 0; k < padded(n) / 32; k += DEEP, strip += DEEP * STEP)
        for (i64 pass = 0; pass < passes; pass++) {
            const bf16 *a = (const bf16 *)panels + pass * 32 * padded(n) + k * TILE;
            i64 steps = MIN(DEEP, padded(n) / 32 - k), line = LINES * pass / passes, end = LINES * (pass + 1) / passes;
            float *to = c + STRIP * 32 * pass;
            if (rows - pass * 32 > 16) tile_kernel(1, a, strip, steps, n, ahead, line, end, k > 0, to);
            else tile_kernel(0, a, strip, steps, n, ahead, line, end, k > 0, to);
        }
    end(&before);
}

static const Way by_tiles = {MOST_AT_ONCE, sizeof(bf16), pack, multiply, store_panel, NULL};

#endif

static int found;

/* Finds out whether there are tiles; called once, before any product. */
EXPORT int find_tiles(void) { return found = tiles_work(); }

const Way *by_tiles_or_null(void) {
#ifdef HAVE_TILES
    return found ? &by_tiles : NULL;
#else
    return NULL;
#endif
}
