"""pdinfer inside other engines. Nothing in the library imports this room, and each adapter imports its engine only when
that engine loads it.

    vllm/   vLLM's KV connector over a KVChannel, and vLLM as a port of a Pairing

May import: checkpoint, config, engine, kv, model, process, the ground."""

from __future__ import annotations

from pdinfer.adapters import vllm

__all__ = ["vllm"]
