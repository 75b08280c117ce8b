"""Two accelerators without one: tensors that say `gpusim:0` or `gpusim:1`, hold host data, and behave where CUDA is
strict.

A `SimTensor` is a wrapper on torch's PrivateUse1 device, which a private API of torch sets up from Python. Each op on
it, in whatever thread, runs on the host tensor inside and is counted (`tests.simulated.watch`). Host and device tensors
in one op raise HostAndDevice, tensors of two devices and products that CUDA lacks are refused. A thread begins with the
first device as its current one; an op runs on the device of its tensors all the same, and is counted where that is not
the current one: a library that knows no better would have launched it there. `tests.simulated.order` has devices,
streams and events, `tests.simulated.capture` what a CUDA graph does.

Not seen here: kernels and how they round, the order of threads of the host, how much memory there is, memory that is
freed while another stream uses it, warnings of CUDA. A copy between two devices, which CUDA has, is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import backend_registration

from pdinfer.process.memory import main_memory
from tests.simulated import order
from tests.simulated.order import Access, Memory
from tests.simulated.watch import LOCK, note, tell, where

DEVICE, OTHER = order.DEVICES
HOST = torch.device("cpu")

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
BY_ROWS = frozenset({"index_copy_", "index_add_", "index_fill_", "index_select"})
SYNCS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", "unique_dim"}
) | {"equal", "repeat_interleave"}
SEVERAL = (list, tuple)
PRODUCTS = frozenset({"mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm"})


class HostAndDevice(RuntimeError):
    """Tensors of host and device met in one op."""


class SimTensor(torch.Tensor):
    """A tensor on the simulated device: the host tensor inside, and the memory that it shares with its views."""

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> SimTensor:
        made: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=memory.device,
        )
        made.inner, made.memory = inner, memory
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: order.Stream) -> None:
        """Do nothing: no memory is used again before Python has let it go."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SimTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(Call(func, args, kwargs or {}))


@attrs.frozen
class Op:
    """What torch says of an op."""

    name: str
    is_view: bool
    written: tuple[tuple[int, str], ...]
    """The positions and names of the arguments that it changes."""

    @staticmethod
    @functools.cache
    def of(func: Any) -> Op:
        name = str(func.overloadpacket.__name__)
        return Op(
            name,
            func.is_view or name in ("_unsafe_view", "lift_fresh"),
            tuple(
                (number, argument.name)
                for number, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ),
        )


class Call:
    """An op and what it is called with."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.op = Op.of(func)
        self.name = self.op.name
        self.tensors = tensors_in((*args, *kwargs.values()))
        # the tensors by which an op like `x[ids]` indexes
        self.indices = [x for x in args[1] if x is not None] if self.name in INDEXED else []
        # whether the shape or the value of its result comes from data, for which the host waits
        self.waits = self.name in SYNCS or any(x.dtype in (torch.bool, torch.uint8) for x in self.indices)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that it runs on. Raises RuntimeError for tensors of two."""
        named = self.kwargs.get("device")
        devices = {x.device for x in self.tensors if isinstance(x, SimTensor)}
        if named is not None and torch.device(named).type == DEVICE.type:
            devices.add(order.DEVICES[order.number_of(torch.device(named))])
        if len(devices) > 1:
            raise RuntimeError(f"{self.name}: tensors on different devices, {devices}, at {where()}")
        return devices.pop()

    @property
    def crosses(self) -> bool:
        """Whether it copies between host and device."""
        return self.name == "copy_" and sum(isinstance(x, SimTensor) for x in self.args[:2]) == 1

    def accesses(self) -> Iterator[Access]:
        """Yield what it does with memory of the device. Of ops that name rows, their rows alone."""
        written = {id(self.args[at] if at < len(self.args) else self.kwargs.get(name)) for at, name in self.op.written}
        key: Any = ...
        if self.name in INDEXED:
            key = tuple(slice(None) if x is None else inner(x) for x in self.args[1])
        elif self.name in BY_ROWS:
            axis, rows = self.args[1:3]
            key = (*[slice(None)] * (axis % self.args[0].dim()), inner(rows))
        for x in self.tensors:
            if isinstance(x, SimTensor):
                yield Access(x.inner, x.memory, id(x) in written, key if x is self.args[0] else ...)

    def inside(self) -> Any:
        """Run it on the tensors inside. Return what it returns."""
        kwargs = {name: mapped(inner, value) for name, value in self.kwargs.items() if name != "pin_memory"}
        if kwargs.get("device") is not None:
            kwargs["device"] = HOST
        return self.func(*mapped(inner, self.args), **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of what an op takes or returns: a tensor, a list of values, or something else."""
    if isinstance(value, Tensor):
        return [value]
    return [x for each in value for x in tensors_in(each)] if isinstance(value, SEVERAL) else []


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same with `function` applied to its tensors."""
    if isinstance(value, SEVERAL):
        return type(value)([mapped(function, each) for each in value])
    return function(value) if isinstance(value, Tensor) else value


def inner(value: Any) -> Any:
    """Return the host tensor inside a tensor on the device; anything else as it is."""
    return value.inner if isinstance(value, SimTensor) else value


def run(call: Call) -> Any:
    """Run an op that has to do with a device, on that device, as torch does."""
    elsewhere = call.device != order.DEVICES[order.number_of(None)]
    with LOCK, order.on_device(call.device):
        if elsewhere and not call.op.is_view and call.name not in ALLOCATIONS:
            note("elsewhere", call.name)
        if call.name == "_to_copy":
            result = _converted(call)
        elif call.crosses:
            result = copied(call)
        else:
            result = _computed(call)
        tell(call, result)
        return result


def _computed(call: Call) -> Any:
    _check(call)
    if call.waits:
        note("syncs", call.name)
    elif not call.op.is_view and call.name not in ALLOCATIONS:
        note("launches", call.name)
    if not call.op.is_view:
        order.ran(call.name, call.accesses())
    if call.waits:
        order.host_waits()
    return _wrapped(call, call.inside())


def _check(call: Call) -> None:
    """Refuse what CUDA refuses. Indices on the host are copied to the device."""
    hosts = [x for x in call.tensors if x.dim() and not isinstance(x, SimTensor)]
    for x in [x for x in hosts if any(x is index for index in call.indices) and isinstance(call.args[0], SimTensor)]:
        note("pageable", f"{call.name} by host indices")
        hosts = [other for other in hosts if other is not x]
    if hosts:
        raise HostAndDevice(f"{call.name}: tensors of host and device at {where()}")
    if call.name in PRODUCTS and not call.tensors[0].is_floating_point():
        raise NotImplementedError(f"{call.name}: CUDA multiplies no {call.tensors[0].dtype}, at {where()}")
    if call.name == "_int_mm":
        (rows, inside), (_, columns) = (x.shape for x in call.tensors[:2])
        if rows <= 16 or inside % 8 or columns % 8:
            raise RuntimeError(f"_int_mm: CUDA needs more than 16 rows and other sizes divided by 8, at {where()}")


def _wrapped(call: Call, result: Any) -> Any:
    """Return what an op returns as tensors on the device: its arguments, views of their memory, or new memory."""
    if call.kwargs.get("device") is not None and torch.device(call.kwargs["device"]).type == "cpu":
        return result
    ours = [x for x in call.tensors if isinstance(x, SimTensor)]
    known = {id(x.inner): x for x in ours}
    memories = {x.inner.untyped_storage().data_ptr(): x.memory for x in ours if x.inner.untyped_storage().nbytes()}

    def wrapped(value: Tensor) -> Tensor:
        if id(value) in known:
            return known[id(value)]
        memory = memories.get(value.untyped_storage().data_ptr())
        return _new(value, call.name) if memory is None else SimTensor(value, memory)

    return mapped(wrapped, result)


def _new(value: Tensor, name: str) -> SimTensor:
    note("allocations", name)
    return SimTensor(value, Memory.of(value))


def _converted(call: Call) -> Any:
    """Run `_to_copy`: a kernel on the device, or a copy between it and the host."""
    source, device = call.args[0], call.kwargs.get("device")
    if device is None or torch.device(device).type == source.device.type:
        return _computed(call)
    to = torch.empty_like(inner(source), dtype=call.kwargs.get("dtype"))
    non_blocking = call.kwargs.get("non_blocking", False)
    if not isinstance(source, SimTensor):
        to = _new(to, "_to_copy")
    elif non_blocking:  # torch makes it page-locked
        to = order.page_locked(to.nbytes).view(to.dtype).view(to.shape)
    return to.copy_(source, non_blocking)


def copied(call: Call) -> Any:
    """Run a copy between host and device."""
    to, source, *rest = call.args
    non_blocking = rest[0] if rest else call.kwargs.get("non_blocking", False)
    into = isinstance(to, SimTensor)
    ours, host = (to, source) if into else (source, to)
    order.ran("copy_", [Access(ours.inner, ours.memory, writes=into)])
    clock = dict(order.current_stream().clock)
    beside = non_blocking and order.is_page_locked(host)
    direction = "to the device" if into else "to the host"
    if beside:
        note("pinned", direction)
    elif into and not order.is_page_locked(host):
        note("pageable", direction)
    else:
        note("syncs", direction)
    if not (beside or (into and non_blocking)):
        order.host_waits()
    if into:
        to.inner.copy_(source)
        if beside:
            order.enters(source, clock)
    elif beside:
        order.leaves(to, source.inner.to(to.dtype, copy=True), clock)
    else:
        to.copy_(source.inner)
    return to


# ---- torch's side ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Properties:
    """What the driver says of a device."""

    total_memory: int


class _Backend:
    """The module `torch.gpusim`, as `torch.cuda` is one."""

    Event = order.Event
    Stream = order.Stream
    current_stream = staticmethod(order.current_stream)
    stream = staticmethod(order.using)
    synchronize = staticmethod(order.synchronize)
    set_device = staticmethod(order.set_device)
    device = staticmethod(order.on_device)
    graph: Any
    is_current_stream_capturing: Any

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return len(order.DEVICES)

    def current_device(self) -> int:
        return order.number_of(None)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return what is free and what there is: the host's memory is the device's."""
        host = main_memory()
        return host.total - host.in_use, host.total

    def get_device_properties(self, device: torch.device) -> Properties:
        return Properties(main_memory().total)


def why_not() -> str | None:
    """Return why there can be no simulated device here, or None where there can."""
    if torch.cuda.is_available():
        return "a simulated device would take the place of CUDA in this process"
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} makes no device from Python: the simulated one needs 2.13"
    return None


@functools.cache
def set_up(name: str = "gpusim") -> torch.library.Library:
    """Make torch know the device by that name, for the rest of this process. Return what keeps its ops registered."""
    from tests.simulated import capture  # it records calls of this module

    backend = _Backend()
    backend.graph = capture.graph
    setattr(backend, f"{name.upper()}Graph", capture.Graph)
    backend.is_current_stream_capturing = capture.is_current_stream_capturing
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=backend)
    library = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    for op in (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
    ):
        library.impl(op, _made_by(op), "PrivateUse1")
    # torch.tensor(…, device=…) copies where no Python dispatch is
    library.impl(
        aten._copy_from.default,
        lambda source, to, non_blocking=False: run(Call(aten.copy_.default, (to, source, non_blocking), {})),
        "PrivateUse1",
    )
    return library


def _made_by(op: Any) -> Callable[..., Any]:
    """Return what makes tensors from none, as `op` does on the host."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return run(Call(op, args, kwargs))

    return make
