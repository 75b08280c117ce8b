"""pdinfer inside other engines. Nothing in the library imports this room, and each adapter imports its engine only when
that engine loads it.

    vllm/   vLLM's KV connector over a KVChannel, and vLLM as a port of a Pairing

May import: checkpoint, config, engine, kv, model, process, the ground.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdinfer.adapters import vllm

__all__ = ["vllm"]


def __getattr__(name: str) -> object:
    """Import an adapter when its name is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
