/* What lies between products: routing, sorting rows by expert, norms, rotations, activations. Called through `ops.py`, which
 * checks dtypes, shapes and strides; sizes here are numbers of elements. */

#include "vectors.h"

/* y[rows, n] = silu(x[:, :n]) * x[:, n:2n] */
EXPORT void gated_silu(const bf16 *x, i64 rows, i64 n, bf16 *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 16)
    for (i64 r = 0; r < rows; r++) silu_times(x + 2 * n * r, x + 2 * n * r + n, y + n * r, n);
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
        for (; i + LANES <= width; i += LANES) {
            floats sum = {0};
            for (i64 n = t * k; n < (t + 1) * k; n++)
                if (row[n] >= 0) sum += weights[n] * load_bf16(y + row[n] * width + i);
            store(out + t * width + i, sum);
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
        floats sum = {0};
        i64 i = 0;
        for (; i + LANES <= n; i += LANES) sum += load_bf16(in + i) * load_bf16(in + i);
        float total = sum_of(sum);
        for (; i < n; i++) total += from_bf16(in[i]) * from_bf16(in[i]);
        float scale = 1.0f / sqrtf(total / (float)n + eps) + 0 * total; /* NaN where the squares overflowed */
        for (i = 0; i + LANES <= n; i += LANES)
            store_bf16(y + r * n + i, load_bf16(in + i) * scale * load_bf16(w + i));
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
