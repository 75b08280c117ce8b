"""Products with weights in FP8 blocks: one matrix, and experts whose rows are in a room each or one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from case import BLOCK, HIDDEN, MOE_INTERMEDIATE, TOLERANCE, Case, Goal, Work, draw, draw_blocks, draw_four_bits

from pdinfer.kernels import OpSpec, reference, resolve_ops
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.four_bits import GROUP, MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks

ROOM = 128
WIDE_ROOM = 8192
"""Rows of each expert in the low-latency mode of 32 ranks with 256 tokens each."""
MEMORY, COMPUTE = Goal("copy", 0.65, 0.80), Goal("2 x bf16", 0.40, 0.55)
BF16 = Goal("bf16", 0.30, 0.45)


def rounded(x: torch.Tensor) -> FP8Rows:
    """Return activations as products get them from a norm."""
    return reference.quantize_fp8(x, ue8m0=False)


def row_bytes(channels: int) -> int:
    """Return the bytes of one row in FP8 with its scales."""
    return channels + 4 * -(-channels // BLOCK)


def matrix_bytes(rows: int, columns: int) -> int:
    """Return the bytes of one matrix in FP8 blocks."""
    return rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK)


@attrs.frozen(kw_only=True)
class Dense(Case):
    """`linear_fp8` of a prefill chunk, whose rows were rounded before."""

    family: ClassVar[str] = "dense"
    op: ClassVar[str] = "linear[fp8]"
    rows: int
    outputs: int
    channels: int
    goal: Goal = COMPUTE

    @property
    def name(self) -> str:
        return f"dense FP8, {self.rows} x {self.outputs} x {self.channels}"

    @property
    def work(self) -> Work:
        moved = self.rows * (row_bytes(self.channels) + 2 * self.outputs) + matrix_bytes(self.outputs, self.channels)
        return Work(num_bytes=moved, flops=2 * self.rows * self.outputs * self.channels, in_fp8=True)

    def small(self) -> Case:
        return attrs.evolve(self, rows=min(self.rows, 200))

    def tiny(self) -> Case:
        return attrs.evolve(self, rows=min(self.rows, 20), outputs=64 + 16 * (self.outputs % BLOCK > 0), channels=256)

    def inputs(self, device: torch.device, seed: int) -> Any:
        weight = draw_blocks(device, seed, self.outputs, self.channels)
        return rounded(draw(device, seed + 2, self.rows, self.channels)), weight

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs)

    def rivals(self, inputs: Any) -> dict[str, Callable[[], Any]]:
        """Return the same product in bfloat16."""
        x_TI, weight_OI = inputs[0].floats(), inputs[1].numbers.to(torch.bfloat16)
        return {"linear bf16": lambda: F.linear(x_TI, weight_OI)}


@attrs.frozen(kw_only=True)
class Experts(Case):
    """The gated MLPs of some experts, each on `rows` rows: two grouped products with the activation in between."""

    op: ClassVar[str] = "grouped_mlp[fp8]"
    tolerance: ClassVar[float] = 4e-2
    """What is between the products is rounded to FP8, where a last bit moves some numbers to the next step."""
    experts: int
    rows: int
    sizes: tuple[int, int] = (HIDDEN, MOE_INTERMEDIATE)

    @property
    def work(self) -> Work:
        hidden, intermediate = self.sizes
        weights = matrix_bytes(2 * intermediate, hidden) + matrix_bytes(hidden, intermediate)
        num_rows = self.experts * self.rows
        return Work(
            num_bytes=self.experts * weights + num_rows * (row_bytes(hidden) + 2 * hidden),
            flops=6 * num_rows * hidden * intermediate,
            in_fp8=True,
        )

    def small(self) -> Case:
        return attrs.evolve(self, experts=3, rows=min(self.rows, 150))

    def tiny(self) -> Case:
        return attrs.evolve(self, experts=2, rows=min(self.rows, 5), sizes=(256, 128))

    def weights(self, device: torch.device, seed: int) -> tuple[FP8Blocks, FP8Blocks]:
        hidden, intermediate = self.sizes
        gate_up = draw_blocks(device, seed, self.experts, 2 * intermediate, hidden, parts=2)
        return gate_up, draw_blocks(device, seed + 1, self.experts, hidden, intermediate)

    def counts(self, device: torch.device) -> torch.Tensor:
        return torch.full((self.experts,), self.rows, device=device, dtype=torch.int32)

    def rivals(self, inputs: Any) -> dict[str, Callable[[], Any]]:
        """Return torch's grouped products in bfloat16, of rows one after another."""
        x, counts_E, gate_up, down = inputs
        hidden, intermediate = self.sizes
        x_SD = x.floats().view(self.experts, -1, hidden)[:, : self.rows].reshape(-1, hidden)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate_up_EDJ, down_EID = (weight.numbers.to(torch.bfloat16).mT for weight in (gate_up, down))

        def run() -> torch.Tensor:
            gate, up = torch._grouped_mm(x_SD, gate_up_EDJ, offs=ends_E).split(intermediate, -1)  # noqa: SLF001 torch's own name
            return torch._grouped_mm(F.silu(gate) * up, down_EID, offs=ends_E)  # noqa: SLF001

        return {"grouped_mm bf16": run} if hasattr(torch, "_grouped_mm") else {}


@attrs.frozen(kw_only=True)
class MaskedExperts(Experts):
    """Experts of a decode step: room for rows of each, of which the first few are there."""

    family: ClassVar[str] = "masked"
    goal: Goal = MEMORY
    room: int = ROOM

    @property
    def name(self) -> str:
        return f"masked grouped FP8, {self.experts} experts, {self.rows} of {self.room} rows"

    def tiny(self) -> Case:
        return attrs.evolve(super().tiny(), room=min(self.room, ROOM))

    def inputs(self, device: torch.device, seed: int) -> Any:
        x_END = rounded(draw(device, seed + 2, self.experts, self.room, self.sizes[0]))
        return x_END, self.counts(device), *self.weights(device, seed)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs)[:, : self.rows]


@attrs.frozen(kw_only=True)
class ContiguousExperts(Experts):
    """Experts of a prefill chunk: rows of one expert after those of another."""

    family: ClassVar[str] = "contiguous"
    goal: Goal = COMPUTE

    @property
    def name(self) -> str:
        hidden, intermediate = self.sizes
        return f"contiguous grouped FP8, {self.experts} x {self.rows} x {2 * intermediate} x {hidden}"

    def inputs(self, device: torch.device, seed: int) -> Any:
        x_SD = rounded(draw(device, seed + 2, self.experts * self.rows, self.sizes[0]))
        return x_SD, self.counts(device), *self.weights(device, seed)

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs)


@attrs.frozen(kw_only=True)
class PackedExperts(Experts):
    """Experts in four bits on rows in bfloat16: in `room` for some rows of each, or one after another. Rivals are the
    same sizes in bfloat16 and FP8."""

    family: ClassVar[str] = "packed"
    tolerance: ClassVar[float] = TOLERANCE
    kind: type[FourBits]
    room: int = 0
    goal: Goal = MEMORY

    @property
    def op(self) -> str:
        return f"grouped_mlp[{self.kind.name}]"

    @property
    def name(self) -> str:
        rows = f"{self.rows} of {self.room}" if self.room else f"{self.rows} sorted"
        return f"{self.kind.name} grouped, {self.experts} experts, {rows} rows"

    @property
    def work(self) -> Work:
        hidden, intermediate = self.sizes
        scale_bytes = 2 if self.kind is Int4 else 1
        weights = 3 * hidden * intermediate // GROUP * (GROUP // 2 + scale_bytes)
        num_rows = self.experts * self.rows
        return Work(
            num_bytes=self.experts * weights + num_rows * 4 * hidden, flops=6 * num_rows * hidden * intermediate
        )

    def small(self) -> Case:
        return attrs.evolve(self, rows=min(self.rows, 150))  # with other experts kernels would be compiled twice

    def spec(self, device: torch.device | str) -> OpSpec:
        return OpSpec(device=device, weight_formats={self.kind.name})

    def inputs(self, device: torch.device, seed: int) -> Any:
        hidden, intermediate = self.sizes
        shape = (self.experts, self.room, hidden) if self.room else (self.experts * self.rows, hidden)
        gate_up = draw_four_bits(self.kind, device, seed, self.experts, 2 * intermediate, hidden)
        down = draw_four_bits(self.kind, device, seed + 1, self.experts, hidden, intermediate)
        return draw(device, seed + 2, *shape), self.counts(device), gate_up, down

    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        return op(*inputs)[:, : self.rows] if self.room else op(*inputs)

    def rivals(self, inputs: Any) -> dict[str, Callable[[], Any]]:
        x, counts_E, _, _ = inputs
        hidden, intermediate = self.sizes
        shapes = ((2 * intermediate, hidden), (hidden, intermediate))
        floats = [draw(x.device, 0, self.experts, *shape).mul_(shape[1] ** -0.5) for shape in shapes]
        blocks, rows = self.weights(x.device, 0), rounded(x)
        names = ("grouped_mlp", "grouped_mlp[fp8]")
        forced = dict.fromkeys(names, "triton") if x.device.type == "cuda" else None
        in_bf16, in_fp8 = (resolve_ops(OpSpec(device=x.device), forced=forced).ops[name] for name in names)
        return {
            "experts in bf16": lambda: in_bf16(x, counts_E, *floats),
            "experts in FP8": lambda: in_fp8(rows, counts_E, *blocks),
        }


MATRICES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432))
"""Outputs and channels of q_a with kv_a, q_b, kv_b, o, and of a dense MLP."""
CASES: tuple[Case, ...] = (
    *(MaskedExperts(experts=32, rows=rows) for rows in (1, 4, 16, 32)),
    MaskedExperts(experts=32, rows=16, room=16),
    *(MaskedExperts(experts=9, rows=rows, room=WIDE_ROOM) for rows in (4, 113)),
    *(
        PackedExperts(kind=kind, experts=12, rows=rows, room=room)
        for kind in (Int4, MXFP4)
        for room in (ROOM, 0)
        for rows in (1, 4, 16, 64)
    ),
    *(PackedExperts(kind=kind, experts=12, rows=4096, goal=BF16) for kind in (Int4, MXFP4)),
    ContiguousExperts(experts=4, rows=8192),
    *(ContiguousExperts(experts=32, rows=rows, goal=MEMORY) for rows in (4, 32)),
    *(Dense(rows=4096, outputs=outputs, channels=channels) for outputs, channels in MATRICES),
    *(
        Dense(rows=rows, outputs=outputs, channels=channels, goal=MEMORY)
        for outputs, channels in MATRICES[:2] + MATRICES[3:4]
        for rows in (1, 16, 64, 256)
    ),
)
