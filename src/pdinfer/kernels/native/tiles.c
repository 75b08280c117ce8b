/* Products of many rows on CPUs with AMX, or with TILES_IN_C on any: the instructions are then plain C, so that all that
 * surrounds them can be tested where there is no AMX. A tile is 16 rows of 64 bytes. */

#include "products.h"

#if defined(TILES_IN_C)
#define HAVE_TILES

typedef uint32_t Tile[16][16];
typedef Tile Palette[8]; /* the tiles themselves, which start as NaN: none is read before it is set */

static _Thread_local Palette tiles;

static void begin(Palette *before) { (void)before, memset(tiles, 0xFF, sizeof tiles); }
static void end(const Palette *before) { (void)before; }
static int allowed(void) { return 1; }

static void multiply(Tile c, const Tile a, const Tile b) {
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int o = 0; o < 16; o++) {
                float sum;
                memcpy(&sum, &c[m][o], sizeof sum);
                sum = fmaf(from_bf16(a[m][k]), from_bf16(b[k][o]), sum);
                sum = fmaf(from_bf16(a[m][k] >> 16), from_bf16(b[k][o] >> 16), sum);
                memcpy(&c[m][o], &sum, sizeof sum);
            }
}

#define ZERO(t) memset(tiles[t], 0, sizeof(Tile))
#define LOAD(t, from, bytes)                                                                                           \
    for (int row = 0; row < 16; row++) memcpy(tiles[t][row], (const char *)(from) + row * (bytes), 64)
#define STORE(t, to, bytes)                                                                                            \
    for (int row = 0; row < 16; row++) memcpy((char *)(to) + row * (bytes), tiles[t][row], 64)
#define MULTIPLY(c, a, b) multiply(tiles[c], tiles[a], tiles[b])
#define FENCE()

#elif defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HAVE_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint8_t bytes[64];
} Palette;

/* gcc's intrinsics say of a configuration that they touch its first 8 bytes: this makes all 64 be there. */
#define WHOLE(config) __asm__ volatile("" : : "r"(config) : "memory")

/* All tiles are 16 rows of 64 bytes. What was configured before is given back by `end`: oneDNN, which computes torch's
 * products, remembers per thread what it has configured and does not look again. */
static void begin(Palette *before) {
    Palette ours = {{1}};
    for (int t = 0; t < 8; t++) ours.bytes[16 + 2 * t] = 64, ours.bytes[48 + t] = 16;
    WHOLE(ours.bytes);
    WHOLE(before->bytes);
    _tile_storeconfig(before->bytes);
    _tile_loadconfig(ours.bytes);
}

static void end(const Palette *before) {
    WHOLE(before->bytes);
    if (before->bytes[0]) _tile_loadconfig(before->bytes);
    else _tile_release();
}

/* Asks the kernel for the tiles' state, which it gives to a process and all its threads, once. Without it the first
 * instruction would be a SIGILL, whatever the flags of the CPU say. */
static int allowed(void) {
    unsigned long given = 0;
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */)) return 0;
    return !syscall(SYS_arch_prctl, 0x1022 /* ARCH_GET_XCOMP_PERM */, &given) && given >> 18 & 1;
}

#define ZERO(t) _tile_zero(t)
#define LOAD(t, from, bytes) _tile_loadd(t, from, bytes)
#define STORE(t, to, bytes) _tile_stored(t, to, bytes)
#define MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)
#define FENCE() __asm__ volatile("" ::: "memory") /* gcc's _tile_loadd does not say that it reads memory */
#endif

#ifdef HAVE_TILES

#define TILE 512 /* values */
#define AT_ONCE 256

/* Panels are tiles: [rows / 16][n / 32][16 rows][32]. Rows and inputs that are not there are 0. */
INLINE bf16 *at_row(bf16 *panels, i64 m, i64 n) { return panels + m / 16 * 16 * padded(n) + m % 16 * 32; }

static void pack(const bf16 *x, i64 ldx, i64 rows, i64 n, void *to) {
    for (i64 m = 0; m < (rows + 15) / 16 * 16; m++)
        for (i64 k = 0; k < n; k += 32) {
            bf16 *row = at_row(to, m, n) + k * 16;
            i64 there = m < rows ? MIN(32, n - k) : 0;
            if (there) memcpy(row, x + m * ldx + k, sizeof(bf16) * there);
            memset(row + there, 0, sizeof(bf16) * (32 - there));
        }
}

static void put(const float *values, i64 ldv, i64 rows, i64 n, i64 first, void *to) {
    for (i64 m = 0; m < (rows + 15) / 16 * 16; m++) {
        bf16 *row = at_row(to, m, n) + first / 32 * TILE + first % 32;
        if (m < rows)
            for (int i = 0; i < 16; i += LANES) store_bf16(row + i, load(values + ldv * m + i));
        else
            memset(row, 0, sizeof(bf16) * 16);
    }
}

/* c[32][32], or with one tile of rows c[16][32], (+)= rows times some steps of a strip. Of each step the lines
 * [line, end) of what lies `ahead` are asked for: all at once they would hold up what is needed now. */
#define BLOCK(NAME, TWO)                                                                                               \
    static void NAME(const bf16 *a, const bf16 *strip, i64 steps, i64 n, i64 ahead, i64 line, i64 end, int add,        \
                     float *c) {                                                                                       \
        const bf16 *b = a + 16 * padded(n);                                                                            \
        (void)b;                                                                                                       \
        FENCE();                                                                                                       \
        if (add) {                                                                                                     \
            LOAD(0, c, 128);                                                                                           \
            LOAD(1, c + 16, 128);                                                                                      \
            if (TWO) { LOAD(2, c + 512, 128); }                                                                        \
            if (TWO) { LOAD(3, c + 528, 128); }                                                                        \
        } else {                                                                                                       \
            ZERO(0);                                                                                                   \
            ZERO(1);                                                                                                   \
            if (TWO) { ZERO(2); }                                                                                      \
            if (TWO) { ZERO(3); }                                                                                      \
        }                                                                                                              \
        for (i64 k = 0; k < steps; k++, strip += STEP, a += TILE, b += TILE) {                                         \
            LOAD(4, a, 64);                                                                                            \
            LOAD(6, strip, 64);                                                                                        \
            if (TWO) { LOAD(5, b, 64); }                                                                               \
            LOAD(7, strip + TILE, 64);                                                                                 \
            for (i64 l = line; l < end; l++) __builtin_prefetch(strip + ahead + 32 * l, 0, 2);                         \
            MULTIPLY(0, 4, 6);                                                                                         \
            if (TWO) { MULTIPLY(2, 5, 6); }                                                                            \
            MULTIPLY(1, 4, 7);                                                                                         \
            if (TWO) { MULTIPLY(3, 5, 7); }                                                                            \
        }                                                                                                              \
        STORE(0, c, 128);                                                                                              \
        STORE(1, c + 16, 128);                                                                                         \
        if (TWO) { STORE(2, c + 512, 128); }                                                                           \
        if (TWO) { STORE(3, c + 528, 128); }                                                                           \
        FENCE();                                                                                                       \
    }
BLOCK(two_blocks, 1)
BLOCK(one_block, 0)

#define LINES 32 /* cache lines of a step */

static void times(const void *panels, i64 rows, i64 n, const bf16 *strip, float *c) {
    Palette before;
    begin(&before);
    i64 passes = (rows + 31) / 32, ahead = passes > 1 ? DEEP * STEP : AHEAD;
    for (i64 k = 0; k < padded(n) / 32; k += DEEP, strip += DEEP * STEP)
        for (i64 pass = 0; pass < passes; pass++) {
            const bf16 *a = (const bf16 *)panels + pass * 32 * padded(n) + k * TILE;
            i64 steps = MIN(DEEP, padded(n) / 32 - k), line = LINES * pass / passes, end = LINES * (pass + 1) / passes;
            float *to = c + STRIP * 32 * pass;
            if (rows - pass * 32 > 16) two_blocks(a, strip, steps, n, ahead, line, end, k > 0, to);
            else one_block(a, strip, steps, n, ahead, line, end, k > 0, to);
        }
    end(&before);
}

static const Way by_tiles = {AT_ONCE, sizeof(bf16), pack, times, put};

/* Whether tiles may be used and give what floats give. */
static int work(void) {
    if (!allowed()) return 0;
    enum { ROWS = 17, INPUTS = 40 };
    bf16 x[ROWS * INPUTS], w[STRIP * INPUTS];
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = to_bf16((float)(i * 7 % 31 - 15) / 16);
    for (int i = 0; i < STRIP * INPUTS; i++) w[i] = to_bf16((float)(i * 11 % 29 - 14) / 16);
    _Alignas(64) bf16 panels[32 * 64], packed[STEP * 2];
    _Alignas(64) float c[32 * STRIP];
    Matrix of = {w, STRIP, INPUTS, 1, 0};
    by_tiles.pack(x, INPUTS, ROWS, INPUTS, panels);
    by_tiles.times(panels, ROWS, INPUTS, strip_of(&of, 0, packed), c);
    for (int m = 0; m < ROWS; m++)
        for (int o = 0; o < STRIP; o++) {
            float sum = 0; /* exact: multiples of 1/256 below 64 */
            for (int i = 0; i < INPUTS; i++) sum += from_bf16(x[m * INPUTS + i]) * from_bf16(w[o * INPUTS + i]);
            if (c[STRIP * m + o] != sum) return 0;
        }
    return 1;
}

#endif

static int tiles_work;

/* Finds out whether there are tiles; called once, before any product. */
EXPORT int find_tiles(void) {
#ifdef HAVE_TILES
    tiles_work = work();
#endif
    return tiles_work;
}

const Way *by_tiles_or_null(void) {
#ifdef HAVE_TILES
    return tiles_work ? &by_tiles : NULL;
#else
    return NULL;
#endif
}
