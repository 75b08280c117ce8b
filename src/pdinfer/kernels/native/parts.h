/* Experts of many rows. */

#pragma once

#include "strips.h"

/* y = down . (silu(gate . x) * (up . x)) of rows sorted by expert, counts[e] of each. Weights of all experts lie one after
 * another, each as these of the first. */
i64 by_parts(const Way *way, Input x, const i64 *counts, i64 num_experts, Matrix gate_up, Matrix down, bf16 *y,
             int threads);
