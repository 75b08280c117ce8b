"""What belongs to one process. A forked child has copies of it, and may neither use nor end them.

The copies share sockets, memory and processes with the parent, and have none of its threads. So in a child every such
object changes its class to one whose methods raise `Forked`, except for those that end it, which do nothing. This
happens at the fork, so in the owning process no call has anything to check.
"""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self, SupportsIndex

from pdinfer.errors import ConfigError, Forked
from pdinfer.process.openmp import check_threads

_WHAT_TO_DO = (
    'start processes with multiprocessing\'s "spawn" (or "forkserver"), or make everything anew in the child; '
    "gunicorn does so without preload"
)


class NotCopied:
    """Base of objects that `copy` and `pickle` refuse: a copy would share sockets, memory and threads."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        raise ConfigError(
            f"a {type(self).__name__} belongs to its process, and cannot be copied or pickled; make another one where "
            "it is needed"
        )


class OfOneProcess(NotCopied):
    """Base of objects that a forked child may not use. The methods named in `_ends` do nothing there. An object with a
    `close` is a context manager."""

    _ends: ClassVar[frozenset[str]] = frozenset({"close"})

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        _PROCESS.has.add(made)
        return made

    @property
    def _is_shared_by_fork(self) -> bool:
        """Whether a copy of it in a child, or here, would share anything with this one."""
        return True

    def close(self) -> None:
        """End it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return super().__reduce_ex__(protocol) if self._is_shared_by_fork else object.__reduce_ex__(self, protocol)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Process:
    """This process: the objects that belong to it, and what it inherited."""

    def __init__(self) -> None:
        self.has: weakref.WeakSet[OfOneProcess] = weakref.WeakSet()
        self.computes = False
        self.parent_computed = False
        self._forking = threading.local()  # two threads may fork at once
        os.register_at_fork(before=self.prepare, after_in_child=self.begin_as_child, after_in_parent=self.go_on)

    def prepare(self) -> None:
        """Make the classes of copies while still in the parent: in a child of a process with other libraries' threads
        and memory, the less is done the better."""
        shared = [each for each in list(self.has) if each._is_shared_by_fork]  # noqa: SLF001
        refusing = {kind: _refusing(kind) for kind in set(map(type, shared))}
        self._forking.swaps = [(each, refusing[type(each)]) for each in shared]

    def go_on(self) -> None:
        """Keep the parent as it is."""
        self._forking.swaps = []

    def begin_as_child(self) -> None:
        """Turn every object that is here, all of them the parent's, into a copy that refuses."""
        self.parent_computed, self.computes = self.parent_computed or self.computes, False
        self.has = weakref.WeakSet()
        swaps, self._forking.swaps = self._forking.swaps, []
        for each, refusing in swaps:
            object.__setattr__(each, "__class__", refusing)


_PROCESS = _Process()


def begin_to_compute(num_threads: int) -> None:
    """Announce that tensors are about to be computed with so many threads. Raise Forked in a child whose parent has
    computed: OpenMP believes that the parent's threads are waiting, the child has none of them, and it would wait for
    them for ever. Raise ConfigError as `check_threads` does."""
    if num_threads > 1 and _PROCESS.parent_computed:
        raise Forked(
            f"{num_threads} threads were to compute in a forked child of a process that has computed; torch would wait "
            f"for ever for threads that a fork does not copy: call torch.set_num_threads(1) first, or {_WHAT_TO_DO}"
        )
    check_threads(num_threads)
    _PROCESS.computes = True


def refuse(what: object) -> None:
    """Raise Forked when `what` belongs to the process that this one was forked from."""
    if getattr(type(what), "was_forked", False):
        raise Forked(_sentence(type(what).__name__))


def _sentence(name: str) -> str:
    return (
        f"this {name} belongs to the process that this one ({os.getpid()}) was forked from, and both would write the "
        f"same pages and sockets: {_WHAT_TO_DO}"
    )


def _refusing(kind: type[OfOneProcess]) -> type:
    """Return the class of a copy of a `kind`."""
    inside: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "was_forked": True}
    for name, value in {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}.items():
        if name.startswith("__"):
            continue
        if name in kind._ends:  # noqa: SLF001
            inside[name] = _nothing
        elif isinstance(value, types.FunctionType):
            inside[name] = _refusal(kind.__name__)
        elif isinstance(value, property):
            inside[name] = property(_refusal(kind.__name__))
    inside["__repr__"] = lambda _: f"{kind.__name__}(a copy of one in the process that this one was forked from)"
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(inside))


def _refusal(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise Forked(_sentence(name))

    return refused


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: this is what closing a copy does."""
