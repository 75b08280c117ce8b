"""Scale decodes with Ray Serve: its autoscaler starts and stops them, and a front end follows them in a directory.

    pip install 'ray[serve]' && python examples/ray_serve.py [CHECKPOINT]

Requests do not go through Ray Serve, so each replica reports how many its engine has. A replica that it stops drains:
the front end lets go of it, and no stream ends.
"""

import os
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from directories import RayCluster
from ray import serve
from ray_actors import CHECKPOINT, ENGINE, PAGES, pythonpath
from tiny_tasks import BOS, encode

import pdinfer as pd
from pdinfer.remote.directory import Directory, Door

REQUESTS_PER_DECODE = 4
MAX_DECODES = 3
SAMPLING = pd.SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """The policy of the autoscaler: how many decodes the requests need that replicas have reported last."""
    reports = context.raw_metrics.get("unfinished", {}).values()
    wanted = -(-int(sum(report[-1].value for report in reports if report)) // REQUESTS_PER_DECODE)
    return max(context.capacity_adjusted_min_replicas, min(context.capacity_adjusted_max_replicas, wanted)), {}


class Replica:
    """An engine that announces itself in the store of the Ray cluster."""

    def __init__(self, role: str, checkpoint: str, key: bytes) -> None:
        host = ray.util.get_node_ip_address()
        transport = pd.kv.SocketTransport(host="0.0.0.0", advertise=host)  # noqa: S104 - the channel has a key
        model = pd.load_model(checkpoint)
        channel = pd.KVChannel(pd.PagePool(model, PAGES), transport, key=key)
        self.engine = (pd.PrefillEngine if role == "prefill" else pd.DecodeEngine)(model, channel, ENGINE)
        self.engine.warm_up()
        self.drain = Event()
        options = {"directory": Directory(RayCluster(), key=key), "drain": self.drain}
        self.serving = Thread(target=pd.remote.serve, args=(self.engine, Door(host, 0, key=key)), kwargs=options)
        self.serving.start()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve calls it for `by_load`."""
        return {"unfinished": float(self.engine.num_unfinished)}

    def __del__(self) -> None:
        """Ray Serve calls it before it stops a replica, and waits `graceful_shutdown_timeout_s`."""
        self.drain.set()
        self.serving.join()


def start(role: str, checkpoint: Path, key: bytes, **options: Any) -> None:
    deployment = serve.deployment(
        Replica, name=role, ray_actor_options={"num_cpus": 1}, graceful_shutdown_timeout_s=60, **options
    )
    serve.run(deployment.bind(role, str(checkpoint.resolve()), key), name=role, route_prefix=None)


def load(pairing: pd.Pairing, num_requests: int, num_decodes: int, answers: dict[int, list[int]]) -> int:
    """Keep so many requests under way until there are so many decodes, and return how many requests there were. All
    answers to a question are the first one."""
    heard: dict[str, tuple[int, list[int]]] = {}

    def is_over() -> bool:
        return sum(port.role == "decode" for port in pairing.ports) == num_decodes

    while pairing.num_unfinished or not is_over():
        while pairing.num_unfinished < num_requests and not is_over():
            number = len(heard) % 9
            prompt = (BOS, *encode(f"calc {number}+8="))
            heard[pairing.submit(pd.Request(prompt=prompt, sampling=SAMPLING))] = number, []
        pairing.wait(0.1)
        for event in pairing.step():
            assert event.error is None, event.error
            number, tokens = heard[event.request_id]
            tokens += [] if event.token is None else [event.token]
            assert not event.finish_reason or answers.setdefault(number, tokens) == tokens
    return len(heard)


def main(checkpoint: Path) -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": pythonpath()})
    key = os.urandom(32)
    scaling: dict[str, Any] = {
        "min_replicas": 1,
        "max_replicas": MAX_DECODES,
        "upscale_delay_s": 2,
        "downscale_delay_s": 5,
    }
    scaling |= {"metrics_interval_s": 1, "look_back_period_s": 2, "policy": {"policy_function": by_load}}
    try:
        start("prefill", checkpoint, key)
        start("decode", checkpoint, key, autoscaling_config=scaling)
        answers: dict[int, list[int]] = {}
        with pd.Pairing(directory=Directory(RayCluster(), key=key), policy=pd.policy.round_robin) as pairing:
            busy = load(pairing, MAX_DECODES * (REQUESTS_PER_DECODE + 1), MAX_DECODES, answers)
            calm = load(pairing, 1, 1, answers)
            assert pairing.stats.num_ports_lost == 0
        print(
            f"{MAX_DECODES} decodes served {busy} requests, and 1 was left after {calm} more; answers stayed the same"
        )
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
