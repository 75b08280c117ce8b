"""Products in FP8 by DeepGEMM, on Hopper cards that have it. This is the only file that imports deep_gemm.

Sources: deepseek-ai/DeepGEMM 2.6 (csrc/apis/gemm.hpp and layout.hpp say what it checks) and SGLang's build of it,
sgl-deep-gemm 0.1.4. The library is known by its functions: versions of the two builds do not compare, and another
project has its name on PyPI.

Its scores of index keys are not used: it rounds queries to FP8, and `index_topk` promises scores of queries as they
are."""

from __future__ import annotations

import importlib
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.kernels import hopper
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import BLOCK, FP8Blocks
from pdinfer.kernels.ops import Composed, Declined, Ops
from pdinfer.kernels.spec import OpSpec

DENSE = ("fp8_gemm_nt",)
CONTIGUOUS = ("m_grouped_fp8_gemm_nt_contiguous",)
MASKED = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
ALIGNMENT = ("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")
"""Functions of the library, each under the names that builds have for it."""

OUTPUTS_STEP = 64
ROOM_STEP = 128
"""The rows of the largest tile of a room. The library writes whole tiles (csrc/jit_kernels/heuristics/sm90.hpp and
sm90_fp8_gemm_1d2d.cuh: its TMA knows all rooms as one matrix): the last one of an expert may not reach into the next
room. It does not check that, and on an H200 results of the next expert were lost."""
EXPECTED_SHARE = 32
"""The part of an expert's room that is expected to be filled where `FP8Rows.expected` is not known: DeepSeek-V3 sends a
token to 8 of 256 experts. The library chooses its tiles by the number of rows that is expected."""


FULL_TILES = 2
"""Rows go into tiles when they are sorted if each expert has as many on average: then those that fill up tiles, on
average half a one for each, are a quarter as many or fewer. Few rows may be multiplied by another provider, which needs
no tiles."""


def unavailable(spec: OpSpec) -> str | None:
    """Return why DeepGEMM cannot run on a device, or None where it can. Blackwell cards want scales in another form
    than ours."""
    return hopper.why_not(spec.device, "deep_gemm", (DENSE, CONTIGUOUS, MASKED, ALIGNMENT))


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why an op is not served for these sizes and formats, or None where it is."""
    return None if spec.dtype == torch.bfloat16 else f"writes bfloat16, the model runs in {spec.dtype}"


@Composed
def linear_fp8(ops: Ops, x_TI: Tensor | FP8Rows, weight: FP8Blocks) -> Tensor:
    _check(x_TI, weight)
    rows = x_TI if isinstance(x_TI, FP8Rows) else ops.quantize_fp8(x_TI, ue8m0=weight.ue8m0)
    y_TO = rows.new_empty((len(rows), len(weight.numbers)))
    _call(DENSE)(_pair(rows), _pair(weight), y_TO)
    return y_TO


@Composed
def grouped_mlp_fp8(ops: Ops, x: Tensor | FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    if x.ndim == 3 and x.shape[1] % ROOM_STEP:
        raise Declined(
            f"writes over the rows of the next expert, but in room for a multiple of {ROOM_STEP}, not {x.shape[1]}"
        )
    _check(x, gate_up, down)
    rows = x if isinstance(x, FP8Rows) else ops.quantize_fp8(x, ue8m0=gate_up.ue8m0)
    if rows.ndim == 3:
        return _in_room(ops, rows, counts_E, gate_up, down)
    if not len(rows):
        return rows.new_empty(rows.shape)
    if rows.expert_S is not None:
        return _of_tiles(ops, rows, rows.expert_S, gate_up, down)
    tiles = _Tiles.of(counts_E, len(rows))
    y_MD = _of_tiles(ops, rows.index_select(0, tiles.row_M), tiles.expert_M, gate_up, down)
    return y_MD.index_select(0, tiles.slot_S)


@Composed
def sort_rows_fp8(
    ops: Ops, x_TD: FP8Rows, ids_TK: Tensor, num_experts: int, num_rows: int
) -> tuple[FP8Rows, Tensor, Tensor]:
    """Rows go straight into tiles, and `combine_rows` finds their results there: each of them is moved once."""
    if num_rows < FULL_TILES * num_experts * _tile():
        raise Declined(f"lays out {FULL_TILES} tiles for each expert, or more")
    counts_E, token_of_row_S, row_TK = ops.group_rows(ids_TK, num_experts)
    tiles = _Tiles.of(counts_E, num_rows)
    rows = x_TD.index_select(0, token_of_row_S.index_select(0, tiles.row_M))
    slot_TK = tiles.slot_S[row_TK.clamp_min(0)].where(row_TK >= 0, -1)
    return attrs.evolve(rows, expert_S=tiles.expert_M), tiles.slots_E, slot_TK


def _of_tiles(ops: Ops, rows: FP8Rows, expert_M: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    """Do as `grouped_mlp_fp8` with rows in tiles, int32 [M] with the expert of each."""

    def multiply(rows: FP8Rows, stack: FP8Blocks) -> Tensor:
        y_MO = rows.new_empty((len(rows), stack.numbers.shape[1]))
        _call(CONTIGUOUS)(_pair(rows), _pair(stack), y_MO, expert_M)
        return y_MO

    return multiply(ops.gated_silu_fp8(multiply(rows, gate_up), ue8m0=down.ue8m0), down)


def _in_room(ops: Ops, rows: FP8Rows, counts_E: Tensor, gate_up: FP8Blocks, down: FP8Blocks) -> Tensor:
    """Do as `grouped_mlp_fp8` with room for N rows per expert."""
    num_experts, room = rows.shape[:2]
    counts_E, known = counts_E.to(torch.int32), rows.expected
    expected = max(1, room // EXPECTED_SHARE if known is None else known)

    def multiply(rows: FP8Rows, weight: FP8Blocks) -> Tensor:
        y_ENO = rows.new_empty((num_experts, room, weight.numbers.shape[1]))
        _call(MASKED)(_pair(rows), _pair(weight), y_ENO, counts_E, expected)
        return y_ENO

    # most of the room is empty: with room for 8192 rows of 9 experts, 0.8 GB that nobody reads
    return multiply(ops.gated_silu_fp8(multiply(rows, gate_up), ue8m0=down.ue8m0, counts_E=counts_E), down)


@attrs.frozen
class _Tiles:
    """Sorted rows laid out anew, so that the rows of every expert begin a tile: the library multiplies a tile with one
    expert's matrix.

    There are M slots, as many as any counts could need, and those of expert e are `slots_E[e]`. Slot m holds row
    `row_M[m]` for expert `expert_M[m]` (int32, -1 where the slot is not used); row s is in slot `slot_S[s]`."""

    slots_E: Tensor
    row_M: Tensor
    expert_M: Tensor
    slot_S: Tensor

    @classmethod
    def of(cls, counts_E: Tensor, num_rows: int) -> _Tiles:
        """Lay out rows. Waits for nothing."""
        tile, last, device = _tile(), len(counts_E) - 1, counts_E.device
        num_slots = (num_rows + min(num_rows, last + 1) * (tile - 1)) // tile * tile
        slots_E = (counts_E + tile - 1) // tile * tile
        row_ends_E, slot_ends_E = counts_E.cumsum(0), slots_E.cumsum(0)
        first_row_E, first_slot_E = row_ends_E - counts_E, slot_ends_E - slots_E

        slot_M = torch.arange(num_slots, device=device, dtype=torch.int64)
        expert_M = torch.searchsorted(slot_ends_E, slot_M, right=True).clamp_max(last)
        offset_M = slot_M - first_slot_E[expert_M]
        used_M = offset_M < counts_E[expert_M]
        row_S = torch.arange(num_rows, device=device, dtype=torch.int64)
        expert_S = torch.searchsorted(row_ends_E, row_S, right=True).clamp_max(last)
        return cls(
            slots_E=slots_E,
            row_M=(first_row_E[expert_M] + offset_M).where(used_M, 0),
            expert_M=expert_M.where(used_M, -1).to(torch.int32),
            # rows that no expert has are behind the last one, and may get any result
            slot_S=(first_slot_E[expert_S] + row_S - first_row_E[expert_S]).clamp_max(num_slots - 1),
        )


def _tile() -> int:
    tile: int = _call(ALIGNMENT)()
    return tile


def _call(names: tuple[str, ...]) -> Any:
    library = importlib.import_module("deep_gemm")
    return next(getattr(library, name) for name in names if hasattr(library, name))


def _pair(value: FP8Rows | FP8Blocks) -> tuple[Tensor, Tensor]:
    """Return numbers and scales, as the library takes them."""
    return (value.numbers_TI, value.scales_TN) if isinstance(value, FP8Rows) else (value.numbers, value.scale)


def _check(x: Tensor | FP8Rows, *weights: FP8Blocks) -> None:
    """Raise Declined where rows cannot be multiplied by these matrices."""
    if x.dtype != torch.bfloat16:
        raise Declined(f"writes bfloat16, these rows are of {x.dtype}")
    for weight in weights:
        outputs, inputs = weight.numbers.shape[-2:]
        if inputs % BLOCK or outputs % OUTPUTS_STEP:
            raise Declined(
                f"multiplies matrices with rows in steps of {OUTPUTS_STEP} and columns in steps of {BLOCK}, "
                f"this one is {outputs} x {inputs}"
            )
        if weight.parts > 1 and outputs // weight.parts % BLOCK:
            rows = outputs // weight.parts
            raise Declined(f"reads one scale for {BLOCK} rows, and a part of {rows} rows ends within a block")
        if not (weight.numbers.is_contiguous() and weight.scale.is_contiguous()):
            raise Declined("reads matrices that are dense in memory")


DECLINES = ("linear[fp8]", "grouped_mlp[fp8]", "sort_rows_fp8")
