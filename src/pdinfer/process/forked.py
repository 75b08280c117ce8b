"""What belongs to one process. A forked child has copies of it, and may neither use nor end them.

The copies share sockets, memory and processes with the parent, and have none of its threads. So at a fork every such
object of the child loses its attributes: its methods raise `Forked`, except for those that end it, which do nothing. In
the owning process no call has anything to check."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from pdinfer.errors import ConfigError, Forked
from pdinfer.process.threads import check_threads
from pdinfer.process.untraced import leave_alone

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


class _SignatureOfInit:
    """What a class takes. `inspect` says, up to Python 3.11.3, what its `__new__` takes."""

    def __get__(self, _: object, cls: type) -> inspect.Signature:
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class OfOneProcess(NotCopied):
    """Base of objects that a forked child may not use, and torch.compile leaves alone. The methods named in `_ends` do
    nothing in a child. An object with a `close` is a context manager."""

    _ends: ClassVar[frozenset[str]] = frozenset({"close"})
    __signature__ = _SignatureOfInit()

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        _PROCESS.has.add(made)
        return made

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        leave_alone(cls)
        show = cls.__repr__

        def show_either(self: OfOneProcess) -> str:
            own = f"{type(self).__name__}(a copy of one in the process that this one was forked from)"
            return own if _is_copy(self) else show(self)

        cls.__repr__ = show_either  # type: ignore[assignment]

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
        os.register_at_fork(after_in_child=self.begin_as_child)

    def begin_as_child(self) -> None:
        """Make every object that is here, all of them the parent's, a copy that refuses."""
        self.parent_computed, self.computes = self.parent_computed or self.computes, False
        inherited, self.has = list(self.has), weakref.WeakSet()
        for each in [each for each in inherited if each._is_shared_by_fork]:  # noqa: SLF001
            object.__setattr__(each, "__dict__", _as_copy(each))
        # not in the owning process: where a class has it, Python looks every attribute up more slowly
        OfOneProcess.__getattr__ = _missing  # type: ignore[attr-defined]


_PROCESS = _Process()


def _is_copy(thing: OfOneProcess) -> bool:
    return "_of_parent" in vars(thing)


def _as_copy(thing: OfOneProcess) -> dict[str, Any]:
    """Return the attributes of a copy in a child. They hide its methods, as its properties find none of their own. What
    it had is kept: a child that drops it might close what it shares."""
    methods = [name for name in dir(type(thing)) if not name.startswith("__") and callable(getattr(type(thing), name))]
    ends = dict.fromkeys(thing._ends, _nothing)  # noqa: SLF001
    return {**dict.fromkeys(methods, _refusal(thing)), **ends, "_of_parent": vars(thing)}


def _missing(thing: OfOneProcess, name: str) -> NoReturn:
    """Refuse what a copy had. Python calls this for an attribute that is not there."""
    if _is_copy(thing):
        _refusal(thing)()
    raise AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}", name=name, obj=thing)


def _refusal(thing: OfOneProcess) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Forked(
            f"this {name} belongs to the process that this one ({os.getpid()}) was forked from, and both would write "
            f"the same pages and sockets: {_WHAT_TO_DO}"
        )

    name = type(thing).__name__
    return refuse


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: this is what closing a copy does."""


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
