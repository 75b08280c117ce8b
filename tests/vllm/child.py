"""One vLLM engine in this process, driven by lines of JSON: `python -m tests.vllm.child '{"model": …}'`.

In: {"add": id, "prompt": […], "max_tokens": 8, "params": {…} | null}, {"abort": id}, {"stats": true}, {"stop": true}.
Out: {"ready": address | null, "block_size"}, {"done": id, "tokens", "logprobs", "reason"}, {"moved": room, "digest",
"tokens"} for each room that was finished here or landed here, {"stats": …}.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

from tests.vllm.watching import watch

SETTINGS = json.loads(sys.argv[1])
OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what vLLM prints is not for the parent


def say(**what: Any) -> None:
    OUT.write(json.dumps(what) + "\n")


def make() -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = SETTINGS.get("transfer")
    return LLM(
        model=SETTINGS["model"],
        skip_tokenizer_init=True,
        dtype=SETTINGS.get("dtype", "float32"),
        block_size=SETTINGS.get("block_size", 16),
        enforce_eager=True,
        max_model_len=SETTINGS.get("max_model_len", 512),
        max_num_seqs=SETTINGS.get("max_num_seqs", 1),
        num_gpu_blocks_override=SETTINGS.get("num_blocks", 256),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
        disable_log_stats=True,
        **SETTINGS.get("more", {}),
    )


class StepTimes:
    """How long the steps that computed something took, and the connector's hooks in each of them, in seconds."""

    def __init__(self, worker: Any) -> None:
        self.steps: list[float] = []
        self.hooks: list[float] = []
        self._now = 0.0
        for name in ("preempted", "layer", "load", "step_done", "finished", "counts"):
            setattr(worker, name, self._timed(getattr(worker, name)))
        self._worker = worker

    def _timed(self, real: Any) -> Any:
        def timed(*of: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*of)
            finally:
                self._now += time.perf_counter() - began

        return timed

    def step_ends(self, took_s: float) -> None:
        if not self._worker._orders.is_idle:
            self.steps.append(took_s)
            self.hooks.append(self._now)
        self._now = 0.0

    def take(self) -> dict[str, dict[str, float]]:
        """Return how they spread, and begin anew."""
        steps, hooks, self.steps, self.hooks = self.steps, self.hooks, [], []
        return {"steps_ms": spread(steps), "hooks_ms": spread(hooks)}


def spread(times: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the longest of times, in ms, and how many there are."""
    ranked = sorted(times) or [0.0]
    at = {"median": 0.5, "p99": 0.99, "longest": 1.0}
    found = {name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in at.items()}
    return {**{name: round(1000 * time_s, 3) for name, time_s in found.items()}, "count": len(times)}


class CheckedFrees:
    """Counts the blocks that are freed while a peer may write them, where the worker is in this process."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        self.num_bad = 0
        self.pool = scheduler.kv_cache_manager.block_pool
        self.num_blocks = self.pool.get_num_free_blocks()
        real = self.pool.free_blocks

        def free_blocks(blocks: Any, *rest: Any, **more: Any) -> Any:
            blocks = list(blocks)
            rooms = {} if worker is None else worker.channel.snapshot().expected
            written = {page for room in rooms.values() for page in room.pages}
            self.num_bad += sum(block.ref_cnt <= 1 and block.block_id in written for block in blocks)
            return real(blocks, *rest, **more)

        self.pool.free_blocks = free_blocks


def main() -> None:
    llm = make()
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    worker = checked = times = None
    if SETTINGS.get("transfer") is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():  # several workers have processes of their own
            worker = get_kv_transfer_group()._worker
            watch(worker, say)
            times = StepTimes(worker)
        checked = CheckedFrees(scheduler, worker)
    orders: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put({"stop": True})

    threading.Thread(target=read, daemon=True).start()
    say(
        ready=None if worker is None else worker.channel.address.endpoints[0],
        block_size=scheduler.cache_config.block_size,
    )
    while True:
        while not orders.empty() or not scheduler.has_requests():
            order = orders.get()
            if "add" in order:
                add(engine, order)
            elif "abort" in order:
                engine.abort_request([order["abort"]], internal=False)
            elif "stats" in order:
                free = None if checked is None else checked.pool.get_num_free_blocks()
                say(
                    stats=True,
                    free=free,
                    all=checked and checked.num_blocks,
                    bad_frees=checked and checked.num_bad,
                    cpu_s=time.process_time(),
                    **({} if times is None else times.take()),
                )
            else:
                os._exit(0)
        began = time.perf_counter()
        outputs = engine.step()
        if times is not None:
            times.step_ends(time.perf_counter() - began)
        for output in outputs:
            if output.finished:
                tell(output)


def add(engine: Any, order: dict[str, Any]) -> None:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": order["params"]} if order.get("params") else None
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=order["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        detokenize=False,
        extra_args=extra,
    )
    engine.add_request(order["add"], {"prompt_token_ids": order["prompt"]}, sampling)


def tell(output: Any) -> None:
    (said,) = output.outputs
    logprobs = [{str(token): one.logprob for token, one in step.items()} for step in said.logprobs or ()]
    say(done=output.request_id, tokens=list(said.token_ids), logprobs=logprobs, reason=said.finish_reason)


if __name__ == "__main__":
    main()
