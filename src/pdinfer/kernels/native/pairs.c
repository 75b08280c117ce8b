/* Products of few rows on CPUs with AVX-512 BF16, pair by pair: they should run at the speed at which weights are read. */

#include "few_rows.h"

#ifdef HAVE_BF16

#define OUTS 8 /* weight rows per block: the lanes of 8 sums are added up together, and give one vector of results */
#define MOST 8 /* rows of x that pass over a block of weights at once: 8 x 2 sums, 2 weights and x fit into 32 registers */

/* y[m][0..OUTS) = x[m] . w[0..OUTS) for `rows` rows of x, of which `far` says that they do not fit into the first-level
 * cache. What lies `ahead` bytes behind the weights is fetched into the second-level cache, of every `passes`-th group of
 * rows (past the end of all weights that is harmless). */
INLINE void row_kernel_of(int rows, int far, const bf16 *x, i64 ldx, const bf16 *w, i64 n, i64 ahead, i64 pass, i64 passes,
                       bf16 *y, i64 ldy) {
    /* Rows of weights that are read side by side, so that what is read of x serves all of them. One is fastest where x is
     * near, since memory likes to be read in order; with 7 rows and more what is read of x, even near, takes longer. */
    const int outs = rows > (far ? 2 : 6) ? 2 : 1;
    /* Sums of each product: an instruction that adds to a sum waits several cycles for the one before, and with few rows
     * there are no others to begin meanwhile. From 6 sums on there are. */
    const int chains = rows > (far ? 2 : 5) ? 1 : 2;
    __m512 sums[MOST][OUTS];
    for (int o = 0; o < OUTS; o += outs, w += outs * n) {
        const char *next = (const char *)w + (o / outs % passes == pass ? ahead : 0);
        __m512 acc[2][MOST][2];
        for (int u = 0; u < chains; u++)
            for (int m = 0; m < rows; m++)
                for (int r = 0; r < outs; r++) acc[u][m][r] = _mm512_setzero_ps();
        i64 i = 0;
        for (; i + 32 * chains <= n; i += 32 * chains)
            for (int u = 0; u < chains; u++) {
                __m512bh ws[2];
                for (int r = 0; r < outs; r++) {
                    /* In the order of memory, whatever the order of reading: the next `outs` rows are one piece. */
                    _mm_prefetch(next + 2 * (outs * (i + 32 * u) + 32 * r), _MM_HINT_T1);
                    ws[r] = load32(w + r * n + i + 32 * u);
                }
                for (int m = 0; m < rows; m++) {
                    __m512bh xs = load32(x + m * ldx + i + 32 * u);
                    for (int r = 0; r < outs; r++) acc[u][m][r] = _mm512_dpbf16_ps(acc[u][m][r], ws[r], xs);
                }
            }
        /* The rest of a row. What a mask leaves out is not read, so that it may lie behind the end of memory. */
        for (; i < n; i += 32) {
            __mmask32 some = n - i >= 32 ? ~0u : (1u << (n - i)) - 1;
            for (int r = 0; r < outs; r++) {
                __m512bh ws = (__m512bh)_mm512_maskz_loadu_epi16(some, w + r * n + i);
                for (int m = 0; m < rows; m++)
                    acc[0][m][r] = _mm512_dpbf16_ps(
                        acc[0][m][r], ws, (__m512bh)_mm512_maskz_loadu_epi16(some, x + m * ldx + i));
            }
        }
        for (int m = 0; m < rows; m++)
            for (int r = 0; r < outs; r++)
                sums[m][o + r] = chains == 2 ? _mm512_add_ps(acc[0][m][r], acc[1][m][r]) : acc[0][m][r];
    }
    for (int m = 0; m < rows; m++)
        _mm_storeu_si128((void *)(y + m * ldy),
                         (__m128i)_mm256_cvtneps_pbh(_mm256_set_m128(sums4(sums[m] + 4), sums4(sums[m]))));
}

NOINLINE void row_kernel(int far, i64 rows, const bf16 *x, i64 ldx, const bf16 *w, i64 n, i64 ahead, i64 pass, i64 passes,
                        bf16 *y, i64 ldy) {
    if (far) WITH_CONSTANT(rows, MOST, row_kernel_of, 1, x, ldx, w, n, ahead, pass, passes, y, ldy)
    else WITH_CONSTANT(rows, MOST, row_kernel_of, 0, x, ldx, w, n, ahead, pass, passes, y, ldy)
}

i64 few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy) {
    i64 passes = (rows + MOST - 1) / MOST;
    /* Weights are fetched as far ahead as memory is behind, which grows with the work per weight. With several passes the
     * block is in the cache from the second on: each pass fetches its share of the next but one. */
    i64 ahead = passes > 1 ? 2 * OUTS * n : rows == 1 ? 3072 : rows == 2 ? 6144 : 2048 * rows;
    int far = passes > 1 || rows * n > 12288; /* 24 of the 32 KiB that a first-level cache has at least */
    /* Rows a power of two apart share a few sets of the cache and push each other out: they are copied a little further
     * apart. Without memory for that they stay where they are. */
    bf16 *apart = rows > 2 && ldx % 256 == 0 ? malloc(2 * rows * (n + 32)) : NULL;
    if (apart) {
        for (i64 m = 0; m < rows; m++) memcpy(apart + m * (n + 32), x + m * ldx, 2 * n);
        x = apart, ldx = n + 32;
    }
    /* Blocks outside and passes inside: a block comes from memory once. Passes take equal numbers of rows, since one of a
     * single row reads the block for an eighth of the work. */
    for (i64 o = first; o < last; o += OUTS)
        for (i64 pass = 0, m = 0; pass < passes; pass++) {
            i64 now = (rows - m) / (passes - pass);
            row_kernel(far, now, x + m * ldx, ldx, w + o * n, n, ahead, pass, passes, y + m * ldy + o, ldy);
            m += now;
        }
    free(apart);
    return 0;
}

/* y[m][0..WIDE) = sum over r of x[m][r] * w[r][0..WIDE) for `rows` <= 3 rows of x: 3 x 8 sums are 24 of 32 registers. n is
 * even, rows of w are `ldw` apart. What lies `ahead` bytes behind the weights is fetched. */
INLINE void column_kernel_of(int rows, const bf16 *x, i64 ldx, const bf16 *w, i64 ldw, i64 n, i64 ahead, bf16 *y, i64 ldy) {
    __m512 acc[3][WIDE / 16];
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < WIDE / 16; c++) acc[m][c] = _mm512_setzero_ps();
    for (i64 r = 0; r < n; r += 2) {
        __m512bh xs[3];
        for (int m = 0; m < rows; m++) {
            uint32_t pair;
            memcpy(&pair, x + m * ldx + r, sizeof pair);
            xs[m] = pair_in_all(pair);
        }
        for (int c = 0; c < WIDE / 32; c++) {
            /* A pair has to be two inputs of one column, which lie in two rows. Unpacking makes these pairs by halves of
             * lanes of 128 bits, in an order of columns that is put right once, in the sums. */
            __m512i even = _mm512_loadu_si512(w + r * ldw + 32 * c);
            __m512i odd = _mm512_loadu_si512(w + (r + 1) * ldw + 32 * c);
            _mm_prefetch((const char *)(w + r * ldw + 32 * c) + ahead, _MM_HINT_T1);
            _mm_prefetch((const char *)(w + (r + 1) * ldw + 32 * c) + ahead, _MM_HINT_T1);
            __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(even, odd);
            for (int m = 0; m < rows; m++) {
                acc[m][2 * c] = _mm512_dpbf16_ps(acc[m][2 * c], xs[m], lo);
                acc[m][2 * c + 1] = _mm512_dpbf16_ps(acc[m][2 * c + 1], xs[m], hi);
            }
        }
    }
    for (int m = 0; m < rows; m++)
        for (int c = 0; c < WIDE / 32; c++) {
            store_bf16(y + m * ldy + 32 * c, (floats)_mm512_permutex2var_ps(acc[m][2 * c], LOW, acc[m][2 * c + 1]));
            store_bf16(y + m * ldy + 32 * c + 16, (floats)_mm512_permutex2var_ps(acc[m][2 * c], HIGH, acc[m][2 * c + 1]));
        }
}

NOINLINE void column_kernel(i64 rows, const bf16 *x, i64 ldx, const bf16 *w, i64 ldw, i64 n, i64 ahead, bf16 *y, i64 ldy) {
    WITH_CONSTANT(rows, 3, column_kernel_of, x, ldx, w, ldw, n, ahead, y, ldy)
}

i64 few_rows_transposed(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy) {
    for (i64 m = 0, now; m < rows; m += now) {
        now = rows - m == 4 ? 2 : MIN(rows - m, 3); /* of 4 rows two and two take less time than three and one */
        column_kernel(now, x + m * ldx, ldx, w, ldw, n, m ? 0 : 2 * next, y + m * ldy, ldy);
    }
    return 0;
}

#endif
