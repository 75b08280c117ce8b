"""How a matrix of weights is held in memory: plain floats, or small numbers with the scales that give them their
values.

A `Weight` is a float tensor [..., O, I] or one of the values below. These are frozen, and their tensors may change in
place but never move. Leading axes are experts. A weight of `parts` matrices, one below the other, is quantized part by
part. All tensors of a format but strips are cut alike along their second axis from the end, so that `part` need not
know them.

Sources: FP8 blocks, DeepSeek-V3 report (arXiv 2412.19437) section 3.3; INT8, the W8A8 and W8A8_DYNAMIC schemes of
modelslim (https://gitee.com/ascend/msit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.strips import STRIP, from_strips, into_strips, new_strips, shape_of
from pdinfer.values import brief

BLOCK = 128
"""The rows and columns of weights that share an FP8 scale, and the channels of an activation that share one."""
FP8_MAX = 448.0
MIN_AMAX = 1e-12
"""The amax assumed for a block or a row of zeros, so that its scale is not zero."""


@attrs.frozen(eq=False, kw_only=True)
class FP8Blocks:
    """e4m3 numbers with one float32 scale per block of 128 x 128. Blocks at the edges are smaller.

    `scale` is [..., parts * ceil(O / parts / 128), ceil(I / 128)]. With `ue8m0` activations get power-of-two scales.
    """

    __repr__ = brief

    numbers: Tensor
    scale: Tensor
    ue8m0: bool = False
    parts: int = 1

    @property
    def scale_of_row(self) -> Tensor:
        """Return the scales of every row: float32 [..., O, ceil(I / 128)]."""
        rows = self.numbers.shape[-2] // self.parts
        of_part = [scale.repeat_interleave(BLOCK, -2)[..., :rows, :] for scale in self.scale.chunk(self.parts, -2)]
        return torch.cat(of_part, -2)


@attrs.frozen(eq=False, kw_only=True)
class Int8Dynamic:
    """int8 numbers and one float32 scale per row, [..., O, 1]. Activations are scaled per token at run time."""

    __repr__ = brief

    numbers: Tensor
    scale: Tensor


@attrs.frozen(eq=False, kw_only=True)
class Int8Static:
    """int8 numbers with one float32 scale per row, and a scale and offset for activations that were found beforehand.

    `input_scale` and `input_offset` are float32 [..., parts, 1]. `output_scale` (float32) and `output_offset` (int32)
    are [..., O, 1]: y = (x_int8 . numbers + output_offset) * output_scale. The checkpoint calls them deq_scale and
    quant_bias.
    """

    __repr__ = brief

    numbers: Tensor
    scale: Tensor
    input_scale: Tensor
    input_offset: Tensor
    output_scale: Tensor
    output_offset: Tensor

    @property
    def bias(self) -> Tensor:
        """What `output_offset` adds beyond undoing `input_offset`: float32 [..., O, 1], 0 in a layer without bias."""
        input_offset = self.input_offset.double().repeat_interleave(
            self.numbers.shape[-2] // self.input_offset.shape[-2], -2
        )
        undone = input_offset * self.numbers.double().sum(-1, keepdim=True)
        return ((self.output_offset + undone) * self.output_scale).float()


@attrs.frozen(eq=False, kw_only=True)
class FloatWithBias:
    """The float form of an `Int8Static`: floats [..., O, I], and the bias [..., O, 1] that its `output_offset` held."""

    __repr__ = brief

    numbers: Tensor
    bias: Tensor


@attrs.frozen(eq=False)
class Strips:
    """Matrices of bfloat16 in the order in which CPU kernels multiply them (`strips.py`): a permutation, in as many
    bytes."""

    __repr__ = brief

    numbers: Tensor

    @property
    def parts(self) -> int:
        return self.numbers.shape[-4]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows of all parts, and the columns."""
        return shape_of(self.numbers)

    @staticmethod
    def fit(parts: int, rows: int, columns: int) -> bool:
        """Return whether `parts` matrices [rows, columns] are whole strips."""
        return parts in (1, 2) and rows % STRIP == columns % STRIP == 0

    def matrix(self) -> Tensor:
        """Return the bfloat16 values in their order, [..., O, I], as a new tensor."""
        return from_strips(self.numbers)

    def fill(self, matrix_OI: Tensor) -> None:
        """Write bfloat16 values [..., O, I] to their places."""
        into_strips(self.numbers, matrix_OI)


@attrs.frozen(eq=False, kw_only=True)
class FP8Strips:
    """The numbers of `FP8Blocks` in the order of `Strips`, with the same scales: a permutation, in as many bytes."""

    __repr__ = brief

    numbers: Tensor
    scale: Tensor
    ue8m0: bool = False

    @property
    def parts(self) -> int:
        return self.numbers.shape[-4]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows of all parts, and the columns."""
        return shape_of(self.numbers)

    def blocks(self) -> FP8Blocks:
        """Return the numbers in their order, as a new tensor, with these scales."""
        return FP8Blocks(numbers=from_strips(self.numbers), scale=self.scale, ue8m0=self.ue8m0, parts=self.parts)

    def fill(self, blocks: FP8Blocks) -> None:
        """Write numbers to their places, and scales."""
        into_strips(self.numbers, blocks.numbers)
        self.scale.copy_(blocks.scale)


Quantized = FP8Blocks | Int8Dynamic | Int8Static
Stored = Tensor | Quantized
Weight = Stored | FloatWithBias | Strips | FP8Strips
FP8 = (FP8Blocks, FP8Strips)
"""The formats whose products round activations to FP8."""
IN_STRIPS: Mapping[type, type] = MappingProxyType({Tensor: Strips, FP8Blocks: FP8Strips})
"""The formats that can lie in strips, and what they are called then."""


@attrs.frozen
class Shard:
    """The part of a matrix [O, I] that a rank holds: number `index` of `size` equal parts, cut along O (axis 0) or I
    (axis 1)."""

    index: int = 0
    size: int = 1
    axis: int = 0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(n // self.size if axis == self.axis else n for axis, n in enumerate(whole))

    def of(self, length: int) -> range:
        """Return the range of the part in an axis of `length` elements, or of `length` blocks where parts consist of
        whole blocks."""
        return range(length * self.index // self.size, length * (self.index + 1) // self.size)


WHOLE = Shard()


def empty(
    kind: type, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device, ue8m0: bool = False
) -> Weight:
    """Return an uninitialised weight of class `kind` (Tensor for floats of `dtype`) and of `shape` (experts, parts,
    rows of a part, columns). The class says what shapes its tensors have."""
    experts, parts, rows, columns = shape

    def new(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(experts, parts * rows, columns, dtype=dtype, device=device)

    if kind in (Strips, FP8Strips):
        numbers = new_strips(*shape, dtype=torch.float8_e4m3fn if kind is FP8Strips else dtype, device=device)
        if kind is Strips:
            return Strips(numbers)
        return FP8Strips(numbers=numbers, scale=new(-(-rows // BLOCK), -(-columns // BLOCK)), ue8m0=ue8m0)
    if kind is FP8Blocks:
        scale = new(-(-rows // BLOCK), -(-columns // BLOCK))
        return FP8Blocks(numbers=new(rows, columns, torch.float8_e4m3fn), scale=scale, ue8m0=ue8m0, parts=parts)
    if kind is Int8Dynamic:
        return Int8Dynamic(numbers=new(rows, columns, torch.int8), scale=new(rows, 1))
    if kind is Int8Static:
        return Int8Static(
            numbers=new(rows, columns, torch.int8),
            scale=new(rows, 1),
            input_scale=new(1, 1),
            input_offset=new(1, 1),
            output_scale=new(rows, 1),
            output_offset=new(rows, 1, torch.int32),
        )
    numbers = new(rows, columns, dtype)
    return FloatWithBias(numbers=numbers, bias=new(rows, 1, dtype)) if kind is FloatWithBias else numbers


def part(weight: Weight, index: int, parts: int) -> Weight:
    """Return a view of one of the `parts` matrices that lie one below the other in `weight`."""
    if isinstance(weight, Strips):
        return Strips(weight.numbers.chunk(parts, -4)[index])
    if isinstance(weight, FP8Strips):
        scale = weight.scale.chunk(parts, -2)[index]
        return attrs.evolve(weight, numbers=weight.numbers.chunk(parts, -4)[index], scale=scale)
    view = map_tensors(weight, lambda tensor: tensor.chunk(parts, -2)[index])
    return attrs.evolve(view, parts=1) if isinstance(view, FP8Blocks) else view


def expert(weight: Weight, index: int) -> Weight:
    """Return a view of one expert's weight in a stack of them."""
    return map_tensors(weight, lambda tensor: tensor[index])


def places(stack: Weight, names: Sequence[Sequence[str]]) -> Iterator[tuple[str, Weight]]:
    """Yield each name with a view of its matrix in `stack`, which holds one expert for each list of names."""
    for index, parts in enumerate(names):
        for at, name in enumerate(parts):
            yield name, part(expert(stack, index), at, len(parts))


def columns_of(weight: Stored, shard: Shard) -> Stored:
    """Return the part of a whole matrix that `shard`, which cuts columns, keeps. What is added to every output goes to
    the first part alone, so that the products of all parts add up to that of the whole."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[..., shard.of(tensor.shape[-1]).start : shard.of(tensor.shape[-1]).stop]

    if isinstance(weight, Tensor):
        return cut(weight)
    changed = attrs.evolve(weight, numbers=cut(weight.numbers))
    if isinstance(changed, FP8Blocks):
        return attrs.evolve(changed, scale=cut(changed.scale))
    if isinstance(changed, Int8Static) and isinstance(weight, Int8Static):
        sums = changed.numbers.long().sum(-1, keepdim=True)
        undone = changed.input_offset.long() * sums
        kept = -undone
        if shard.index == 0:
            kept += weight.output_offset + weight.input_offset.long() * weight.numbers.long().sum(-1, keepdim=True)
        return attrs.evolve(changed, output_offset=kept.to(torch.int32))
    return changed


def map_tensors(weight: Weight, change: Callable[[Tensor], Tensor]) -> Weight:
    """Return the weight with every tensor replaced by what `change` returns for it."""
    if isinstance(weight, Tensor):
        return change(weight)
    changed = {name: change(tensor) for name, tensor in _named_tensors(weight)}
    return attrs.evolve(weight, **changed)  # type: ignore[arg-type]


def tensors_of(weight: Weight) -> list[Tensor]:
    """Return the tensors of the weight, the numbers first."""
    return [weight] if isinstance(weight, Tensor) else [tensor for _, tensor in _named_tensors(weight)]


def num_bytes(weight: Weight) -> int:
    """Return the bytes of all tensors of the weight."""
    return sum(tensor.nbytes for tensor in tensors_of(weight))


def all_finite(tensor: Tensor) -> bool:
    """Return whether floats hold neither NaN nor infinity. This reads them at the speed of memory, and `torch.isfinite`
    at a twentieth of it."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def to_bytes(weight: Weight) -> Tensor:
    """Return all tensors of the weight, one after another, as a new uint8 tensor [num_bytes] on their device."""
    return torch.cat([_raw(tensor) for tensor in tensors_of(weight)])


def from_bytes(weight: Weight, data: Tensor) -> None:
    """Undo `to_bytes` in place: write `data`, uint8 [num_bytes], into the (contiguous) tensors of a weight of the same
    format and shape."""
    tensors = tensors_of(weight)
    for into, value in zip(tensors, torch.split(data, [tensor.nbytes for tensor in tensors]), strict=True):
        _raw(into).copy_(value)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _named_tensors(weight: FloatWithBias | Quantized | Strips | FP8Strips) -> list[tuple[str, Tensor]]:
    fields = [(field.name, getattr(weight, field.name)) for field in attrs.fields(type(weight))]
    return [(name, value) for name, value in fields if isinstance(value, Tensor)]


def assign(destination: Weight, value: Weight) -> None:
    """Write `value` into the tensors of `destination`, which is of the same format or of floats."""
    if isinstance(destination, Tensor):
        dequantize(value, destination)
    elif isinstance(destination, FP8Strips) and isinstance(value, FP8Blocks):
        destination.fill(value)
    elif isinstance(destination, Strips):
        floats = destination.numbers.new_empty(destination.shape)
        dequantize(value, floats)
        destination.fill(floats)
    elif isinstance(destination, FloatWithBias) and isinstance(value, Int8Static):
        dequantize(value, destination.numbers)
        destination.bias.copy_(value.bias)
    else:
        for into, tensor in zip(tensors_of(destination), tensors_of(value), strict=True):
            into.copy_(tensor)


def dequantize(weight: Weight, out: Tensor) -> None:
    """Write the value of `weight` to `out` [..., O, I]: float32 arithmetic, rounded once to the dtype of `out`."""
    if isinstance(weight, Tensor):
        out.copy_(weight)
    elif isinstance(weight, Strips):
        out.copy_(weight.matrix())
    elif isinstance(weight, FP8Strips):
        dequantize(weight.blocks(), out)
    elif isinstance(weight, FP8Blocks):
        dequantize_fp8(weight.numbers, weight.scale_of_row, out)
    elif isinstance(weight, FloatWithBias):
        out.copy_(weight.numbers)
    else:
        out.copy_(weight.numbers.float().mul_(weight.scale))


def quantize_fp8(matrix_OI: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [O, I], float32 scales [ceil(O / 128), ceil(I / 128)]): amax / 448 per block, or the next power of
    two."""
    rows, columns = matrix_OI.shape
    padded = torch.nn.functional.pad(matrix_OI.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / FP8_MAX
    if ue8m0:
        scale = to_power_of_two(scale)
    numbers = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(padded.shape)
    return numbers[:rows, :columns].to(torch.float8_e4m3fn), scale


def quantize_int8(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 [O, I], float32 scales [O, 1]): amax / 127 per row."""
    floats_OI = matrix_OI.float()
    scale = floats_OI.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX) / 127
    return (floats_OI / scale).round_().to(torch.int8), scale


def quotient(x: Tensor, by: float) -> Tensor:
    """Return x / by, rounded once on every device. On CUDA torch multiplies by the reciprocal of a number."""
    return x / x.new_full((), by)


def to_power_of_two(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each (positive) scale: what ue8m0 can represent. NaN and
    infinity stay as they are."""
    fraction, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    return torch.where(fraction.isfinite(), power, scale)


def dequantize_fp8(numbers: Tensor, scale_of_row: Tensor, out: Tensor) -> None:
    """Do as `dequantize` for some rows [..., rows, I] and their scales [..., rows, ceil(I / 128)]."""
    for block in range(scale_of_row.shape[-1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        out[..., columns] = e4m3_to_float(numbers[..., columns]).mul_(scale_of_row[..., block, None])


def e4m3_to_float(numbers: Tensor) -> Tensor:
    """Return float8_e4m3fn as float32, exactly and NaN as NaN, in a fresh tensor."""
    # In the place of float16's exponent and mantissa the values are 2^8 too small. The bit above them then holds a copy
    # of the sign and must become 0. Only for NaN, which is seven ones, adding one carries into that bit, and a 1 there
    # makes it float16's NaN. Torch converts e4m3 one by one on a CPU; this is several times as fast.
    bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    bits ^= (bits + 0x80).bitwise_and_(0x4000)
    return bits.view(torch.float16).float().mul_(256)
