"""vLLM's KV connector over a KVChannel (`kv_connector_module_path="pdinfer.adapters.vllm"`), and `connect` and
`connect_decode`, which make a vLLM with that connector a port of a Pairing.

Where the Pairing is:

    prefill.py     prefill in vLLM, decode here
    decode.py      prefill here, decode in vLLM
    port.py        a vLLM as a port of a Pairing: its links, and what happens when it is lost
    probe.py       a prompt that both engines compute before they serve one
    prompts.py     what vLLM is asked, and who waits for its answers

Inside vLLM:

    loading.py     the class that vLLM makes, from its own base class; the only file that imports vLLM
    connector.py   every hook, and which half it goes to
    scheduler.py   the half in the scheduler: which requests load, wait or are sent
    worker.py      the half in the worker: the pages, the channel, and its two sides
    receiving.py   decode: links to prefills, and blocks that they fill
    sending.py     prefill: blocks that peers get
    memory.py      vLLM's cache tensors as the pages of a channel
    overrides.py   settings of vLLM that change what it computes from a checkpoint, as a part of the model's id
    settings.py    what the host and each request ask for, and what is refused
    messages.py    what the two halves send each other, and what vLLM's logger receives

Tested by tests/unit/adapters with a base class that stands in for vLLM's, and by tests/vllm.

May import: checkpoint, config, engine, kv, model, process, the ground."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdinfer.adapters.vllm.decode import connect_decode
    from pdinfer.adapters.vllm.prefill import connect

__all__ = ["connect", "connect_decode"]


def __getattr__(name: str) -> Any:
    """Return `connect` or `connect_decode`, or the class that vLLM asks this module for. That is made at the first
    call, from the base class of the vLLM that is installed. Raises ConfigError when there is none, or when something it
    needs is missing."""
    homes = {"connect": "prefill", "connect_decode": "decode"}
    if name in homes:
        return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
    if name != "PDInferConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdinfer.adapters.vllm.loading import connector_class

    return connector_class()
