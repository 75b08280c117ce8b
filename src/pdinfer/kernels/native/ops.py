"""Kernels in C for bfloat16 models on x86 CPUs, compiled on first use (docs/decisions/).

An op whose shape gains nothing here goes to torch, and so do inputs that the kernels cannot read: other dtypes than
those they are made for, or strides. They use `torch.get_num_threads` threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.errors import BackendUnavailable, PDInferError
from pdinfer.kernels import torch_experts, torch_ops
from pdinfer.kernels.activations import FP8Rows
from pdinfer.kernels.native.build import library
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.weight_formats import BLOCK, FP8Blocks, Int8Dynamic, Strips
from pdinfer.process.compiled import cpu_flags

FEW_ROWS = 16
"""Up to this many rows a product of float32 waits for its weights. With more, torch's GEMM is faster. Of products of
bfloat16 the library says which it serves."""
FEW_HEAD_ROWS = 64
"""Up to this many rows products head by head are served on every CPU, since torch computes them one by one."""
FEW_FP8_ROWS = 16
"""Up to this many rows an FP8 product reads its weights as they are stored. For more they become bfloat16, block by
block."""
FP8_BLOCK_BYTES = 4 << 20
"""The memory for such a block."""
PART_TOKENS = 1024
"""Threads share the contexts that are longer than this in decode."""
KEYS = 4096
"""The keys and values expanded at a time in prefill: 64 MiB for 16 heads, whatever the length of the context."""


_LINEARS = MappingProxyType({torch.bfloat16: "linear", torch.float32: "linear_float"})


def _are(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Return whether all tensors that are there have this dtype. C would read the bits of another dtype as they are."""
    return all(tensor is None or tensor.dtype == dtype for tensor in tensors)


def unavailable(spec: OpSpec) -> str | None:
    """Return a sentence when this machine or dtype cannot have these kernels, and None when it can."""
    if spec.device.type != "cpu":
        return f"is for CPUs, device is {spec.device}"
    if spec.dtype != torch.bfloat16:
        return f"is for bfloat16, the model runs in {spec.dtype}"
    try:
        library()
    except BackendUnavailable as error:
        return str(error)
    return None


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return a sentence when the kernel of an op was not made for these sizes, and None when it was."""
    rank, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    if op in ("linear_strips", "grouped_mlp_strips") and not library().strips_are_served():
        return "leaves many rows to torch on this CPU (AVX-512 BF16 and no AMX), which reads plain matrices"
    if op in ("mla_decode", "mla_prefill") and spec.kv_format == "fp8":
        return "reads pages of bfloat16, these are packed FP8"
    if op == "mla_prefill" and "amx_bf16" in cpu_flags():
        return "multiplies vectors, and torch's attention multiplies tiles on this CPU (AMX)"
    if op == "mla_decode" and rank is not None and rope is not None and (rank % 32 or rope % 32):
        return f"reads latents and rotary keys in steps of 32 elements, they have {rank} and {rope}"
    return None


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if op in ("linear_fp8", "grouped_mlp_fp8"):
        return "takes longer to read FP8 weights than bfloat16 takes"
    return None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if x_TD.stride(-1) != 1 or not _are(torch.bfloat16, x_TD, weight_D):
        return torch_ops.rms_norm(x_TD, weight_D, eps)
    rows, width = x_TD.shape
    out = x_TD.new_empty(rows, width)
    library().rms_norm(
        x_TD.data_ptr(), x_TD.stride(0), rows, width, weight_D.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    rows, width = x_TI.shape
    outs = weight_OI.shape[0]
    served = rows <= FEW_ROWS if x_TI.dtype == torch.float32 else library().is_served(rows, outs)
    fits = rows and served and x_TI.stride(-1) == 1 and weight_OI.is_contiguous()
    if x_TI.dtype not in _LINEARS or not _are(x_TI.dtype, weight_OI) or not fits:
        return F.linear(x_TI, weight_OI)
    out = x_TI.new_empty(rows, outs)
    lacking = getattr(library(), _LINEARS[x_TI.dtype])(
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        weight_OI.data_ptr(),
        outs,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {rows} rows")
    return out


def linear_strips(x_TI: Tensor, weight: Strips) -> Tensor:
    rows, width = x_TI.shape
    outs = weight.shape[0]
    if not rows or not _reads_strips(x_TI, weight):
        return F.linear(x_TI, weight.matrix())
    out = x_TI.new_empty(rows, outs)
    lacking = library().linear_strips(
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        weight.numbers.data_ptr(),
        outs,
        width,
        weight.parts,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {rows} rows")
    return out


def _reads_strips(x: Tensor, *weights: Strips) -> bool:
    """Return whether the kernels take these rows and weights."""
    dense = all(weight.numbers.is_contiguous() for weight in weights)
    return dense and x.stride(-1) == 1 and _are(torch.bfloat16, x, *(weight.numbers for weight in weights))


def rotate(x_THR: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, interleaved: bool = True) -> Tensor:
    readable = _are(torch.bfloat16, x_THR) and _are(torch.float32, cos_TF, sin_TF) and x_THR.stride(-1) == 1
    if not interleaved or not readable:
        return torch_ops.rotate(x_THR, cos_TF, sin_TF, interleaved=interleaved)
    rows, num_heads, width = x_THR.shape
    cos_TF, sin_TF = cos_TF.contiguous(), sin_TF.contiguous()
    out = x_THR.new_empty(rows, num_heads, width)
    library().rotate(
        x_THR.data_ptr(),
        x_THR.stride(0),
        x_THR.stride(1),
        rows,
        num_heads,
        width // 2,
        cos_TF.data_ptr(),
        sin_TF.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    sigmoid: bool,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    normalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    if not _are(torch.float32, logits_TE, bias_E):
        return torch_ops.route(
            logits_TE,
            bias_E,
            sigmoid=sigmoid,
            top_k=top_k,
            num_groups=num_groups,
            top_k_groups=top_k_groups,
            normalize=normalize,
            scaling_factor=scaling_factor,
        )
    tokens, num_experts = logits_TE.shape
    logits_TE, bias_E = logits_TE.contiguous(), None if bias_E is None else bias_E.contiguous()
    ids, weights = torch.empty(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k)
    library().route(
        logits_TE.data_ptr(),
        None if bias_E is None else bias_E.data_ptr(),
        tokens,
        num_experts,
        sigmoid,
        top_k,
        num_groups,
        top_k_groups,
        normalize,
        scaling_factor,
        ids.data_ptr(),
        weights.data_ptr(),
        torch.get_num_threads(),
    )
    return ids, weights


def group_rows(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids_TK = ids_TK.contiguous()
    counts_E, row_TK = torch.empty(num_experts, dtype=torch.int64), torch.empty_like(ids_TK)
    token_of_row_S = row_TK.new_empty(ids_TK.numel())
    library().group_rows(
        ids_TK.data_ptr(),
        *ids_TK.shape,
        num_experts,
        counts_E.data_ptr(),
        token_of_row_S.data_ptr(),
        row_TK.data_ptr(),
    )
    return counts_E, token_of_row_S, row_TK


def combine_rows(y_SD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if not _are(torch.bfloat16, y_SD) or not _are(torch.float32, weights_TK):
        return torch_ops.combine_rows(y_SD, row_TK, weights_TK)
    out_TD = torch.empty(len(row_TK), y_SD.shape[1])
    y_SD, row_TK, weights_TK = y_SD.contiguous(), row_TK.contiguous(), weights_TK.contiguous()
    library().combine_rows(
        y_SD.data_ptr(),
        row_TK.data_ptr(),
        weights_TK.data_ptr(),
        *row_TK.shape,
        y_SD.shape[1],
        out_TD.data_ptr(),
        torch.get_num_threads(),
    )
    return out_TD


def gated_silu(x_TJ: Tensor) -> Tensor:
    if not _are(torch.bfloat16, x_TJ):
        return torch_ops.gated_silu(x_TJ)
    rows, width = x_TJ.shape
    x_TJ = x_TJ.contiguous()
    out = x_TJ.new_empty(rows, width // 2)
    library().gated_silu(x_TJ.data_ptr(), rows, width // 2, out.data_ptr(), torch.get_num_threads())
    return out


def grouped_mlp(x: Tensor, counts_E: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor) -> Tensor:
    num_experts, width, inner = down_EDI.shape
    counts_E = counts_E.to(torch.int64)
    fits = x.ndim == 2 and len(x) and _are(torch.bfloat16, x, gate_up_EJD, down_EDI)
    most = int(counts_E.max()) if fits else 0
    if not fits or not library().experts_are_served(most, width, inner):
        return torch_experts.by_expert(linear, gated_silu, x, counts_E, gate_up_EJD, down_EDI)
    out = torch.empty_like(x)
    hidden = x.new_empty(len(x), 3 * inner)
    lacking = library().experts(
        x.data_ptr(),
        counts_E.data_ptr(),
        num_experts,
        gate_up_EJD.data_ptr(),
        down_EDI.data_ptr(),
        width,
        inner,
        hidden.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {len(x)} rows with {num_experts} experts")
    return out


def grouped_mlp_strips(x: Tensor, counts_E: Tensor, gate_up: Strips, down: Strips) -> Tensor:
    if x.ndim != 2 or not len(x) or not x.is_contiguous() or not _reads_strips(x, gate_up, down):
        return torch_experts.by_expert(linear_strips, gated_silu, x, counts_E, gate_up, down)
    counts_E, (width, inner), out = counts_E.to(torch.int64), down.shape, torch.empty_like(x)
    lacking = library().experts_strips(
        x.data_ptr(),
        counts_E.data_ptr(),
        len(counts_E),
        gate_up.numbers.data_ptr(),
        down.numbers.data_ptr(),
        width,
        inner,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {len(x)} rows with {len(counts_E)} experts")
    return out


def linear_int8(x_TI: Tensor, weight: Int8Dynamic) -> Tensor:
    rows, width = x_TI.shape
    outs = len(weight.numbers)
    if not _reads_int8(rows, x_TI, weight):
        return torch_ops.linear_int8(x_TI, weight)
    out = x_TI.new_empty(rows, outs)
    lacking = library().linear_int8(
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        weight.numbers.data_ptr(),
        weight.scale.data_ptr(),
        outs,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {rows} rows in INT8")
    return out


def grouped_mlp_int8(x: Tensor, counts_E: Tensor, gate_up: Int8Dynamic, down: Int8Dynamic) -> Tensor:
    num_experts, width, inner = down.numbers.shape
    counts_E = counts_E.long()
    fits = x.ndim == 2 and len(x) and x.is_contiguous()
    if not fits or not _reads_int8(int(counts_E.max()), x, gate_up, down):
        return torch_experts.by_expert(linear_int8, gated_silu, x, counts_E, gate_up, down)
    out, hidden = torch.empty_like(x), x.new_empty(len(x), 3 * inner)
    lacking = library().experts_int8(
        x.data_ptr(),
        counts_E.data_ptr(),
        num_experts,
        gate_up.numbers.data_ptr(),
        gate_up.scale.data_ptr(),
        down.numbers.data_ptr(),
        down.scale.data_ptr(),
        width,
        inner,
        hidden.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {len(x)} rows with {num_experts} experts in INT8")
    return out


def quantize_fp8(x_TI: Tensor, *, ue8m0: bool) -> FP8Rows:
    if x_TI.ndim != 2 or x_TI.stride(-1) != 1 or not _are(torch.bfloat16, x_TI):
        return torch_ops.quantize_fp8(x_TI, ue8m0=ue8m0)
    rows, width = x_TI.shape
    numbers_TI = torch.empty(rows, width, dtype=torch.float8_e4m3fn)
    scales_TN = torch.empty(rows, -(-width // BLOCK))
    library().quantize_fp8(
        x_TI.data_ptr(),
        x_TI.stride(0),
        rows,
        width,
        ue8m0,
        numbers_TI.data_ptr(),
        scales_TN.data_ptr(),
        torch.get_num_threads(),
    )
    return FP8Rows(numbers_TI, scales_TN, dtype=x_TI.dtype, ue8m0=ue8m0)


def linear_fp8(x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    if not weight.numbers.is_contiguous() or not weight.scale.is_contiguous() or x_TI.dtype != torch.bfloat16:
        return torch_ops.linear_fp8(x_TI, weight)
    x = x_TI if isinstance(x_TI, FP8Rows) else quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    rows, (outs, width) = len(x), weight.numbers.shape
    out = x.new_empty((rows, outs))
    matrix = (weight.numbers.data_ptr(), weight.scale.data_ptr(), outs, weight.parts, width)
    if rows > FEW_FP8_ROWS:
        floats_TI, step = x.floats(), max(1, FP8_BLOCK_BYTES // (2 * width))
        block_OI = floats_TI.new_empty(min(step, outs), width)
        for first in range(0, outs, step):
            count = min(step, outs - first)
            library().dequantize_fp8(*matrix, first, count, block_OI.data_ptr(), torch.get_num_threads())
            out[:, first : first + count] = linear(floats_TI, block_OI[:count])
    elif rows:
        numbers_TI = x.numbers_TI.contiguous()
        scales = (x.scales_TN.data_ptr(), *x.scales_TN.stride())
        lacking = library().linear_fp8(
            numbers_TI.data_ptr(), *scales, rows, *matrix, out.data_ptr(), torch.get_num_threads()
        )
        _check_memory(lacking, f"a product of {rows} rows in FP8")
    return out


def grouped_mlp_fp8(x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    rows = quantize_fp8(x, ue8m0=gate_up.ue8m0) if isinstance(x, Tensor) else x  # once for all experts
    return torch_experts.by_expert(linear_fp8, gated_silu, rows, counts_E, gate_up, down)


def _reads_int8(rows: int, x: Tensor, *weights: Int8Dynamic) -> bool:
    """Return whether the kernels take these numbers of at most so many rows."""
    dense = all(part.is_contiguous() for weight in weights for part in (weight.numbers, weight.scale))
    return bool(rows and dense and x.stride(-1) == 1 and _are(torch.bfloat16, x) and library().is_served_int8(rows))


def heads_in(x_THN: Tensor, weight_HNC: Tensor) -> Tensor:
    rows, _, width = x_THN.shape
    outs = weight_HNC.shape[2]
    packed = x_THN.stride(2) == weight_HNC.stride(2) == 1 and weight_HNC.stride(1) == outs
    readable = packed and _are(torch.bfloat16, x_THN, weight_HNC)
    served = rows <= FEW_HEAD_ROWS or library().is_served(rows, outs)
    if not rows or not served or width % 2 or outs % 128 or not readable:
        return torch_ops.heads_in(x_THN, weight_HNC)
    return _by_heads(library().heads_in, x_THN, weight_HNC, outs)


def heads_out(x_THC: Tensor, weight_HVC: Tensor) -> Tensor:
    rows, _, width = x_THC.shape
    outs = weight_HVC.shape[1]
    packed = x_THC.stride(2) == weight_HVC.stride(2) == 1 and weight_HVC.stride(1) == width
    readable = packed and _are(torch.bfloat16, x_THC, weight_HVC)
    served = rows <= FEW_HEAD_ROWS or library().is_served(rows, outs)
    if not rows or not served or outs % 8 or not readable:
        return torch_ops.heads_out(x_THC, weight_HVC)
    return _by_heads(library().heads_out, x_THC, weight_HVC, outs)


def _by_heads(kernel: Callable[..., int], x_THI: Tensor, weight_H: Tensor, outs: int) -> Tensor:
    """Run a product head by head -> [T, H, outs]. `weight_H` is [H, ...]."""
    rows, num_heads, width = x_THI.shape
    out = x_THI.new_empty(rows, num_heads, outs)
    lacking = kernel(
        x_THI.data_ptr(),
        x_THI.stride(0),
        x_THI.stride(1),
        rows,
        num_heads,
        width,
        weight_H.data_ptr(),
        weight_H.stride(0),
        outs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"a product of {rows} rows with {num_heads} heads")
    return out


def mla_prefill(
    q_THQ: Tensor,
    pages_PGW: Tensor,
    kv_b_OC: Tensor,
    page_table_BM: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    v_head_dim: int,
    scale: float,
) -> Tensor:
    num_heads, rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    rope = q_THQ.shape[-1] - nope
    if v_head_dim % 64 or nope % 2 or rope % 2 or not _are(torch.bfloat16, q_THQ, pages_PGW, kv_b_OC):
        return torch_ops.mla_prefill(
            q_THQ, pages_PGW, kv_b_OC, page_table_BM, query_lens, context_lens, v_head_dim=v_head_dim, scale=scale
        )
    page_size, q_THQ = pages_PGW.shape[1], q_THQ.contiguous()
    sums_THV = torch.zeros(*q_THQ.shape[:2], v_head_dim)
    largest_TH, total_TH = torch.full(q_THQ.shape[:2], -math.inf), torch.zeros(q_THQ.shape[:2])
    most = min(KEYS, max(context_lens, default=0))
    scratch = torch.empty(library().prefill_scratch(most, num_heads, nope + rope, v_head_dim), dtype=torch.int32)
    first, step = 0, KEYS // page_size * page_size
    for row, (num_queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        at = slice(first, first + num_queries)
        for start in range(0, context if num_queries else 0, step):
            stop = min(start + step, context)
            table = page_table_BM[row, start // page_size : -(-stop // page_size)]
            cached = pages_PGW.index_select(0, table).flatten(0, 1)[: stop - start]
            kv_SHX = linear(cached[:, :rank], kv_b_OC)
            library().mla_prefill(
                q_THQ[at].data_ptr(),
                kv_SHX.data_ptr(),
                cached[:, rank:].data_ptr(),
                cached.stride(0),
                num_queries,
                stop - start,
                num_heads,
                nope,
                rope,
                v_head_dim,
                context - num_queries - start,
                scale,
                scratch.data_ptr(),
                sums_THV[at].data_ptr(),
                largest_TH[at].data_ptr(),
                total_TH[at].data_ptr(),
                torch.get_num_threads(),
            )
        first += num_queries
    return sums_THV.div_(total_TH[..., None]).to(q_THQ.dtype)


def mla_decode(
    q_latent_BQHC: Tensor,
    q_rope_BQHR: Tensor,
    pages_PGW: Tensor,
    page_table_BM: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
) -> Tensor:
    batch, num_queries, num_heads, rank = q_latent_BQHC.shape
    width = pages_PGW.shape[-1]
    readable = _are(torch.bfloat16, q_latent_BQHC, q_rope_BQHR, pages_PGW) and _are(torch.int64, context_lens_B)
    if not batch or rank % 32 or width % 32 or not readable:
        return torch_ops.mla_decode(q_latent_BQHC, q_rope_BQHR, pages_PGW, page_table_BM, context_lens_B, scale=scale)
    q_latent_BQHC, q_rope_BQHR = q_latent_BQHC.contiguous(), q_rope_BQHR.contiguous()
    page_table_BM = page_table_BM.to(torch.int32).contiguous()
    out = torch.empty_like(q_latent_BQHC)
    lacking = library().mla_decode(
        q_latent_BQHC.data_ptr(),
        q_rope_BQHR.data_ptr(),
        pages_PGW.data_ptr(),
        page_table_BM.data_ptr(),
        page_table_BM.shape[1],
        pages_PGW.shape[1],
        context_lens_B.data_ptr(),
        batch,
        num_queries,
        num_heads,
        width,
        rank,
        scale,
        PART_TOKENS,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    _check_memory(lacking, f"attention over {context_lens_B.tolist()[:8]} tokens")
    return out


def _check_memory(lacking: int | None, work: str) -> None:
    """Raise PDInferError if a kernel says how many bytes of memory it could not have."""
    if lacking:
        raise PDInferError(f"{work} lacks {lacking} bytes of memory")
