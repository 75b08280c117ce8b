"""How a block of threads attends with a tile of M rows to a part of a context: N tokens at a time, of one page.

It keeps a running maximum (arXiv 1805.02867, algorithm 3) and leaves sums of latents, normalised, and the logarithm to
base 2 of the sum of exponentials. The page of the next tokens is looked up ahead, so that loads are in flight while
these are multiplied."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class PartsShape(NamedTuple):
    """Sizes of decode attention that a kernel is compiled for. `rows` are queries times heads of a sequence. Latents
    and rotary keys are loaded in blocks that TMA fills up with zeros. With `upcast` products are those of float32
    numbers."""

    rows: int
    heads: int
    latent: int
    rope: int
    latent_block: int
    rope_block: int
    page_size: int
    packed: bool
    upcast: bool


@triton.jit
def attend_in_shared_memory(
    q, cache, out, scale, first_row, first, stop, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Attend to whole blocks that every row sees: latents stay where TMA puts them. With fewer than 64 rows the tokens
    are on the M side of a product, of which wgmma wants 64, if there are as many: scores are [N, M], sums [C, M]."""
    C: tl.constexpr = S.latent_block
    TURNED: tl.constexpr = M < 64 and N >= 64
    TOKENS: tl.constexpr = 0 if TURNED else 1  # the axis
    latents, keys, _ = _views(cache, S, N, C)
    q_latents, q_rope = _queries(q, first_row, S, M, C)
    q_latent = q_latents.load([first_row, 0])
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([C, M] if TURNED else [M, C], tl.float32)
    slot = _slot(cache, first, S)
    for position in tl.range(first, stop, N):
        latent = latents.load([slot, 0])
        scores = _scores(q_latent, latent, TURNED, S) + _scores(q_rope, keys.load([slot, 0]), TURNED, S)
        weights, kept, top, total = weigh(scores * scale, scores, top, total, TOKENS)
        sums = _weighed(sums * tl.expand_dims(kept, TOKENS), weights, latent, TURNED, S)
        slot = _slot(cache, tl.minimum(position + N, stop - 1), S)
    _leave_sums(out, sums, total, first_row, 0, TURNED, S, M, C)
    _leave_lse(out, top, total, first_row, S, M)


@triton.jit
def attend_through_registers(
    q, cache, out, scale, first_row, first, stop, context, S: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    """Attend to packed tokens, or to the newest, which only some rows see and some of which may hold NaN. There is room
    for 128 channels at a time beside the sums."""
    GROUPS: tl.constexpr = S.latent // 128 if S.latent % 128 == 0 else 1
    C: tl.constexpr = 128 if S.latent % 128 == 0 else S.latent_block
    dtype: tl.constexpr = q[0].dtype.element_ty
    latents, keys, scale_ptr = _views(cache, S, N, C)
    q_latents, q_rope = _queries(q, first_row, S, M, C)
    q_latent = ()
    sums = ()
    for group in tl.static_range(GROUPS):
        q_latent += (q_latents.load([first_row, group * C]),)  # type: ignore[assignment]
        sums += (tl.zeros([M, C], tl.float32),)  # type: ignore[assignment]
    seen = context - S.rows // S.heads + 1 + (first_row + tl.arange(0, M)) // S.heads
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    slot = _slot(cache, first, S)
    for position in tl.range(first, stop, N):
        scores = _scores(q_rope, keys.load([slot, 0]).to(dtype), False, S)
        latent = ()
        for group in tl.static_range(GROUPS):
            part = latents.load([slot, group * C])
            if S.packed:
                part = part.to(tl.float32) * tl.load(_scales(scale_ptr, slot, S, N) + group)[:, None]
            scores += _scores(q_latent[group], part.to(dtype), False, S)
            # 0 times NaN is NaN; the scores of those who see it have it
            latent += (tl.where(tl.abs(part.to(tl.float32)) < float("inf"), part, 0).to(dtype),)  # type: ignore[assignment]
        visible = (position + tl.arange(0, N))[None, :] < seen[:, None]
        scores *= scale
        shown = tl.where(visible, scores, 0)
        weights, kept, top, total = weigh(tl.where(visible, scores, float("-inf")), shown, top, total, 1)
        added = ()
        for group in tl.static_range(GROUPS):
            added += (_weighed(sums[group] * kept[:, None], weights, latent[group], False, S),)  # type: ignore[assignment]
        sums = added
        slot = _slot(cache, tl.minimum(position + N, stop - 1), S)
    for group in tl.static_range(GROUPS):
        _leave_sums(out, sums[group], total, first_row, group * C, False, S, M, C)
    _leave_lse(out, top, total, first_row, S, M)


@triton.jit
def _views(cache, S: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """Return descriptors of the latents and the keys of all slots, and the address of the first slot's scales."""
    pages_ptr, _, num_slots = cache
    R: tl.constexpr = S.rope_block
    if S.packed:
        BYTES: tl.constexpr = S.latent + S.latent // 128 * 4 + S.rope * 2
        latent_ptr = pages_ptr.to(tl.pointer_type(tl.float8e4nv))
        scale_ptr = (pages_ptr + S.latent).to(tl.pointer_type(tl.float32))
        key_ptr = (pages_ptr + S.latent + S.latent // 128 * 4).to(tl.pointer_type(tl.bfloat16))
        latents = tl.make_tensor_descriptor(latent_ptr, [num_slots, S.latent], [BYTES, 1], [N, C])
        keys = tl.make_tensor_descriptor(key_ptr, [num_slots, S.rope], [BYTES // 2, 1], [N, R])
    else:
        W: tl.constexpr = S.latent + S.rope
        scale_ptr = pages_ptr
        latents = tl.make_tensor_descriptor(pages_ptr, [num_slots, S.latent], [W, 1], [N, C])
        keys = tl.make_tensor_descriptor(pages_ptr + S.latent, [num_slots, S.rope], [W, 1], [N, R])
    return latents, keys, scale_ptr


@triton.jit
def _scales(scale_ptr, slot, S: tl.constexpr, N: tl.constexpr):
    BYTES: tl.constexpr = S.latent + S.latent // 128 * 4 + S.rope * 2
    return scale_ptr + (slot + tl.arange(0, N)).to(tl.int64) * (BYTES // 4)


@triton.jit
def _queries(q, first_row, S: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """Return a descriptor of the latent part of the queries, and the tile of the rotary part."""
    q_latent_ptr, q_rope_ptr = q
    R: tl.constexpr = S.rope_block
    q_latents = tl.make_tensor_descriptor(q_latent_ptr, [S.rows, S.latent], [S.latent, 1], [M, C])
    q_ropes = tl.make_tensor_descriptor(q_rope_ptr, [S.rows, S.rope], [S.rope, 1], [M, R])
    return q_latents, q_ropes.load([first_row, 0])


@triton.jit
def _slot(cache, position, S: tl.constexpr):
    page = tl.load(cache[1] + position // S.page_size).to(tl.int32)
    return page * S.page_size + position % S.page_size


@triton.jit
def _scores(q, keys, TURNED: tl.constexpr, S: tl.constexpr):
    """Return the products of queries [M, .] and keys [N, .]: [M, N], or [N, M] if turned."""
    if TURNED:
        scores = _dot(keys, q.T, None, S)
    else:
        scores = _dot(q, keys.T, None, S)
    return scores


@triton.jit
def weigh(scores, shown, top, total, TOKENS: tl.constexpr):
    """Return the weights of scores by the new maximum, the factor of what was summed before, that maximum, and the sum
    of weights. Scores are -inf where they do not count, and `shown` is 0 there. One that counts may not be lost: it is
    added to the sum if it is -inf or NaN."""
    highest = tl.maximum(top, tl.max(scores, TOKENS))
    base = tl.where(highest == float("-inf"), 0, highest)  # of a row that saw nothing yet
    weights = tl.exp2(scores - tl.expand_dims(base, TOKENS))
    kept = tl.exp2(top - base)
    return weights, kept, highest, total * kept + tl.sum(weights + 0 * shown, TOKENS)


@triton.jit
def _weighed(sums, weights, latent, TURNED: tl.constexpr, S: tl.constexpr):
    """Return sums [M, C] plus weights [M, N] times latents [N, C]. Sums and weights may be turned."""
    if TURNED:
        sums = _dot(latent.T, weights.to(latent.dtype), sums, S)
    else:
        sums = _dot(weights.to(latent.dtype), latent, sums, S)
    return sums


@triton.jit
def _dot(a, b, sums, S: tl.constexpr):
    if S.upcast:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        product = tl.dot(a, b, sums)
    return product


@triton.jit
def _leave_sums(
    out, sums, total, first_row, column, TURNED: tl.constexpr, S: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):
    """Store normalised sums by TMA, which leaves out rows behind the last one. Addresses would take registers."""
    if TURNED:
        sums = (sums / total[None, :]).T
    else:
        sums = sums / total[:, None]
    parts = tl.make_tensor_descriptor(out[0], [S.rows, S.latent], [S.latent, 1], [M, C])
    parts.store([first_row, column], sums.to(out[0].dtype.element_ty))


@triton.jit
def _leave_lse(out, top, total, first_row, S: tl.constexpr, M: tl.constexpr):
    row = first_row + tl.arange(0, M)
    tl.store(out[1] + row, top + tl.log2(total), mask=row < S.rows)
