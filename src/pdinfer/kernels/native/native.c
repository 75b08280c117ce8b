/* The ops of a bfloat16 model that torch leaves far from what a CPU with AVX-512 BF16 can do: products of few rows, which
 * should run at the speed at which weights are read, and latent attention. Called through `native.py`, which checks
 * dtypes, shapes and strides; sizes here are numbers of elements. docs/decisions/ says why this is C.
 *
 * bf16 values are uint16_t. A "pair" is two neighbouring bf16 values in 32 bits, the unit of vdpbf16ps: one such
 * instruction adds, for 16 lanes, the two products of a pair of one operand and a pair of the other, in float32.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int64_t i64;

INLINE float from_bf16(bf16 x) {
    union { uint32_t u; float f; } v = {(uint32_t)x << 16};
    return v.f;
}

INLINE bf16 to_bf16(float x) { return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0); }

INLINE __m512bh load32(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512 load16(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

INLINE void store16(bf16 *p, __m512 x) { _mm256_storeu_si256((void *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

/* e^x for x <= 0, relative error below 2e-7: 2^n * p(f) with |f| <= 1/2, p a Taylor polynomial of 2^f. NaN stays NaN:
 * of two values that are not ordered vmaxps gives the second. */
INLINE __m512 exp16(__m512 x) {
    __m512 t = _mm512_max_ps(_mm512_set1_ps(-126.0f), _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
    __m512 n = _mm512_roundscale_ps(t, 0), f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.54035304e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.33335581e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __m512 y = _mm512_scalef_ps(p, n);
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ), _mm512_setzero_ps());
}

/* -- products of few rows ------------------------------------------------------------------------------------------ */

/* The sums over the lanes of four vectors. */
INLINE __m128 sums4(const __m512 *v) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512 all = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

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

/* y[m][o] = x[m] . w[o] for o in [first, last), a multiple of 8 apart. Weights come from memory once. How far ahead they
 * are fetched is how far memory is behind, which grows with the work per weight; with several passes each fetches its
 * share of the next block. Rows of x that lie a power of two apart would push each other out of the cache, so they are
 * copied a little further apart. */
static void few_rows(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 n, i64 first, i64 last, bf16 *y, i64 ldy) {
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
}

/* y[rows, outs] = x[rows, n] . w[outs, n]^T; outs a multiple of 8. */
EXPORT void linear(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 outs, i64 n, bf16 *y, int threads) {
    i64 step = threads > 1 ? 64 : outs;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 o = 0; o < outs; o += step) few_rows(x, ldx, rows, w, n, o, MIN(o + step, outs), y, outs);
}

/* The same in float32, for any number of outs: what routers are made of. */
EXPORT void linear_float(const float *x, i64 ldx, i64 rows, const float *w, i64 outs, i64 n, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 o = 0; o < outs; o++)
        for (i64 m = 0; m < rows; m++) {
            __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
            for (i64 i = 0; i < n; i += 64)
                for (int u = 0; u < 4; u++) {
                    i64 left = n - i - 16 * u;
                    __mmask16 some = left >= 16 ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0;
                    const float *at = w + o * n + i + 16 * u;
                    _mm_prefetch((const char *)at + 4096, _MM_HINT_T1);
                    acc[u] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, at),
                                             _mm512_maskz_loadu_ps(some, x + m * ldx + i + 16 * u), acc[u]);
                }
            y[m * outs + o] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]),
                                                                 _mm512_add_ps(acc[2], acc[3])));
        }
}

/* Lane order of two vectors of sums whose weights came from unpacklo and unpackhi: back to that of the 32 columns. */
#define LOW _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0)
#define HIGH _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8)
#define WIDE 128 /* columns read side by side */

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
                int pair;                                                                                              \
                memcpy(&pair, x + m * ldx + r, sizeof pair);                                                           \
                xs[m] = (__m512bh)_mm512_set1_epi32(pair);                                                             \
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

/* y[rows, heads, outs] = x[rows, heads, n] . w[heads, n, outs] per head; heads of x are `ldh` apart, its rows `ldx`, heads
 * of w `ldw`. outs is a multiple of 128, n even. */
EXPORT void heads_in(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 n, const bf16 *w, i64 ldw, i64 outs,
                     bf16 *y, int threads) {
    i64 chunks = outs / WIDE;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 item = 0; item < heads * chunks; item++) {
        i64 h = item / chunks, c = item % chunks * WIDE;
        for (i64 m = 0; m < rows;) {
            i64 left = rows - m, now = left == 4 ? 2 : MIN(left, 3);
            const bf16 *xs = x + m * ldx + h * ldh;
            bf16 *to = y + (m * heads + h) * outs + c;
            i64 ahead = m ? 0 : 2 * ldw; /* the same of the next head */
            if (now == 1) sums_1(xs, ldx, w + h * ldw + c, outs, n, ahead, to, heads * outs);
            else if (now == 2) sums_2(xs, ldx, w + h * ldw + c, outs, n, ahead, to, heads * outs);
            else sums_3(xs, ldx, w + h * ldw + c, outs, n, ahead, to, heads * outs);
            m += now;
        }
    }
}

/* y[rows, heads, outs] = x[rows, heads, n] . w[heads, outs, n]^T per head; strides as above, outs a multiple of 8. */
EXPORT void heads_out(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 n, const bf16 *w, i64 ldw, i64 outs,
                      bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 h = 0; h < heads; h++)
        few_rows(x + h * ldh, ldx, rows, w + h * ldw, n, 0, outs, y + h * outs, heads * outs);
}

INLINE void silu_times(const bf16 *gate, const bf16 *up, bf16 *y, i64 n) {
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    i64 i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 g = load16(gate + i), e = exp16(_mm512_sub_ps(zero, _mm512_abs_ps(g)));
        __m512 down = _mm512_add_ps(one, e);
        __mmask16 negative = _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ);
        __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, negative, e), down);
        store16(y + i, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid), load16(up + i)));
    }
    for (; i < n; i++) {
        float g = from_bf16(gate[i]), v = g / (1.0f + expf(-g)) * from_bf16(up[i]);
        y[i] = to_bf16(v);
    }
}

/* y[rows, n] = silu(x[:, :n]) * x[:, n:2n] */
EXPORT void gated_silu(const bf16 *x, i64 rows, i64 n, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 16)
    for (i64 r = 0; r < rows; r++) silu_times(x + 2 * n * r, x + 2 * n * r + n, y + n * r, n);
}

/* Gated MLPs of rows sorted by expert, counts[e] of each: y = down . (silu(gate . x) * (up . x)). `hidden` has room for
 * 3 * inner values per row. inner and width are multiples of 8. */
EXPORT void experts(const bf16 *x, const i64 *counts, i64 num_experts, const bf16 *gate_up, const bf16 *down, i64 width,
                    i64 inner, bf16 *hidden, bf16 *y, int threads) {
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

/* -- tokens and experts -------------------------------------------------------------------------------------------- */

/* Chooses k of `experts` per token, as `kernels.ops.Route` says. bias may be NULL. What is compared is never NaN in a
 * token whose weights are not: `lost` is 0, or NaN when a logit or a bias is not finite. */
EXPORT void route(const float *logits, const float *bias, i64 tokens, i64 experts, int sigmoid, i64 k, i64 groups,
                  i64 top_groups, int normalize, float factor, i64 *ids, float *weights, int threads) {
    i64 size = experts / groups;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 64)
    for (i64 t = 0; t < tokens; t++) {
        const float *in = logits + t * experts;
        double exact[experts], total = 0;
        float scores[experts], choice[experts], worth[groups];
        float top = -INFINITY, lost = 0;
        char taken[experts];
        for (i64 e = 0; e < experts; e++) {
            top = fmaxf(top, in[e]);
            lost += 0 * in[e] + (bias ? 0 * bias[e] : 0);
        }
        for (i64 e = 0; e < experts; e++) {
            exact[e] = sigmoid ? 1 / (1 + exp(-(double)in[e])) : exp((double)in[e] - top);
            total += exact[e];
        }
        for (i64 e = 0; e < experts; e++) {
            scores[e] = (float)(sigmoid ? exact[e] : exact[e] / total);
            choice[e] = bias ? scores[e] + bias[e] : scores[e];
        }
        if (groups > 1) {
            for (i64 g = 0; g < groups; g++) {
                float first = -INFINITY, second = -INFINITY;
                for (i64 e = g * size; e < (g + 1) * size; e++)
                    if (choice[e] > first) second = first, first = choice[e];
                    else if (choice[e] > second) second = choice[e];
                worth[g] = bias && size > 1 ? first + second : first;
            }
            for (i64 dropped = 0; dropped < groups - top_groups; dropped++) {
                i64 least = -1;
                for (i64 g = 0; g < groups; g++)
                    if (worth[g] < INFINITY && (least < 0 || worth[g] <= worth[least])) least = g;
                if (least < 0) break;
                worth[least] = INFINITY;
                for (i64 e = least * size; e < (least + 1) * size; e++) choice[e] = -INFINITY;
            }
        }
        float sum = 0;
        memset(taken, 0, sizeof taken);
        for (i64 n = 0; n < k; n++) {
            i64 best = -1;
            for (i64 e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
            taken[best] = 1;
            ids[t * k + n] = best;
            sum += scores[best];
        }
        for (i64 n = 0; n < k; n++)
            weights[t * k + n] = scores[ids[t * k + n]] / (normalize ? sum + 1e-20f : 1.0f) * factor + lost;
    }
}

/* Sorts the pairs (token, choice) by expert, keeping their order: counts[expert], the token of each row, and the row of
 * each pair. */
EXPORT void group_rows(const i64 *ids, i64 tokens, i64 k, i64 experts, i64 *counts, i64 *token_of_row, i64 *row) {
    i64 next[experts], sum = 0;
    memset(counts, 0, experts * sizeof *counts);
    memset(token_of_row, 0, tokens * k * sizeof *token_of_row);
    for (i64 n = 0; n < tokens * k; n++)
        if (ids[n] >= 0) counts[ids[n]]++;
    for (i64 e = 0; e < experts; e++) {
        next[e] = sum;
        sum += counts[e];
    }
    for (i64 n = 0; n < tokens * k; n++) {
        row[n] = ids[n] < 0 ? -1 : next[ids[n]]++;
        if (row[n] >= 0) token_of_row[row[n]] = n / k;
    }
}

/* out[token] = sum over its k choices of weight * y[row], in float32. A row of -1 adds nothing. */
EXPORT void combine_rows(const bf16 *y, const i64 *row, const float *weights, i64 tokens, i64 k, i64 width, float *out,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 16)
    for (i64 t = 0; t < tokens; t++) {
        i64 i = 0;
        for (; i + 16 <= width; i += 16) {
            __m512 sum = _mm512_setzero_ps();
            for (i64 n = t * k; n < (t + 1) * k; n++)
                if (row[n] >= 0) sum = _mm512_fmadd_ps(load16(y + row[n] * width + i), _mm512_set1_ps(weights[n]), sum);
            _mm512_storeu_ps(out + t * width + i, sum);
        }
        for (; i < width; i++) {
            float sum = 0;
            for (i64 n = t * k; n < (t + 1) * k; n++)
                if (row[n] >= 0) sum += from_bf16(y[row[n] * width + i]) * weights[n];
            out[t * width + i] = sum;
        }
    }
}

/* -- norms and rotations ------------------------------------------------------------------------------------------- */

/* y = w * x / sqrt(mean(x^2) + eps), rows of n values, ldx apart in x. */
EXPORT void rms_norm(const bf16 *x, i64 ldx, i64 rows, i64 n, const bf16 *w, float eps, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (i64 r = 0; r < rows; r++) {
        const bf16 *in = x + r * ldx;
        __m512 sum = _mm512_setzero_ps();
        i64 i = 0;
        for (; i + 16 <= n; i += 16) sum = _mm512_fmadd_ps(load16(in + i), load16(in + i), sum);
        float total = _mm512_reduce_add_ps(sum);
        for (; i < n; i++) total += from_bf16(in[i]) * from_bf16(in[i]);
        float scale = 1.0f / sqrtf(total / (float)n + eps) + 0 * total; /* NaN where the squares overflowed */
        for (i = 0; i + 16 <= n; i += 16)
            store16(y + r * n + i, _mm512_mul_ps(_mm512_mul_ps(load16(in + i), _mm512_set1_ps(scale)), load16(w + i)));
        for (; i < n; i++) {
            float v = from_bf16(in[i]) * scale * from_bf16(w[i]);
            y[r * n + i] = to_bf16(v);
        }
    }
}

/* Turns the pairs (2f, 2f + 1) of x [rows, heads, 2 * half] by the angles of their row: cos and sin [rows, half]. Rows
 * of x are `ldx` apart, heads `ldh`; y is dense. */
EXPORT void rotate(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 half, const float *cosines,
                   const float *sines, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++) {
            const bf16 *in = x + r * ldx + h * ldh;
            const float *c = cosines + r * half, *s = sines + r * half;
            bf16 *to = y + (r * heads + h) * 2 * half;
            for (i64 f = 0; f < half; f++) {
                float even = from_bf16(in[2 * f]), odd = from_bf16(in[2 * f + 1]);
                to[2 * f] = to_bf16(even * c[f] - odd * s[f]);
                to[2 * f + 1] = to_bf16(even * s[f] + odd * c[f]);
            }
        }
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

#define TOKENS 64 /* of a context, in one block */

/* One block of a running softmax: weights, as bf16 pairs, of `count` scores (of one block; those that are not there weigh
 * nothing), added to `sum`. When the maximum rises, `sum` and what was weighed before, o[n], shrink accordingly. A score
 * that is not finite makes `sum` NaN for good, whatever becomes of the maximum. */
INLINE void weigh(const float *scores, i64 count, float scale, uint32_t *pairs, float *o, i64 n, float *maximum,
                  float *sum) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 s[4], top = _mm512_set1_ps(-INFINITY), total = zero;
    for (int k = 0; k < 4; k++) {
        i64 left = count - 16 * k;
        __mmask16 there = left >= 16 ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0;
        s[k] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), there, _mm512_loadu_ps(scores + 16 * k),
                                  _mm512_set1_ps(scale));
        top = _mm512_max_ps(top, s[k]);
        total = _mm512_mask3_fmadd_ps(s[k], zero, total, there); /* 0 * score: 0, or NaN */
    }
    float before = *maximum, now = fmaxf(before, _mm512_reduce_max_ps(top));
    if (now == -INFINITY) { /* none of these is there and none was before, or they are not finite */
        memset(pairs, 0, TOKENS * sizeof(bf16));
        *sum += _mm512_reduce_add_ps(total);
        return;
    }
    for (int k = 0; k < 4; k++) {
        s[k] = exp16(_mm512_sub_ps(s[k], _mm512_set1_ps(now)));
        total = _mm512_add_ps(total, s[k]);
    }
    for (int k = 0; k < 4; k += 2)
        _mm512_storeu_si512(pairs + 8 * k, (__m512i)_mm512_cvtne2ps_pbh(s[k + 1], s[k]));
    if (now > before) {
        float shrink = expf(before - now);
        *sum *= shrink;
        *maximum = now;
        for (i64 i = 0; i < n; i += 16)
            _mm512_storeu_ps(o + i, _mm512_mul_ps(_mm512_loadu_ps(o + i), _mm512_set1_ps(shrink)));
    }
    *sum += _mm512_reduce_add_ps(total);
}

/* One block of absorbed attention: all heads of one query over `count` tokens, added to o, maxima and sums. Beyond `count`
 * up to TOKENS, token[t] is a row that may be read and weighs nothing. width and rank are multiples of 32. */
static void absorb_block(const bf16 *q, const bf16 *const *token, i64 count, i64 heads, i64 width, i64 rank, float scale,
                         float *o, float *maxima, float *sums) {
    float scores[heads * TOKENS];
    uint32_t pairs[heads * TOKENS / 2];
    for (i64 t = 0; t < count; t += 4)
        for (i64 h = 0; h < heads; h += 4) {
            __m512 acc[4][4];
            i64 some = MIN(4, heads - h);
            for (int a = 0; a < 4; a++)
                for (int b = 0; b < 4; b++) acc[a][b] = _mm512_setzero_ps();
            const bf16 *qs[4];
            for (int a = 0; a < 4; a++) qs[a] = q + (h + MIN(a, some - 1)) * width;
            for (i64 i = 0; i < width; i += 32) {
                __m512bh c[4];
                for (int b = 0; b < 4; b++) c[b] = load32(token[t + b] + i);
                for (int a = 0; a < 4; a++) {
                    __m512bh x = load32(qs[a] + i);
                    for (int b = 0; b < 4; b++) acc[a][b] = _mm512_dpbf16_ps(acc[a][b], x, c[b]);
                }
            }
            for (int a = 0; a < some; a++)
                _mm_storeu_ps(scores + (h + a) * TOKENS + t, sums4(acc[a]));
        }
    for (i64 h = 0; h < heads; h++)
        weigh(scores + h * TOKENS, count, scale, pairs + h * TOKENS / 2, o + h * rank, rank, maxima + h, sums + h);
    for (i64 h = 0; h < heads; h += 8) {
        i64 some = MIN(8, heads - h);
        for (i64 i = 0; i < rank; i += 32) {
            __m512 acc[8][2];
            for (int a = 0; a < 8; a++) acc[a][0] = acc[a][1] = _mm512_setzero_ps();
            for (i64 t = 0; t < count; t += 2) {
                __m512i even = _mm512_loadu_si512(token[t] + i), odd = _mm512_loadu_si512(token[t + 1] + i);
                __m512bh lo = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                __m512bh hi = (__m512bh)_mm512_unpackhi_epi16(even, odd);
                for (int a = 0; a < 8; a++) {
                    const uint32_t *p = pairs + (h + MIN(a, some - 1)) * (TOKENS / 2) + t / 2;
                    __m512bh weight = (__m512bh)_mm512_set1_epi32((int)*p);
                    acc[a][0] = _mm512_dpbf16_ps(acc[a][0], weight, lo);
                    acc[a][1] = _mm512_dpbf16_ps(acc[a][1], weight, hi);
                }
            }
            for (int a = 0; a < some; a++) {
                float *to = o + (h + a) * rank + i;
                __m512 left = _mm512_permutex2var_ps(acc[a][0], LOW, acc[a][1]);
                __m512 right = _mm512_permutex2var_ps(acc[a][0], HIGH, acc[a][1]);
                _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), left));
                _mm512_storeu_ps(to + 16, _mm512_add_ps(_mm512_loadu_ps(to + 16), right));
            }
        }
    }
}

/* Absorbed attention of `queries` queries of one sequence over part of its context, tokens [first, last). Query i sees
 * those before `seen` + i. All queries read a block of tokens while it is in the cache.
 * q [queries, heads, width]: latent then rope. pages: token t lies at row table[t / page] * page + t % page, `width`
 * values. Leaves, unnormalised, o[queries, heads, rank] with its maximum and sum per query and head. */
static void absorb(const bf16 *q, const bf16 *pages, const int32_t *table, i64 page, i64 first, i64 last, i64 queries,
                   i64 seen, i64 heads, i64 width, i64 rank, float scale, float *o, float *maxima, float *sums) {
    const bf16 *token[TOKENS];
    memset(o, 0, sizeof(float) * queries * heads * rank);
    for (i64 row = 0; row < queries * heads; row++) maxima[row] = -INFINITY, sums[row] = 0;
    for (i64 start = first; start < last; start += TOKENS)
        for (i64 n = 0; n < queries; n++) {
            i64 stop = MIN(MIN(start + TOKENS, last), seen + n), row = n * heads;
            if (stop <= start) continue;
            for (i64 t = 0; t < TOKENS; t++) { /* beyond the end: the last one again, with weight 0 */
                i64 at = MIN(start + t, stop - 1);
                token[t] = pages + (table[at / page] * page + at % page) * width;
            }
            absorb_block(q + row * width, token, stop - start, heads, width, rank, scale, o + row * rank, maxima + row,
                         sums + row);
        }
}

/* Absorbed attention of `queries` queries in each of `batch` sequences, the last ones of its lens[b] >= `queries` tokens;
 * each sees the tokens up to its own -> out [batch, queries, heads, rank]. The bytes of memory that it could not have, or 0.
 * latent [batch, queries, heads, rank] and rope [batch, queries, heads, width - rank] are their two parts; table has
 * `pages_per_row` page ids per sequence. Contexts are cut into parts of `part` tokens, so that few sequences still occupy
 * all threads. */
EXPORT i64 mla_decode(const bf16 *latent, const bf16 *rope, const bf16 *pages, const int32_t *table, i64 pages_per_row,
                      i64 page, const i64 *lens, i64 batch, i64 queries, i64 heads, i64 width, i64 rank, float scale,
                      i64 part, bf16 *out, int threads) {
    i64 rows = queries * heads, parts = 0, *begins = malloc(sizeof(i64) * (batch + 1));
    if (!begins) return sizeof(i64) * (batch + 1);
    for (i64 b = 0; b < batch; b++) {
        begins[b] = parts;
        parts += (lens[b] + part - 1) / part;
    }
    begins[batch] = parts;
    i64 bytes;
    int fits = !__builtin_mul_overflow(parts, (i64)sizeof(float) * rows * (rank + 2), &bytes);
    float *o = fits ? malloc(bytes) : NULL;
    if (!o) {
        free(begins);
        return fits ? bytes : INT64_MAX;
    }
    float *maxima = o + parts * rows * rank, *sums = maxima + parts * rows;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        bf16 *q = malloc(sizeof *q * rows * width);
        if (!q) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < parts; item++) {
            if (!q) continue;
            i64 b = 0;
            while (begins[b + 1] <= item) b++;
            i64 first = (item - begins[b]) * part;
            for (i64 r = 0; r < rows; r++) {
                memcpy(q + r * width, latent + (b * rows + r) * rank, rank * sizeof *q);
                memcpy(q + r * width + rank, rope + (b * rows + r) * (width - rank), (width - rank) * sizeof *q);
            }
            absorb(q, pages, table + b * pages_per_row, page, first, MIN(first + part, lens[b]), queries,
                   lens[b] - queries + 1, heads, width, rank, scale, o + item * rows * rank, maxima + item * rows,
                   sums + item * rows);
        }
#pragma omp for schedule(static)
        for (i64 row = 0; row < batch * rows; row++) {
            i64 b = row / rows, r = row % rows;
            float top = -INFINITY, total = 0;
            for (i64 k = begins[b]; k < begins[b + 1]; k++) top = fmaxf(top, maxima[k * rows + r]);
            for (i64 k = begins[b]; k < begins[b + 1]; k++) {
                maxima[k * rows + r] = expf(maxima[k * rows + r] - top);
                total += sums[k * rows + r] * maxima[k * rows + r];
            }
            for (i64 i = 0; i < rank; i += 16) {
                __m512 sum = _mm512_setzero_ps();
                for (i64 k = begins[b]; k < begins[b + 1]; k++)
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(o + (k * rows + r) * rank + i),
                                          _mm512_set1_ps(maxima[k * rows + r]), sum);
                store16(out + row * rank + i, _mm512_mul_ps(sum, _mm512_set1_ps(1.0f / total)));
            }
        }
        free(q);
    }
    free(o);
    free(begins);
    return failed ? (i64)sizeof(bf16) * rows * width : 0;
}

#define ROWS 6     /* of a tile: 6 x 64 float32 sums are 24 of the 32 registers */
#define QUERIES 48 /* of a block */

/* c[6][64] (+)= a . b over `pairs` pairs: a[row][pair] with `lda` pairs between rows, b[pair][64]. */
INLINE void tile(const uint32_t *a, i64 lda, const uint32_t *b, i64 ldb, i64 pairs, float *c, i64 ldc, int add) {
    __m512 acc[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < 4; k++) acc[r][k] = add ? _mm512_loadu_ps(c + r * ldc + 16 * k) : _mm512_setzero_ps();
    for (i64 p = 0; p < pairs; p++) {
        __m512bh col[4];
        for (int k = 0; k < 4; k++) col[k] = (__m512bh)_mm512_loadu_si512(b + p * ldb + 16 * k);
        for (int r = 0; r < ROWS; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * lda + p]);
            for (int k = 0; k < 4; k++) acc[r][k] = _mm512_dpbf16_ps(acc[r][k], x, col[k]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k < 4; k++) _mm512_storeu_ps(c + r * ldc + 16 * k, acc[r][k]);
}

/* Attention of `queries` rows of one head over `keys` keys of it, added to o, maxima and sums. Query i sees the keys up
 * to i + offset. q [queries, size] `ldq` apart; packed: per 64 keys, size/2 x 64 pairs of K, then 32 x values pairs of V. */
static void attend_block(const bf16 *q, i64 ldq, i64 queries, const uint32_t *packed, i64 keys, i64 size, i64 values,
                         i64 offset, float scale, float *o, i64 ldo, float *maxima, float *sums, i64 ldm) {
    _Alignas(64) uint32_t left[QUERIES * size / 2];
    _Alignas(64) float scores[QUERIES * TOKENS], sum[QUERIES * values];
    _Alignas(64) uint32_t weights[QUERIES * TOKENS / 2];
    i64 padded = (queries + ROWS - 1) / ROWS * ROWS, per_block = TOKENS * size / 2 + TOKENS / 2 * values;
    memset(left, 0, sizeof left);
    for (i64 r = 0; r < queries; r++) {
        memcpy(left + r * size / 2, q + r * ldq, size * sizeof(bf16));
        memcpy(sum + r * values, o + r * ldo, values * sizeof(float));
    }
    memset(sum + queries * values, 0, (QUERIES - queries) * values * sizeof(float));
    i64 seen = MIN(keys, offset + queries);
    for (i64 start = 0; start < seen; start += TOKENS, packed += per_block) {
        for (i64 r = 0; r < padded; r += ROWS)
            tile(left + r * size / 2, size / 2, packed, TOKENS, size / 2, scores + r * TOKENS, TOKENS, 0);
        for (i64 r = 0; r < queries; r++)
            weigh(scores + r * TOKENS, MIN(keys, offset + r + 1) - start, scale, weights + r * TOKENS / 2,
                  sum + r * values, values, maxima + r * ldm, sums + r * ldm);
        memset(weights + queries * TOKENS / 2, 0, (QUERIES - queries) * TOKENS * sizeof(bf16));
        const uint32_t *v = packed + TOKENS * size / 2;
        for (i64 i = 0; i < values; i += 64)
            for (i64 r = 0; r < padded; r += ROWS)
                tile(weights + r * TOKENS / 2, TOKENS / 2, v + i, values, TOKENS / 2, sum + r * values + i, values, 1);
    }
    for (i64 r = 0; r < queries; r++) memcpy(o + r * ldo, sum + r * values, values * sizeof(float));
}

/* Packs the keys and values of one head for `attend_block`. kv [keys, .]: nope values of K, then `values` of V, rows
 * `ldkv` apart; rope [keys, rope_size], rows `ldr` apart. What lies beyond `keys` is 0. */
static void pack(const bf16 *kv, i64 ldkv, const bf16 *rope, i64 ldr, i64 keys, i64 nope, i64 rope_size, i64 values,
                 uint32_t *to) {
    i64 size = nope + rope_size;
    for (i64 start = 0; start < keys; start += TOKENS, to += TOKENS * size / 2 + TOKENS / 2 * values) {
        i64 count = MIN(TOKENS, keys - start);
        uint32_t *v = to + TOKENS * size / 2;
        if (count < TOKENS) memset(to, 0, (TOKENS * size / 2 + TOKENS / 2 * values) * sizeof *to);
        for (i64 t = 0; t < count; t++) {
            const bf16 *row = kv + (start + t) * ldkv, *key = rope + (start + t) * ldr;
            for (i64 i = 0; i < nope / 2; i++) memcpy(to + i * TOKENS + t, row + 2 * i, 4);
            for (i64 i = 0; i < rope_size / 2; i++) memcpy(to + (nope / 2 + i) * TOKENS + t, key + 2 * i, 4);
        }
        for (i64 t = 0; t < count; t += 2) {
            const bf16 *even = kv + (start + t) * ldkv + nope, *odd = even + ldkv;
            uint32_t *row = v + t / 2 * values;
            if (t + 1 < count)
                for (i64 i = 0; i < values; i++) row[i] = even[i] | (uint32_t)odd[i] << 16;
            else
                for (i64 i = 0; i < values; i++) row[i] = even[i];
        }
    }
}

/* Adds to o [queries, heads, values] (float32, unnormalised, with maxima and sums [queries, heads]) the attention of
 * q [queries, heads, nope + rope] over `keys` keys: kv [keys, heads, nope + values], rope rows `ldr` apart. Query i sees
 * keys up to i + offset. scratch has room, per head, for ceil(keys / 64) * 32 * (nope + rope + values) pairs. nope and
 * rope are even, values is a multiple of 64. */
EXPORT void mla_prefill(const bf16 *q, const bf16 *kv, const bf16 *rope, i64 ldr, i64 queries, i64 keys, i64 heads,
                        i64 nope, i64 rope_size, i64 values, i64 offset, float scale, uint32_t *scratch, float *o,
                        float *maxima, float *sums, int threads) {
    i64 size = nope + rope_size, blocks = (queries + QUERIES - 1) / QUERIES;
    i64 per_head = (keys + TOKENS - 1) / TOKENS * (TOKENS * size / 2 + TOKENS / 2 * values);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (i64 h = 0; h < heads; h++)
            pack(kv + h * (nope + values), heads * (nope + values), rope, ldr, keys, nope, rope_size, values,
                 scratch + h * per_head);
#pragma omp for schedule(dynamic)
        for (i64 item = 0; item < heads * blocks; item++) {
            i64 h = item / blocks, first = (blocks - 1 - item % blocks) * QUERIES, row = first * heads + h;
            attend_block(q + row * size, heads * size, MIN(QUERIES, queries - first), scratch + h * per_head, keys, size,
                         values, offset + first, scale, o + row * values, heads * values, maxima + row, sums + row,
                         heads);
        }
    }
}
