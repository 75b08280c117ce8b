"""pdinfer inside other engines. Nothing in the library imports this room, and each adapter imports its engine only when
that engine loads it.

    vllm/   vLLM's KV connector over a KVChannel

May import: checkpoint, config, kv, model, the ground.
"""
