"""What one line of the table measures: a kernel, its sizes, the least work that it can be, and what to aim at."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.kernels import OpSpec, Rounded
from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.four_bits import GROUP, MXFP4, FourBits
from pdinfer.kernels.formats.fp8 import FP8_MAX, FP8Blocks

PAGE_SIZE = 64
LATENT, ROPE = 512, 64
HIDDEN, MOE_INTERMEDIATE = 7168, 2048
BLOCK = 128
TOLERANCE = 2e-2
"""The relative error, in the Euclidean norm, of a kernel that computes in bfloat16 or FP8 with sums in float32."""


@attrs.frozen(kw_only=True)
class Ceilings:
    """What a card can do, in bytes and operations per second: copy counts what is read and written, `read` is a sum.
    `fp8` is None where it was not measured."""

    copy: float
    read: float
    bf16: float
    fp8: float | None = None


@attrs.frozen(kw_only=True)
class Work:
    """The least that a kernel moves and computes: each input read once, each output written once."""

    num_bytes: int
    flops: int = 0
    in_fp8: bool = False

    def floor_s(self, ceilings: Ceilings) -> float:
        """Return the time below which it cannot run on a card. FP8 products run at twice the rate of bfloat16."""
        rate = 2 * ceilings.bf16 if self.in_fp8 else ceilings.bf16
        return max(self.num_bytes / ceilings.copy, self.flops / rate)


@attrs.frozen
class Goal:
    """What to reach: a share `of` the copy bandwidth ("copy"), of the bfloat16 product or twice that ("bf16", "2 x
    bf16"), or of the speed of a rival ("sdpa")."""

    of: str
    least: float
    stretch: float

    def share(self, seconds: float, work: Work, ceilings: Ceilings, rivals: Mapping[str, float]) -> float | None:
        """Return what was reached. None without the rival that the goal names."""
        if self.of == "copy":
            return work.num_bytes / ceilings.copy / seconds
        if self.of in ("bf16", "2 x bf16"):
            return work.flops / ((1 + (self.of != "bf16")) * ceilings.bf16) / seconds
        return rivals[self.of] / seconds if self.of in rivals else None


@attrs.frozen(kw_only=True)
class Case(abc.ABC):
    """A kernel at some sizes. `small` and `tiny` are cases of the same kind."""

    family: ClassVar[str]
    op: ClassVar[str]
    goal: Goal
    exact: ClassVar[bool] = False
    """Whether the result is that of the reference bit for bit."""
    tolerance: ClassVar[float] = TOLERANCE

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the table calls it: family and sizes."""

    @property
    @abc.abstractmethod
    def work(self) -> Work: ...

    @abc.abstractmethod
    def small(self) -> Case:
        """Return the case with few rows, which the reference does in no time: what is checked before it is timed."""

    @abc.abstractmethod
    def tiny(self) -> Case:
        """Return the case at sizes for a CPU."""

    @abc.abstractmethod
    def inputs(self, device: torch.device, seed: int) -> Any:
        """Draw inputs."""

    @abc.abstractmethod
    def call(self, op: Callable[..., Any], inputs: Any) -> Any:
        """Run the op, and return what it computes or writes."""

    def spec(self, device: torch.device | str) -> OpSpec:
        """Return what the op is chosen for."""
        return OpSpec(device=device, weight_formats={"fp8"})

    def compared(self, result: Any) -> Any:
        """Return the part of a result that the reference's is compared with."""
        return result

    def rivals(self, inputs: Any) -> dict[str, Callable[[], Any]]:
        """Return what else does the same, beside other providers of the op: what torch itself has, other formats."""
        return {}


def generator(device: torch.device, seed: int) -> torch.Generator | None:
    """Return a source of random numbers on a device. Tensors without memory need none."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(seed)


def draw(device: torch.device, seed: int, *shape: int) -> Tensor:
    """Return random bfloat16."""
    return torch.randn(shape, generator=generator(device, seed), device=device, dtype=torch.bfloat16)


def draw_fp8(device: torch.device, seed: int, *shape: int) -> Tensor:
    """Return random e4m3 numbers, made in parts so that the floats take little memory. Some versions of torch make NaN
    of those beyond the largest."""
    numbers = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    chance = generator(device, seed)
    flat = numbers.view(-1)
    for part in flat.split(1 << 28):
        drawn = torch.randn(part.shape, generator=chance, device=device, dtype=torch.bfloat16).mul_(100)
        part.copy_(drawn.clamp_(-FP8_MAX, FP8_MAX))
    return numbers


def draw_blocks(device: torch.device, seed: int, *shape: int, parts: int = 1) -> FP8Blocks:
    """Return a weight [..., O, I] in FP8 blocks whose products have values near one."""
    *lead, rows, columns = shape
    scales = (*lead, parts * -(-rows // parts // BLOCK), -(-columns // BLOCK))
    spread = torch.rand(scales, generator=generator(device, seed + 1), device=device) + 0.5
    return FP8Blocks(numbers=draw_fp8(device, seed, *shape), scale=spread * 0.01 * columns**-0.5, parts=parts)


def draw_four_bits(kind: type[FourBits], device: torch.device, seed: int, *shape: int) -> FourBits:
    """Return a stack of weights [E, O, I] in INT4 or MXFP4 whose products have values near one."""
    *lead, columns = shape
    numbers = torch.randint(
        256, (*lead, columns // 2), generator=generator(device, seed), device=device, dtype=torch.uint8
    )
    spread = torch.rand((*lead, columns // GROUP), generator=generator(device, seed + 1), device=device) + 0.5
    scale = (spread * 0.2 * columns**-0.5).bfloat16()
    if kind is MXFP4:
        scale = (scale.view(torch.int16) >> 7).to(torch.uint8)  # the exponent
    return kind(numbers=numbers, scale=scale)


def floats_of(result: Any) -> list[Tensor]:
    """Return all numbers of a result."""
    if isinstance(result, FP8Rows):
        return [result.floats()]
    if isinstance(result, Rounded):
        return [result.floats_TI, result.rows.floats()]
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in floats_of(part)]


def complaint(got: Any, wanted: Any, case: Case) -> str | None:
    """Return how a result of a case is wrong, or None."""
    for ours, theirs in zip(floats_of(case.compared(got)), floats_of(case.compared(wanted)), strict=True):
        if ours.shape != theirs.shape:
            return f"the result is {list(ours.shape)}, not {list(theirs.shape)}"
        if case.exact:
            if not torch.equal(ours, theirs):
                return f"{int((ours != theirs).sum())} of {ours.numel()} numbers differ"
            continue
        error = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
        if not error <= case.tolerance:  # NaN is no error below it
            return f"the relative error is {error:.2g}, more than {case.tolerance:g}"
    return None
