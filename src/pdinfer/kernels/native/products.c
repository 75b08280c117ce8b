/* The products of a bfloat16 model. Called through `ops.py`, which checks dtypes, shapes and
 * strides; sizes here are numbers of elements. docs/decisions/ says why this is C. What returns an i64 returns the bytes of
 * memory that it could not have, or 0. */

#include "few_rows.h"
#include "tiles.h"

/* Whether a product of so many rows and outs is one for these kernels. With AVX-512 BF16 torch's are good where rows are
 * many. */
EXPORT int is_served(i64 rows, i64 outs) {
#ifdef HAVE_BF16
    return rows <= 16 && outs % 8 == 0;
#else
    return (void)rows, (void)outs, 1;
#endif
}

/* y[rows, outs] = x[rows, n] . w[outs, n]^T, of what `is_served`. */
EXPORT i64 linear(const bf16 *x, i64 ldx, i64 rows, const bf16 *w, i64 outs, i64 n, bf16 *y, int threads) {
    Matrix matrix = {w, outs, n, 1, 0};
    if (rows > FEW_ROWS || outs % 8) return by_strips(&by_floats, (Input){x, ldx}, rows, &matrix, y, outs, threads);
    i64 step = threads > 1 ? SHARE(outs, threads) : outs, lacking = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1) reduction(max : lacking)
    for (i64 o = 0; o < outs; o += step) {
        i64 lacks = few_rows(x, ldx, rows, w, n, o, MIN(o + step, outs), y, outs);
        lacking = MAX(lacking, lacks);
    }
    return lacking;
}

/* The same with weights that lie in strips, of one matrix or of two, one below the other. */
EXPORT i64 linear_strips(const bf16 *x, i64 ldx, i64 rows, const bf16 *strips, i64 outs, i64 n, int parts, bf16 *y,
                         int threads) {
    Matrix matrix = {strips, outs, n, parts, STEP_BYTES};
    return by_strips(best_way(), (Input){x, ldx}, rows, &matrix, y, outs, threads);
}

/* y[rows, heads, outs] = x[rows, heads, n] . w[heads, n, outs] per head; heads of x are `ldh` apart, its rows `ldx`, heads
 * of w `ldw`. outs is a multiple of 128, n even. */
EXPORT i64 heads_in(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 n, const bf16 *w, i64 ldw, i64 outs, bf16 *y,
                    int threads) {
    i64 chunks = outs / WIDE, lacking = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1) reduction(max : lacking)
    for (i64 item = 0; item < heads * chunks; item++) {
        i64 h = item / chunks, c = item % chunks * WIDE;
        i64 lacks = few_rows_transposed(x + h * ldh, ldx, rows, w + h * ldw + c, outs, n, ldw, y + h * outs + c, heads * outs);
        lacking = MAX(lacking, lacks);
    }
    return lacking;
}

/* y[rows, heads, outs] = x[rows, heads, n] . w[heads, outs, n]^T per head; strides as above, outs a multiple of 8. */
EXPORT i64 heads_out(const bf16 *x, i64 ldx, i64 ldh, i64 rows, i64 heads, i64 n, const bf16 *w, i64 ldw, i64 outs,
                     bf16 *y, int threads) {
    i64 lacking = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1) reduction(max : lacking)
    for (i64 h = 0; h < heads; h++) {
        const bf16 *in = x + h * ldh; /* a head is a small matrix: threads take whole heads */
        Matrix of_head = {w + h * ldw, outs, n, 1, 0};
        i64 lacks = rows > FEW_ROWS ? by_strips(&by_floats, (Input){in, ldx}, rows, &of_head, y + h * outs, heads * outs, 1)
                                    : few_rows(in, ldx, rows, of_head.weights, n, 0, outs, y + h * outs, heads * outs);
        lacking = MAX(lacking, lacks);
    }
    return lacking;
}
