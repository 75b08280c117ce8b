/* Tiles of AMX, or with TILES_IN_C of plain C on any CPU, so that all that surrounds them can be tested where there is no
 * AMX. A tile is 16 rows of 64 bytes. A source that has them sees HAVE_TILES. */

#pragma once

#include "vectors.h"

#if defined(TILES_IN_C)
#define HAVE_TILES

typedef uint32_t Tile[16][16];
typedef Tile Palette[8]; /* the tiles themselves, which start as NaN: none is read before it is set */

static _Thread_local Palette tiles;

INLINE void begin(Palette *before) { (void)before, memset(tiles, 0xFF, sizeof tiles); }
INLINE void end(const Palette *before) { (void)before; }
INLINE int allowed(void) { return 1; }

static void multiply_tiles(Tile c, const Tile a, const Tile b) {
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
#define MULTIPLY(c, a, b) multiply_tiles(tiles[c], tiles[a], tiles[b])
#define FENCE()

#elif defined(HAVE_AMX)
#define HAVE_TILES

#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    uint8_t bytes[64];
} Palette;

/* gcc's intrinsics say of a configuration that they touch its first 8 bytes: this makes all 64 be there. */
#define WHOLE(config) __asm__ volatile("" : : "r"(config) : "memory")

/* All tiles are 16 rows of 64 bytes. What was configured before is given back by `end`: oneDNN, which computes torch's
 * products, remembers per thread what it has configured and does not look again. */
INLINE void begin(Palette *before) {
    Palette ours = {{1}};
    for (int t = 0; t < 8; t++) ours.bytes[16 + 2 * t] = 64, ours.bytes[48 + t] = 16;
    WHOLE(ours.bytes);
    WHOLE(before->bytes);
    _tile_storeconfig(before->bytes);
    _tile_loadconfig(ours.bytes);
}

INLINE void end(const Palette *before) {
    WHOLE(before->bytes);
    if (before->bytes[0]) _tile_loadconfig(before->bytes);
    else _tile_release();
}

/* Asks the kernel for the tiles' state, which it gives to a process and all its threads, once. Without it the first
 * instruction would be a SIGILL, whatever the flags of the CPU say. */
INLINE int allowed(void) {
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

/* Whether tiles may be used and give what floats give. */
INLINE int tiles_work(void) {
#ifdef HAVE_TILES
    if (!allowed()) return 0;
    _Alignas(64) bf16 a[16 * 32], b[16 * 32];
    _Alignas(64) float c[16 * 16];
    for (int i = 0; i < 16 * 32; i++) a[i] = to_bf16((float)(i * 7 % 31 - 15) / 16);
    for (int i = 0; i < 16 * 32; i++) b[i] = to_bf16((float)(i * 11 % 29 - 14) / 16);
    Palette before;
    begin(&before);
    FENCE();
    ZERO(0);
    LOAD(1, a, 64);
    LOAD(2, b, 64);
    MULTIPLY(0, 1, 2);
    STORE(0, c, 64);
    FENCE();
    end(&before);
    for (int m = 0; m < 16; m++)
        for (int o = 0; o < 16; o++) {
            float sum = 0; /* exact: multiples of 1/256 below 64 */
            for (int k = 0; k < 32; k++) sum += from_bf16(a[m * 32 + k]) * from_bf16(b[k / 2 * 32 + 2 * o + k % 2]);
            if (c[m * 16 + o] != sum) return 0;
        }
    return 1;
#else
    return 0;
#endif
}
