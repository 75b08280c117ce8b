"""One vLLM engine for the race of connectors, driven by lines of JSON; see benchmarks/vllm_connectors.py.

In: {"ask": name, "prompt": […], "params": {…} | null}. Out: {"ready": [pids of all its processes]}, then per request
{"first": name, "at": CLOCK_MONOTONIC of its first token, "params": what vLLM gives on, "cached": prompt tokens that it
did not compute}.

It is also the module in which vLLM looks for PDInferConnector, so that what had left before the last layer is known.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pdinfer.adapters.vllm.loading import connector_class

LEFT = "VLLM_RACE_LEFT"
"""The environment variable with the file in which a prefill notes what had left."""


def __getattr__(name: str) -> Any:
    if name != "PDInferConnector":
        raise AttributeError(name)
    return watched(connector_class())


def watched(base: Any) -> type:
    """Return a connector that notes, per step, the share of the bytes that had left when the last layer's attention was
    done, and before anything of that layer was pushed."""

    class PDInferConnector(base):  # type: ignore[misc]
        before = unsent = 0

        def save_kv_layer(self, layer_name: str, *rest: Any, **more: Any) -> None:
            layers = self._worker.channel.pool.layout.layers
            if f".{layers.stop - 1}." in layer_name:
                self.unsent = self._worker.channel.unsent_bytes
            super().save_kv_layer(layer_name, *rest, **more)

        def wait_for_save(self) -> None:
            super().wait_for_save()
            channel = self._worker.channel
            moved = channel.stats.bytes_sent - self.before
            self.before += moved
            if moved and LEFT in os.environ:
                pushed = moved * (1 - 1 / len(channel.pool.layout.layers))
                with Path(os.environ[LEFT]).open("a") as file:
                    file.write(f"{(pushed - self.unsent) / moved}\n")

    return PDInferConnector


def processes(pid: int) -> list[int]:
    """Return a process and those below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(each for child in children for each in processes(int(child)))]


async def serve(settings: dict[str, Any], out: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = settings.pop("transfer")
    config = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings, **config))

    def say(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")

    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say(ready=processes(os.getpid()))
    tasks = set()
    while line := await lines.readline():
        task = asyncio.create_task(answer(llm, json.loads(line), say))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    llm.shutdown()


async def answer(llm: Any, ask: dict[str, Any], say: Any) -> None:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": ask["params"]} if ask["params"] else None
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
    async for output in llm.generate({"prompt_token_ids": ask["prompt"]}, sampling, ask["ask"]):
        if output.finished:
            (said,) = output.outputs
            at, params = time.monotonic(), output.kv_transfer_params
            reason = said.finish_reason if said.token_ids else "error"
            say(first=ask["ask"], at=at, params=params, cached=output.num_cached_tokens, reason=reason)


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not for the parent
    asyncio.run(serve(json.loads(sys.argv[1]), stdout))
