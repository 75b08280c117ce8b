/* Products of few rows on CPUs with AVX-512 BF16, pair by pair: they should run at the speed at which weights are read. */

#include "few_rows.h"

#ifdef HAVE_BF16

#define OUTS 8 /* weight rows per block */
#define MOST 8 /* rows of x that pass over a block of weights at once */

/* y[m][0..8) = x[m] . w[0..8) for M rows of x. R rows of weights are read side by side, so that what is read of x serves
 * all of them; one is fastest where x stays in the first-level cache, since memory likes to be read in order. U sums
 * each, so that additions need not wait for each other. What lies `ahead` bytes behind the weights is fetched into the
 * second-level cache, of every `passes`-th group of rows (past the end of all weights that is harmless). */
#define SCAN(M, R, U)                                                                                                  \
    static void scan_##M##_##R(const bf16 *x, i64 ldx, const bf16 *w, i64 n, i64 ahead, i64 pass, i64 passes, bf16 *y, \
                               i64 ldy) {                                                                              \
        __m512 sums[M][OUTS];                                                                                          \
        for (int o = 0; o < OUTS; o += R, w += R * n) {                                                                \
            const char *next = (const char *)w + (o / R % passes == pass ? ahead : 0);                                 \
            __m512 acc[U][M][R];                                                                                       \
            for (int u = 0; u < U; u++)                                                                                \
                for (int m = 0; m < M; m++)                                                                            \
                    for (int r = 0; r < R; r++) acc[u][m][r] = _mm512_setzero_ps();                                    \
            i64 i = 0;                                                                                                 \
            for (; i + 32 * U <= n; i += 32 * U)                                                                       \
                for (int u = 0; u < U; u++) {                                                                          \
                    __m512bh ws[R];                                                                                    \
                    for (int r = 0; r < R; r++) {                                                                      \
                        _mm_prefetch(next + 2 * (R * (i + 32 * u) + 32 * r), _MM_HINT_T1);                             \
                        ws[r] = load32(w + r * n + i + 32 * u);                                                        \
                    }                                                                                                  \
                    for (int m = 0; m < M; m++) {                                                                      \
                        __m512bh xs = load32(x + m * ldx + i + 32 * u);                                                \
                        for (int r = 0; r < R; r++) acc[u][m][r] = _mm512_dpbf16_ps(acc[u][m][r], ws[r], xs);          \
                    }                                                                                                  \
                }                                                                                                      \
            for (; i < n; i += 32) {                                                                                   \
                __mmask32 some = n - i >= 32 ? ~0u : (1u << (n - i)) - 1;                                              \
                for (int r = 0; r < R; r++) {                                                                          \
                    __m512bh ws = (__m512bh)_mm512_maskz_loadu_epi16(some, w + r * n + i);                             \
                    for (int m = 0; m < M; m++)                                                                        \
                        acc[0][m][r] = _mm512_dpbf16_ps(                                                               \
                            acc[0][m][r], ws, (__m512bh)_mm512_maskz_loadu_epi16(some, x + m * ldx + i));              \
                }                                                                                                      \
            }                                                                                                          \
            for (int m = 0; m < M; m++)                                                                                \
                for (int r = 0; r < R; r++) {                                                                          \
                    sums[m][o + r] = acc[0][m][r];                                                                     \
                    for (int u = 1; u < U; u++) sums[m][o + r] = _mm512_add_ps(sums[m][o + r], acc[u][m][r]);          \
                }                                                                                                      \
        }                                                                                                              \
        for (int m = 0; m < M; m++)                                                                                    \
            _mm_storeu_si128((void *)(y + m * ldy), (__m128i)_mm256_cvtneps_pbh(_mm256_set_m128(sums4(sums[m] + 4),    \
                                                                                                sums4(sums[m]))));     \
    }
SCAN(1, 1, 2)
SCAN(2, 1, 2)
SCAN(3, 1, 2)
SCAN(4, 1, 2)
SCAN(5, 1, 2)
SCAN(6, 1, 1)
SCAN(3, 2, 1)
SCAN(4, 2, 1)
SCAN(5, 2, 1)
SCAN(6, 2, 1)
SCAN(7, 2, 1)
SCAN(8, 2, 1)

typedef void (*Scan)(const bf16 *, i64, const bf16 *, i64, i64, i64, i64, bf16 *, i64);
static const Scan near_x[] = {0, scan_1_1, scan_2_1, scan_3_1, scan_4_1, scan_5_1, scan_6_1, scan_7_2, scan_8_2};
static const Scan far_x[] = {0, scan_1_1, scan_2_1, scan_3_2, scan_4_2, scan_5_2, scan_6_2, scan_7_2, scan_8_2};

/* How far ahead weights
 * are fetched is how far memory is behind, which grows with the work per weight; with several passes each fetches its
 * share of the next block. Rows of x that lie a power of two apart would push each other out of the cache, so they are
 * copied a little further apart. */
i64 few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy) {
    i64 passes = (rows + MOST - 1) / MOST;
    i64 ahead = passes > 1 ? 2 * OUTS * n : rows == 1 ? 3072 : rows == 2 ? 6144 : 2048 * rows;
    const Scan *scans = passes > 1 || rows * n > 12288 ? far_x : near_x;
    bf16 *apart = rows > 2 && ldx % 256 == 0 ? malloc(2 * rows * (n + 32)) : NULL;
    if (apart) {
        for (i64 m = 0; m < rows; m++) memcpy(apart + m * (n + 32), x + m * ldx, 2 * n);
        x = apart, ldx = n + 32;
    }
    for (i64 o = first; o < last; o += OUTS)
        for (i64 pass = 0, m = 0; pass < passes; pass++) {
            i64 now = (rows - m) / (passes - pass);
            scans[now](x + m * ldx, ldx, w + o * n, n, ahead, pass, passes, y + m * ldy + o, ldy);
            m += now;
        }
    free(apart);
    return 0;
}

/* y[m][0..128) = sum over r of x[m][r] * w[r][0..128) for M <= 3 rows of x; n is even, rows of w are `ldw` apart. What lies
 * `ahead` bytes behind the weights is fetched. */
#define SUMS(M)                                                                                                        \
    static void sums_##M(const bf16 *x, i64 ldx, const bf16 *w, i64 ldw, i64 n, i64 ahead, bf16 *y, i64 ldy) {         \
        __m512 acc[M][WIDE / 16];                                                                                      \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int c = 0; c < WIDE / 16; c++) acc[m][c] = _mm512_setzero_ps();                                       \
        for (i64 r = 0; r < n; r += 2) {                                                                               \
            __m512bh xs[M];                                                                                            \
            for (int m = 0; m < M; m++) {                                                                              \
                uint32_t pair;                                                                                         \
                memcpy(&pair, x + m * ldx + r, sizeof pair);                                                           \
                xs[m] = pair_in_all(pair);                                                                             \
            }                                                                                                          \
            for (int c = 0; c < WIDE / 32; c++) {                                                                      \
                __m512i even = _mm512_loadu_si512(w + r * ldw + 32 * c);                                               \
                __m512i odd = _mm512_loadu_si512(w + (r + 1) * ldw + 32 * c);                                          \
                _mm_prefetch((const char *)(w + r * ldw + 32 * c) + ahead, _MM_HINT_T1);                               \
                _mm_prefetch((const char *)(w + (r + 1) * ldw + 32 * c) + ahead, _MM_HINT_T1);                         \
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(even, odd);                                              \
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(even, odd);                                              \
                for (int m = 0; m < M; m++) {                                                                          \
                    acc[m][2 * c] = _mm512_dpbf16_ps(acc[m][2 * c], xs[m], lo);                                        \
                    acc[m][2 * c + 1] = _mm512_dpbf16_ps(acc[m][2 * c + 1], xs[m], hi);                                \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (int m = 0; m < M; m++)                                                                                    \
            for (int c = 0; c < WIDE / 32; c++) {                                                                      \
                store16(y + m * ldy + 32 * c, _mm512_permutex2var_ps(acc[m][2 * c], LOW, acc[m][2 * c + 1]));          \
                store16(y + m * ldy + 32 * c + 16, _mm512_permutex2var_ps(acc[m][2 * c], HIGH, acc[m][2 * c + 1]));    \
            }                                                                                                          \
    }
SUMS(1)
SUMS(2)
SUMS(3)


i64 few_rows_transposed(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 ldw, i64 n, i64 next, bf16 *y, i64 ldy) {
    for (i64 m = 0; m < rows;) {
        i64 left = rows - m, now = left == 4 ? 2 : MIN(left, 3);
        i64 ahead = m ? 0 : 2 * next;
        if (now == 1) sums_1(x + m * ldx, ldx, w, ldw, n, ahead, y + m * ldy, ldy);
        else if (now == 2) sums_2(x + m * ldx, ldx, w, ldw, n, ahead, y + m * ldy, ldy);
        else sums_3(x + m * ldx, ldx, w, ldw, n, ahead, y + m * ldy, ldy);
        m += now;
    }
    return 0;
}

#endif
