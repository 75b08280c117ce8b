/* What lies between products: routing, sorting rows by expert, norms, rotations, activations. Called through `ops.py`,
 * which checks dtypes, shapes and strides; sizes here are numbers of elements. */

#include "vectors.h"

/* y[rows, n] = silu(x[:, :n]) * x[:, n:2n] */
EXPORT void gated_silu(const bf16 *x, i64 rows, i64 n, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 16)
    for (i64 r = 0; r < rows; r++) silu_times(x + 2 * n * r, x + 2 * n * r + n, y + n * r, n);
}

/* -- tokens and experts -------------------------------------------------------------------------------------------- */

#define PREFETCH_BYTES 4096 /* from the router's weights that are read to those that are asked for */

/* logits[rows, experts] = x[rows, n] . w[experts, n]^T, in float32. Rows of x are `ldx` apart. */
static void score(const bf16 *x, i64 ldx, i64 rows, const float *w, i64 experts, i64 n, float *logits, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (i64 e = 0; e < experts; e++)
        for (i64 m = 0; m < rows; m++) {
            const float *a = w + e * n;
            const bf16 *b = x + m * ldx;
            floats acc[4] = {{0}}; /* four, so that no addition waits for the one before */
            i64 i = 0;
            for (; i + 4 * LANES <= n; i += 4 * LANES)
                for (int u = 0; u < 4; u++) {
                    __builtin_prefetch((const char *)(a + i + LANES * u) + PREFETCH_BYTES, 0, 2);
                    acc[u] += load(a + i + LANES * u) * load_bf16(b + i + LANES * u);
                }
            float sum = sum_of((acc[0] + acc[1]) + (acc[2] + acc[3]));
            for (; i < n; i++) sum += a[i] * from_bf16(b[i]);
            logits[m * experts + e] = sum;
        }
}

/* Chooses k of `experts` per token, as `Ops.route` says. bias may be NULL. What is compared is never NaN in a
 * token whose weights are not: `lost` is 0, or NaN when a logit or a bias is not finite. */
EXPORT void route(const float *logits, const float *bias, i64 tokens, i64 experts, int sigmoid, i64 k, i64 groups,
                  i64 top_groups, int normalize, float factor, i64 *ids, float *weights, int threads) {
    i64 size = experts / groups;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 64)
    for (i64 t = 0; t < tokens; t++) {
        const float *in = logits + t * experts;
        double exact[experts], total = 0; /* rounded once, so that every device chooses the same experts */
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
            /* The worst groups are dropped one by one; of equal ones the last, as the first is the better. */
            for (i64 dropped = 0; dropped < groups - top_groups; dropped++) {
                i64 least = -1;
                for (i64 g = 0; g < groups; g++)
                    if (worth[g] < INFINITY && (least < 0 || worth[g] <= worth[least])) least = g;
                if (least < 0) break;
                worth[least] = INFINITY;
                for (i64 e = least * size; e < (least + 1) * size; e++) choice[e] = -INFINITY;
            }
        }
        float sum = 0; /* k is about 8: k passes cost less than a sort */
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

/* Chooses for rows of x [tokens, n] instead, by the router's weights w [experts, n]. `logits` has room for those. */
EXPORT void choose_experts(const bf16 *x, i64 ldx, i64 n, const float *w, const float *bias, i64 tokens, i64 experts,
                           int sigmoid, i64 k, i64 groups, i64 top_groups, int normalize, float factor, float *logits,
                           i64 *ids, float *weights, int threads) {
    score(x, ldx, tokens, w, experts, n, logits, threads);
    route(logits, bias, tokens, experts, sigmoid, k, groups, top_groups, normalize, factor, ids, weights, threads);
}

/* Sorts pairs (token, choice) by expert, keeping their order: counts[expert], and the row of each pair. */
static void number_rows(const i64 *ids, i64 pairs, i64 experts, i64 *counts, i64 *row) {
    i64 next[experts], sum = 0;
    memset(counts, 0, experts * sizeof *counts);
    for (i64 n = 0; n < pairs; n++)
        if (ids[n] >= 0) counts[ids[n]]++;
    for (i64 e = 0; e < experts; e++) {
        next[e] = sum;
        sum += counts[e];
    }
    for (i64 n = 0; n < pairs; n++) row[n] = ids[n] < 0 ? -1 : next[ids[n]]++;
}

/* Does so, and tells the token of each row. */
EXPORT void group_rows(const i64 *ids, i64 tokens, i64 k, i64 experts, i64 *counts, i64 *token_of_row, i64 *row) {
    number_rows(ids, tokens * k, experts, counts, row);
    memset(token_of_row, 0, tokens * k * sizeof *token_of_row);
    for (i64 n = 0; n < tokens * k; n++)
        if (row[n] >= 0) token_of_row[row[n]] = n / k;
}

/* y[r] = x[from[r]], rows of so many bytes. How many are not among `num_rows`; nothing is written there. */
EXPORT i64 gather_rows(const char *x, i64 num_rows, i64 bytes, const i64 *from, i64 rows, char *y, int threads) {
    i64 outside = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64) reduction(+ : outside)
    for (i64 r = 0; r < rows; r++) {
        if (from[r] < 0 || from[r] >= num_rows) outside++;
        else memcpy(y + r * bytes, x + from[r] * bytes, bytes);
    }
    return outside;
}

/* Sorts the pairs, and copies x [tokens, bytes] to the rows of y. */
EXPORT void sort_rows(const i64 *ids, i64 tokens, i64 k, i64 experts, const char *x, i64 bytes, i64 *counts, i64 *row,
                      char *y, int threads) {
    number_rows(ids, tokens * k, experts, counts, row);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens * k > 64)
    for (i64 n = 0; n < tokens * k; n++)
        if (row[n] >= 0) memcpy(y + row[n] * bytes, x + n / k * bytes, bytes);
}

/* The sum over the k choices of a token of weight * y[row], in float32, from value i on. A row of -1 adds nothing. */
INLINE floats sum_of_choices(const bf16 *y, const i64 *row, const float *weights, i64 k, i64 width, i64 i) {
    floats sum = {0};
    for (i64 n = 0; n < k; n++)
        if (row[n] >= 0) sum += weights[n] * load_bf16(y + row[n] * width + i);
    return sum;
}

INLINE float one_of_choices(const bf16 *y, const i64 *row, const float *weights, i64 k, i64 width, i64 i) {
    float sum = 0;
    for (i64 n = 0; n < k; n++)
        if (row[n] >= 0) sum += from_bf16(y[row[n] * width + i]) * weights[n];
    return sum;
}

/* out[token] = the sum over its choices. */
EXPORT void combine_rows(const bf16 *y, const i64 *row, const float *weights, i64 tokens, i64 k, i64 width, float *out,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 16)
    for (i64 t = 0; t < tokens; t++) {
        i64 i = 0;
        for (; i + LANES <= width; i += LANES)
            store(out + t * width + i, sum_of_choices(y, row + t * k, weights + t * k, k, width, i));
        for (; i < width; i++) out[t * width + i] = one_of_choices(y, row + t * k, weights + t * k, k, width, i);
    }
}

/* out[token] = residual + (the sum over its choices + shared), of which the inner sum is rounded. What is NULL adds
 * nothing. */
EXPORT void combine_experts(const bf16 *y, const i64 *row, const float *weights, const bf16 *shared, const bf16 *residual,
                            i64 tokens, i64 k, i64 width, bf16 *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && tokens > 16)
    for (i64 t = 0; t < tokens; t++) {
        i64 i = 0, first = t * width;
        for (; i + LANES <= width; i += LANES) {
            floats sum = sum_of_choices(y, row + t * k, weights + t * k, k, width, i);
            if (shared) sum += load_bf16(shared + first + i);
            if (residual) sum = load_bf16(residual + first + i) + rounded(sum);
            store_bf16(out + first + i, sum);
        }
        for (; i < width; i++) {
            float sum = one_of_choices(y, row + t * k, weights + t * k, k, width, i);
            if (shared) sum += from_bf16(shared[first + i]);
            if (residual) sum = from_bf16(residual[first + i]) + from_bf16(to_bf16(sum));
            out[first + i] = to_bf16(sum);
        }
    }
}

/* -- norms and rotations ------------------------------------------------------------------------------------------- */

/* y = w * x / sqrt(mean(x^2) + eps), of n values. */
INLINE void norm(const bf16 *in, i64 n, const bf16 *w, float eps, bf16 *y) {
    floats sum = {0};
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) sum += load_bf16(in + i) * load_bf16(in + i);
    float total = sum_of(sum);
    for (; i < n; i++) total += from_bf16(in[i]) * from_bf16(in[i]);
    float scale = 1.0f / sqrtf(total / (float)n + eps) + 0 * total; /* NaN where the squares overflowed */
    for (i = 0; i + LANES <= n; i += LANES) store_bf16(y + i, load_bf16(in + i) * scale * load_bf16(w + i));
    for (; i < n; i++) {
        float v = from_bf16(in[i]) * scale * from_bf16(w[i]);
        y[i] = to_bf16(v);
    }
}

/* The same of rows that are ldx apart in x. */
EXPORT void rms_norm(const bf16 *x, i64 ldx, i64 rows, i64 n, const bf16 *w, float eps, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (i64 r = 0; r < rows; r++) norm(x + r * ldx, n, w, eps, y + r * n);
}

/* sum = residual + x, and y the norm of it; all rows lie one behind the other. */
EXPORT void add_rms_norm(const bf16 *x, const bf16 *residual, i64 rows, i64 n, const bf16 *w, float eps, bf16 *sum, bf16 *y,
                         int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (i64 r = 0; r < rows; r++) {
        i64 i = r * n, end = i + n;
        for (; i + LANES <= end; i += LANES) store_bf16(sum + i, load_bf16(residual + i) + load_bf16(x + i));
        for (; i < end; i++) sum[i] = to_bf16(from_bf16(residual[i]) + from_bf16(x[i]));
        norm(sum + r * n, n, w, eps, y + r * n);
    }
}

/* Rotates the pairs (2f, 2f + 1) of x by angles with these cosines and sines. */
INLINE void rotate_pairs(const bf16 *x, i64 half, const float *c, const float *s, bf16 *to) {
    for (i64 f = 0; f < half; f++) {
        float even = from_bf16(x[2 * f]), odd = from_bf16(x[2 * f + 1]);
        to[2 * f] = to_bf16(even * c[f] - odd * s[f]);
        to[2 * f + 1] = to_bf16(even * s[f] + odd * c[f]);
    }
}

/* The same with x [rows, heads, 2 * half] and the angles of each row: cos and sin [rows, half]. Rows of x are `ldx` apart,
 * heads `ldh`; y is dense. */
EXPORT void rotate(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 half, const float *cosines,
                   const float *sines, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++)
            rotate_pairs(x + r * ldx + h * ldh, half, cosines + r * half, sines + r * half, y + (r * heads + h) * 2 * half);
}

/* Writes the norm of c [rows, n] and k [rows, 2 * half], rotated, one behind the other to their slots of n + 2 * half
 * values. Rows of c and k are `ldc` and `ldk` apart. How many slots are not among `num_slots`; nothing is written there. */
EXPORT i64 norm_rotate_store(const bf16 *c, i64 ldc, const bf16 *k, i64 ldk, i64 rows, i64 n, i64 half, const bf16 *w,
                             float eps, const float *cosines, const float *sines, const i64 *slots, i64 num_slots,
                             bf16 *pages, int threads) {
    i64 outside = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64) reduction(+ : outside)
    for (i64 r = 0; r < rows; r++) {
        if (slots[r] < 0 || slots[r] >= num_slots) {
            outside++;
            continue;
        }
        bf16 *to = pages + slots[r] * (n + 2 * half);
        norm(c + r * ldc, n, w, eps, to);
        rotate_pairs(k + r * ldk, half, cosines + r * half, sines + r * half, to + n);
    }
    return outside;
}
