/* What every draw of tokens needs of its logits: the largest, and what makes them log-probabilities. */

#include "vectors.h"

#define LINE 512 /* values that are looked at together */

INLINE float largest_in(const float *x, i64 n) {
    floats most = all_of(-INFINITY);
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) most = choose(load(x + i) > most, load(x + i), most);
    float largest = largest_of(most);
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* The first place of the largest of n values. NaN is not compared; where all are, it is the first place. */
INLINE i64 place_of_largest(const float *x, i64 n) {
    float largest = -INFINITY;
    i64 line = 0;
    for (i64 i = 0; i < n; i += LINE) {
        float of_line = largest_in(x + i, MIN(LINE, n - i));
        if (of_line > largest) largest = of_line, line = i;
    }
    for (i64 i = line; i < n; i++)
        if (x[i] == largest) return i;
    return 0;
}

/* log(sum(e^x)) of n values whose largest is `top`. Not finite when `top` is not, or a value is NaN. */
INLINE float log_of_sum(const float *x, i64 n, float top) {
    double total = 0; /* of lines, whose sums are short enough for floats */
    for (i64 first = 0; first < n; first += LINE) {
        floats sum = {0};
        i64 i = first, end = MIN(n, first + LINE);
        for (; i + LANES <= end; i += LANES) sum += exp_of(load(x + i) - top);
        total += sum_of(sum);
        for (; i < end; i++) total += expf(x[i] - top);
    }
    return top + (float)log(total);
}

/* words[3][rows]: of each row of `changed` the place of the largest, and as the bits of floats its log-probability in
 * `logits` and log(sum(e^logits)). Rows have n values, one behind the other. */
EXPORT void draw_greedy(const float *logits, const float *changed, i64 rows, i64 n, int32_t *words, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (i64 r = 0; r < rows; r++) {
        const float *x = logits + r * n;
        i64 token = place_of_largest(changed + r * n, n), top = changed == logits ? token : place_of_largest(x, n);
        float sum = log_of_sum(x, n, x[top]), logprob = x[token] - sum;
        words[r] = (int32_t)token;
        memcpy(words + rows + r, &logprob, sizeof logprob);
        memcpy(words + 2 * rows + r, &sum, sizeof sum);
    }
}
