"""Run prefill and decode as actors of a local Ray cluster; kill the prefill under load, and replace it.

    pip install ray && python examples/ray_actors.py [CHECKPOINT]

Ray places and restarts processes. Requests and tokens go over a connection between the host and each actor, and KV from
actor to actor, so nothing of a step waits for Ray. Both are guarded by keys that only this cluster's processes have.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import ray
from tiny_tasks import BOS, decode, encode

import pdinfer as pd

CHECKPOINT = Path(__file__).parent / "tiny"
PAGES = pd.CacheConfig(page_size=16, num_pages=256)
ENGINE = pd.EngineConfig(num_threads=1)
QUESTIONS = tuple(f"calc {a}+{b}=" for a in range(1, 7) for b in (3, 8))


class EngineActor:
    """One engine, served to whoever knows the key."""

    def __init__(self, role: str, checkpoint: str, key: bytes) -> None:
        host = ray.util.get_node_ip_address()  # what other nodes reach; a wildcard would be announced by a name
        transport = pd.kv.SocketTransport(host="0.0.0.0", advertise=host)  # noqa: S104 - the channel has a key
        model = pd.load_model(checkpoint)
        channel = pd.KVChannel(pd.PagePool(model, PAGES), transport, key=key)
        self.engine = (pd.PrefillEngine if role == "prefill" else pd.DecodeEngine)(model, channel, ENGINE)
        self.engine.warm_up()
        self.listener = Listener((host, 0), authkey=key)

    def address(self) -> tuple[str, int]:
        """Where a client connects, once the engine is ready."""
        host, port = self.listener.address
        return str(host), int(port)

    def serve(self) -> None:
        """Serve until the port is closed, or its client is gone for good."""
        pd.remote.serve(self.engine, self.listener)


Actor: Any = ray.remote(num_cpus=1, max_concurrency=2)(EngineActor)  # one call serves; another is answered meanwhile


def start(role: str, checkpoint: Path, key: bytes) -> tuple[Any, pd.remote.PrefillClient | pd.remote.DecodeClient]:
    """Start an actor and return it with a port to its engine."""
    actor = Actor.remote(role, str(checkpoint.resolve()), key)
    address = ray.get(actor.address.remote())
    actor.serve.remote()
    client = pd.remote.PrefillClient if role == "prefill" else pd.remote.DecodeClient
    return actor, client(partial(Client, address, authkey=key))


def ask(
    pairing: pd.Pairing, questions: tuple[str, ...], on_first_event: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Return the answer to each question."""
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=16, stop_token_ids=(ord(";"),))
    answers = dict.fromkeys(questions, "")
    requests = [pd.Request(request_id=text, prompt=(BOS, *encode(text)), sampling=sampling) for text in questions]
    for number, event in enumerate(pairing.generate(requests)):
        if number == 0:
            on_first_event()
        assert event.error is None, event.error
        if event.token is not None:
            answers[event.request_id] += decode([event.token])
    return answers


def main(checkpoint: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": pythonpath()})
    key = os.urandom(32)
    try:
        with ThreadPoolExecutor() as threads:

            def begin(role: str) -> Future[tuple[Any, Any]]:
                return threads.submit(start, role, checkpoint, key)

            actors, ports = zip(*[each.result() for each in map(begin, ("prefill", "prefill", "decode"))], strict=True)
            with pd.Pairing(ports[:2], ports[2], policy=pd.policy.round_robin) as pairing:
                quiet = ask(pairing, QUESTIONS)
                assert ask(pairing, QUESTIONS, on_first_event=lambda: ray.kill(actors[0])) == quiet
                replacing = begin("prefill")  # in a thread: whoever steps the pairing must not wait for a process
                assert ask(pairing, QUESTIONS) == quiet
                new = replacing.result()[1]
                pairing.add(new)
                assert ask(pairing, QUESTIONS) == quiet
                assert new.load().num_tokens > 0
                lost = pairing.stats.num_ports_lost
            print(f"{lost} prefill was killed and replaced; {len(quiet)} answers stayed the same, such as")
            print(", ".join(question + answer for question, answer in list(quiet.items())[:3]))
    finally:
        ray.shutdown()


def pythonpath() -> dict[str, str]:
    """Let actors import what this program imports, also from a checkout that is not installed."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
