"""Calls that are recorded on a CPU and made again."""

from __future__ import annotations

import ctypes
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.process.recording import _LOOKS, _PLAIN, RecordedLibrary, Recording, here
from tests.waiting import check_ends, started

ROOT = Path(__file__).parents[3]
TRIED = Path(__file__).with_name("torch_versions.toml")


def in_place_by_a_sign(x: Tensor) -> Tensor:
    found = x.to(torch.int64)
    found &= 3
    return found


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: (x * 2 + 1).cos(),
    "dtype": lambda x: x.to(torch.bfloat16).float(),
    "a view that is read": lambda x: x.view(-1)[2:5] + 1,
    "a view that is written": lambda x: (x * 0).view(-1)[1:3].add_(x.view(-1)[:2]),
    "a part": lambda x: x.tensor_split((2,), -1)[1].contiguous() * 2,
    "in place": lambda x: x.clone().mul_(3).add_(1),
    "in place by a sign": in_place_by_a_sign,
    "into a given tensor": lambda x: torch.add(x, 1, out=torch.empty(3, 4)),
    "a product": lambda x: x @ x.T,
    "products": lambda x: torch.bmm(x[None], x.T[None]),
    "where": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_gives_what_new_values_give(name: str) -> None:
    function, results = FUNCTIONS[name], []
    with torch.no_grad():
        x = torch.randn(3, 4)
        recording = Recording.of(lambda: results.append(function(x)))
        assert recording.refusal is None
        assert results[0].equal(function(x))
        for _ in range(3):
            x.copy_(torch.randn(3, 4))
            recording.replay()
            assert results[0].equal(function(x))


def test_what_is_moved_on_moves_on_with_every_replay() -> None:
    """As positions do: an op in place of a tensor from before."""
    position, seen = torch.zeros(2, dtype=torch.int64), []

    def step() -> None:
        seen.append(position * 10)
        position.add_(1)

    recording = Recording.of(step)
    recording.replay()
    recording.replay()
    assert position.tolist() == [3, 3]
    assert seen[0].tolist() == [20, 20]


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "int": lambda x: int(x[0, 0]),
    "bool": lambda x: bool(x[0, 0] > 0),
    "item": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: memoryview(x.__array__()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 0),
    "equal": lambda x: x.equal(x),
    "a draw": lambda x: x.clone().uniform_(),
    "a draw by element": lambda x: torch.rrelu(x, training=True),
    "several results": lambda x: x.topk(2),
    "frexp": torch.frexp,
    "rows by number": lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64)),
    "made anew": lambda x: torch.arange(4),
    "a list of tensors": lambda x: torch.stack((x, x)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_follow_shapes_alone_refuses(name: str) -> None:
    x = torch.randn(3, 4)
    assert Recording.of(lambda: REFUSED[name](x)).refusal is not None


def test_its_memory_is_counted_once_and_kept() -> None:
    x = torch.randn(8, 8)

    def step() -> None:
        (x + 1).view(-1)[:3].neg_()

    recording = Recording.of(step)
    assert recording.num_bytes == 8 * 8 * 4


class Kernels(ctypes.CDLL):
    """A library without a file: two functions of C, `strlen` and `abs`."""

    def __init__(self) -> None:
        super().__init__(None)
        self.strlen.argtypes, self.strlen.restype = (ctypes.c_void_p,), ctypes.c_int64
        self.abs.argtypes, self.abs.restype = (ctypes.c_int,), ctypes.c_int


def test_kernels_are_called_again_and_a_failure_is_told() -> None:
    text = torch.zeros(8, dtype=torch.uint8)

    def step() -> None:
        recording = here.recording
        assert recording is not None
        library = RecordedLibrary(Kernels(), recording, queries={"abs"}, failures={"strlen": "found {} letters"})
        assert library.abs(-3) == 3
        assert library.strlen(text.data_ptr()) == 0

    recording = Recording.of(step)
    recording.replay()
    text[:2] = 65
    with pytest.raises(PDInferError, match="the kernel strlen of a recorded step found 2 letters"):
        recording.replay()


def test_other_threads_are_not_recorded() -> None:
    x, found = torch.zeros(1), []

    def other() -> None:
        found.append(here.recording)
        x.add_(1)

    def step() -> None:
        check_ends(started(other))

    recording = Recording.of(step)
    recording.replay()
    assert (found, x.item()) == ([None], 1)


def test_what_is_raised_while_recording_is_raised_and_ends_it() -> None:
    with pytest.raises(ZeroDivisionError):
        Recording.of(lambda: 1 // 0)
    assert here.recording is None


# -- what recordings know of torch -----------------------------------------------------------------------------------


def ops_of_torch() -> Iterator[tuple[str, Any]]:
    """Yield every op of torch with its name, once for each kind of arguments."""
    for name in {schema.name for schema in torch._C._jit_get_all_schemas()}:
        op = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for kind in [] if op is None else op.overloads():
            yield op.__name__, getattr(op, kind)


def test_the_ops_and_methods_that_are_known_by_name_are_there() -> None:
    assert {name for name, _ in ops_of_torch()} >= _PLAIN
    assert {*dir(Tensor)} >= _LOOKS


def test_no_op_but_new_memory_has_empty_in_its_name() -> None:
    assert {name for name, _ in ops_of_torch() if "empty" in name} == {
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
        *("empty_quantized", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    }


def test_pointwise_ops_follow_shapes_but_for_those_that_torch_tags_otherwise() -> None:
    """`rrelu` draws, but never runs itself: torch makes other ops of it, and one of them refuses."""
    otherwise = {torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
    pointwise = [(name, {*op.tags}) for name, op in ops_of_torch() if torch.Tag.pointwise in op.tags]
    assert len(pointwise) > 500
    assert {name for name, tags in pointwise if tags & otherwise} == {"equal", "rrelu"}


def test_recorded_steps_were_tried_with_this_torch_and_all_from_the_oldest_that_is_declared() -> None:
    tried = {minor_of(version): last for version, last in tomllib.loads(TRIED.read_text("utf-8")).items()}
    (least,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    here = minor_of(torch.__version__)
    assert here in tried, f"torch {torch.__version__} is not among those of {TRIED.name}, which says what to run"
    missing = {(2, minor) for minor in range(minor_of(least)[1], max(tried)[1])} - {*tried}
    assert not missing, f"{TRIED.name} lacks {missing}"
    assert all(re.fullmatch(r"\d+ passed", last) for last in tried.values())


def minor_of(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
