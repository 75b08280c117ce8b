"""Events, streams and graphs of whatever device a model is on, and which device is the current one: the one place that
asks torch for them.

A device lags behind the host: an op only queues work on the stream that is current in its thread. Work of one stream
runs in order; between streams, and between a stream and the host, there is no order but by events. A CPU has neither,
and its work is done when the op returns: here it gets None.

Ops of torch and kernels of Triton run on the device of their tensors. DeepGEMM, DeepEP and `torch.cuda.graph` use the
current device of the calling thread, and a thread begins with the first one, whatever another has chosen."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from pdinfer.errors import BackendUnavailable

ASKED = (
    *("is_available", "device_count", "current_device", "set_device", "device", "empty_cache", "mem_get_info"),
    *("get_device_properties", "Event", "Stream", "current_stream", "stream", "graph", "is_current_stream_capturing"),
)
"""What this library asks of torch's module of a device, beside the class of its graphs."""


def present(device: torch.device) -> torch.device:
    """Return `device`, which is no CPU, with its number: that of the current one where it has none. Another thread
    would understand another device. Raises BackendUnavailable where torch sees none of its kind, or where torch's
    module of it lacks something that is asked of it here."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise BackendUnavailable(
            f"device {device} cannot hold a model here, since torch has no module for it; use 'cpu', 'cuda', or the "
            "device that a package such as torch_npu brings"
        ) from error
    if lacking := [name for name in (*ASKED, _graph_class(device)) if not hasattr(module, name)]:
        raise BackendUnavailable(
            f"device {device} cannot hold a model here, since torch.{device.type} has no {', '.join(lacking)}; use "
            "'cpu' or 'cuda'"
        )
    if not module.is_available():
        raise BackendUnavailable(
            f"device {device} was asked for and torch sees no {device.type.upper()} device; use device='cpu'"
        )
    return device if device.index is not None else torch.device(device.type, module.current_device())


def _graph_class(device: torch.device) -> str:
    """Return what torch calls the class of a device's graphs: CUDAGraph, XPUGraph, NPUGraph."""
    return f"{device.type.upper()}Graph"


def make_current(device: torch.device) -> None:
    """Make `device` the current one of this thread, as it is without a number. Raises BackendUnavailable where there is
    none of its number."""
    if device.type == "cpu" or device.index is None:
        return
    module = torch.get_device_module(device)
    if device.index >= module.device_count():
        raise BackendUnavailable(f"device {device} was asked for and torch sees {module.device_count()} of its kind")
    module.set_device(device)


def is_current(device: torch.device) -> bool:
    """Return whether what launches on the current device of this thread launches on `device`. A CPU has no others."""
    return device.type == "cpu" or device.index in (None, torch.get_device_module(device).current_device())


def is_capturing(device: torch.device) -> bool:
    """Return whether what this thread queues on `device`, its current one, is captured."""
    return device.type != "cpu" and bool(torch.get_device_module(device).is_current_stream_capturing())


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device`, which is no CPU, the current one of this thread until the context ends."""
    context: contextlib.AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return context


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event behind all that was queued on the current stream of `device`, which need not be the current
    device; None for a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    event: torch.Event = module.Event(blocking=True)
    module.current_stream(device).record_event(event)
    return event


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a stream that runs beside all others of `device`; None for a CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream on which ops of this thread queue work for `device`; None for a CPU."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Let ops of this thread queue their work on `stream`, and make its device the current one, until the context ends.
    None changes nothing."""
    if stream is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = torch.get_device_module(stream.device).stream(stream)
    return context


class Graph(Protocol):
    """Work of a device that was captured once and is launched as a whole."""

    def replay(self) -> None:
        """Queue the work again, on the memory that it used when it was captured."""

    def pool(self) -> Any:
        """Return the memory pool of the graph, which another graph may share if the two never run at once."""


def capture(run: Callable[[], None], stream: torch.Stream, pool: Any = None) -> Graph:
    """Capture what `run` queues on `stream`, which is current meanwhile, without running it. Graphs that share a `pool`
    are captured on one stream, so that they share its memory. Other threads may go on to use the device meanwhile.
    Raises RuntimeError when `run` waits for the device."""
    module = torch.get_device_module(stream.device)
    graph: Graph = getattr(module, _graph_class(stream.device))()
    # without a stream torch makes one of the device that is current at the first capture of the process
    captured = module.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with no_collection(), on_device(stream.device), captured:
        run()
    return graph


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Put off the collection of garbage. Where it destroys a graph, that of an engine that is gone say, CUDA breaks off
    the capture that is under way ("operation failed due to a previous error during capture")."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
