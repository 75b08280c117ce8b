/* The ops of a bfloat16 model that torch leaves far from what a CPU with AVX-512 BF16 can do: products of few rows, which
 * should run at the speed at which weights are read, and what lies between them. Called through `ops.py`, which checks
 * dtypes, shapes and strides; sizes here are numbers of elements. docs/decisions/ says why this is C. */

#include "vectors.h"

/* -- products of few rows ------------------------------------------------------------------------------------------ */

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
