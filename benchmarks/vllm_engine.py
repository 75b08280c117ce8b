"""One vLLM engine for the race of connectors, driven by lines of JSON; see benchmarks/vllm_connectors.py.

In: {"ask": name, "prompt": […], "params": {…} | null}. Out: {"ready": true}, then per request {"first": name, "at":
CLOCK_MONOTONIC of its first token, "cpu_s": what this process has taken so far, "params": what vLLM gives on,
"cached": prompt tokens that it did not compute, "reason"}.

It is also the module in which vLLM looks for PDInferConnector, so that what had left before the last layer is known.
"""

import json
import os
import queue
import sys
import threading
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
                self.unsent = self._worker.channel.sender.pushes.unsent_bytes
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


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    settings, out = json.loads(sys.argv[1]), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is not for the parent
    transfer = settings.pop("transfer")
    llm = LLM(**settings, kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer))
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    asked: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), file=out)
    while True:
        while not asked.empty() or not scheduler.has_requests():
            ask = asked.get()
            extra = {"kv_transfer_params": ask["params"]} if ask["params"] else None
            sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
            engine.add_request(ask["ask"], {"prompt_token_ids": ask["prompt"]}, sampling)
        for output in engine.step():
            if output.finished:
                (said,) = output.outputs
                answer = {
                    "first": output.request_id,
                    "at": time.monotonic(),
                    "cpu_s": time.process_time(),
                    "params": output.kv_transfer_params,
                    "cached": output.num_cached_tokens,
                    "reason": said.finish_reason if said.token_ids else "error",
                }
                print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
