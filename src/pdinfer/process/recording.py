"""What a graph is for a device, for a CPU: the kernels of a step, recorded once and called again.

Between its kernels a step on a CPU is Python: shapes that are looked at, memory for results, arguments. A recording
keeps what is left when all that is known: every kernel with the addresses that it was given. `replay` calls them again,
in their order and on the same memory. Of torch it knows views and new memory, which need no call, and ops that follow
shapes alone, which are done again into the same results. Any other op refuses the recording, and so does any look of
Python at a value, which would be in it for good."""

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


class _Here(threading.local):
    """Of one thread: the `recording` that it is in, if it is in one."""

    recording: Recording | None = None


here = _Here()

_PLAIN = frozenset({"_to_copy", "mm", "bmm"})
"""What looks at no value, without being tagged as pointwise by torch."""
_LOOKS = frozenset({"tolist", "numpy", "__array__"})
"""The methods by which Python sees values without any op."""


_Call = tuple[partial[Any], str | None, Tensor | None]
"""What is called again, a sentence about another result than 0, and where a new result goes."""


class Recording:
    """The calls of one run of a function in one thread."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Why the recording must not be replayed, or None."""
        self._calls: list[_Call] = []
        self._memory: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that the recording keeps for results."""
        return sum(result.untyped_storage().nbytes() for result in self._memory.values())

    @classmethod
    def of(cls, run: Callable[[], object]) -> Recording:
        """Run the function, and record what it calls in this thread."""
        recording = cls()
        here.recording = recording
        try:
            with _Ops(recording), _Looks(recording):
                run()
        finally:
            here.recording = None
        return recording

    def replay(self) -> None:
        """Make the calls again. Raises PDInferError where a kernel says that it could not do its work."""
        for again, failure, result in self._calls:  # without a call of Python between them
            returned = again()
            if result is not None:
                result.copy_(returned)
            elif failure is not None and returned:
                name = again.func.__name__
                raise PDInferError(f"the kernel {name} of a recorded step {failure.format(returned)}")

    def kernel(self, function: Callable[..., Any], failure: str | None = None) -> Callable[..., Any]:
        """Return what calls a kernel and records the call. `failure` is a sentence about another result than 0."""

        def call(*arguments: Any) -> Any:
            again = partial(function, *arguments)
            self._calls.append((again, failure, None))
            return again()

        return call

    def ran(self, op: Any, arguments: Sequence[Any], options: Mapping[str, Any], result: Any) -> None:
        """Record an op of torch that gave this result."""
        if op.is_view:
            return
        name = op.overloadpacket.__name__
        if "empty" in name:
            self._keep(result)
        elif not (isinstance(result, Tensor) and (name in _PLAIN or torch.Tag.pointwise in op.tags)):
            self.refusal = self.refusal or f"torch's {name} cannot be recorded"
        elif _storage(result) in map(_storage, _tensors((*arguments, *options.values()))):
            self._calls.append((partial(op, *arguments, **options), None, None))  # in place, or into what was given
        else:
            self._keep(result)
            self._calls.append((partial(op, *arguments, **options), None, result))

    def _keep(self, result: Tensor) -> None:
        self._memory[_storage(result)] = result


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
            self._recording.refusal = f"Python looks at values on the host: {function.__name__}"
        return function(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
