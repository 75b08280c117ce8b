"""What torch.compile leaves alone: a host may serve a request inside a function that it compiles."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

REASON = "pdinfer serves requests, which no graph can hold: call it outside what is compiled with fullgraph=True"
_FRAMES: Any = eval_frame  # its stub lacks some of it
_CAN_SKIP = all(hasattr(_FRAMES, name) for name in ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"))
"""Not public: a torch that calls them otherwise traces us, as it does any library."""


def untraced(function: Function) -> Function:
    """Have torch.compile break its graph at a function of Python's, which then runs with all that it calls as ever.

    `torch.compiler.disable` does it with a wrapper, and takes a second to import. These marks, which it sets too, cost
    no call anything."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    if _CAN_SKIP:
        skip = _FRAMES._FrameAction.SKIP  # noqa: SLF001
        _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, skip))  # noqa: SLF001 - its own frame, and those within
    return function


def leave_alone(owner: type) -> None:
    """Do so with the methods that a class has of its own."""
    for each in vars(owner).values():
        method = getattr(each, "__func__", each)  # of a class method
        if isinstance(method, FunctionType):
            untraced(method)
