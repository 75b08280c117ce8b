"""What a graph is for a device, for a CPU: the calls of a step, recorded once and made again.

Beside its kernels a step of a CPU is Python: shapes that are looked at, memory for results, arguments. A recording
keeps what is left when all that is known: every kernel with the addresses it was given, and every op of torch with its
tensors. `replay` makes these calls again, in their order and on the same memory. What differs from step to step must
lie in tensors: a value that Python looked at would be in the recording for good, and so `looks` tells of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pdinfer.errors import PDInferError

_here = threading.local()

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COPIES = frozenset({"_to_copy", "clone", "to", "contiguous"})
"""The ops whose result is their first argument, in another dtype or order."""
_LOOKS = frozenset({"tolist", "numpy", "__array__"})
"""What torch's modes for ops do not see."""
_LOOKING_OPS = frozenset({"is_nonzero", "equal", "repeat_interleave", "nonzero", "masked_select", "unique"})
_BY_MASK = (torch.bool, torch.uint8)


class Recording:
    """The calls of one run of a function in one thread."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        """The calls by which Python looked at values, or made memory whose size follows from values. With any of them
        the recording must not be replayed."""
        self._calls: list[Callable[[], object]] = []
        self._memory: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that the recording keeps for results."""
        return sum(result.untyped_storage().nbytes() for result in self._memory.values())

    @classmethod
    def of(cls, run: Callable[[], object]) -> Recording:
        """Run the function, and record what it calls in this thread."""
        recording = cls()
        _here.recording = recording
        try:
            with _Ops(recording), _Looks(recording):
                run()
        finally:
            _here.recording = None
        return recording

    def replay(self) -> None:
        """Make the calls again. Raises PDInferError where a kernel says that it could not do its work."""
        for call in self._calls:
            call()

    def kernel(self, function: Callable[..., Any], failure: str | None = None) -> Callable[..., Any]:
        """Return what calls a kernel and records the call. `failure` is a sentence about another result than 0."""

        def call(*arguments: Any) -> Any:
            again = partial(function, *arguments)
            self._calls.append(again if failure is None else partial(_checked, again, failure))
            return again()

        return call

    def ran(self, op: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        """Record an op of torch that gave this result."""
        name = str(op).split(".")[1]
        results = list(_tensors([result]))
        if name in _LOOKING_OPS or torch.Tag.data_dependent_output in op.tags or _follows_values(op, name, arguments):
            self.looks.append(name)
        given = {_storage(each) for each in _tensors((*arguments, *options.values()))}
        made = [each for each in results if _storage(each) not in given]
        self._memory.update((_storage(each), each) for each in made)
        again = partial(op, *arguments, **options)
        if not made:  # a view is there already, and anything else has changed what it was given
            if not op.is_view:
                self._calls.append(again)
        elif name in _COPIES:
            self._calls.append(partial(made[0].copy_, arguments[0]))
        elif name not in _ALLOCATIONS:
            self._calls.append(partial(_redo, again, results))


def recording_here() -> Recording | None:
    """Return the recording that this thread is in, if it is in one."""
    recording: Recording | None = getattr(_here, "recording", None)
    return recording


class RecordedLibrary:
    """A library of kernels whose calls are recorded, but for `queries`, whose answers do not follow from memory.
    `failures` are sentences about kernels that return another number than 0, with a place for the number."""

    def __init__(
        self, library: Any, recording: Recording, *, queries: Collection[str], failures: Mapping[str, str]
    ) -> None:
        self._library = library
        self._recording = recording
        self._queries = queries
        self._failures = failures

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._library, name)
        if name in self._queries:
            return function
        return self._recording.kernel(function, self._failures.get(name))


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch's compiler alone: to hide this mode from it torch would import all of it, for seconds in the
        middle of an answer."""
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self._recording.ran(op, args, kwargs or {}, result)
        return result


class _Looks(TorchFunctionMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", None) in _LOOKS:
            self._recording.looks.append(function.__name__)
        return function(*args, **(kwargs or {}))


def _follows_values(op: Any, name: str, arguments: Sequence[Any]) -> bool:
    """Return whether the shape of a result follows from values. Of `index` only masks make it so."""
    if name == "index":
        return any(each.dtype in _BY_MASK for each in _tensors(arguments[1:]))
    return torch.Tag.dynamic_output_shape in op.tags


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _redo(again: Callable[[], Any], results: Sequence[Tensor]) -> None:
    made = again()
    for before, now in zip(results, [made] if isinstance(made, Tensor) else made, strict=True):
        before.copy_(now)


def _checked(again: partial[Any], failure: str) -> None:
    result = again()
    if result:
        raise PDInferError(f"the kernel {again.func.__name__} of a recorded step {failure.format(result)}")
