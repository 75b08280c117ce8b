"""Run engines of two ranks as Ray actors in placement groups; kill a rank under load, and scale by adding and removing.

    pip install ray && python examples/ray_ranks.py [CHECKPOINT]

Each prefill is a placement group with an actor for each of its ranks. When one rank dies, the other ends, the requests
go to another prefill, and a new group takes its place. An autoscaler of yours calls what `main` calls: `add` and
`remove`. Ray kills actors when memory is short; `RAY_memory_monitor_refresh_ms=0` keeps it from that.
"""

import os
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import attrs
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray_actors import CHECKPOINT, ENGINE, PAGES, QUESTIONS, ask, pythonpath

import pdinfer as pd

RANKS = {"prefill": 2, "decode": 1}


class RankActor:
    """One rank of an engine. The first one of each engine is served to whoever knows the key."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.host = ray.util.get_node_ip_address()  # what other nodes reach
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))

    def meeting_place(self) -> tuple[str, str]:
        """Where the ranks of this engine meet: this rank's host, and a port that is free there."""
        with socket.create_server((self.host, 0)) as free:
            return self.host, str(free.getsockname()[1])

    def load(self, role: str, checkpoint: str, key: bytes, place: tuple[str, str]) -> tuple[str, int] | None:
        """Make the engine together with the other ranks. Return where a client of the first one connects."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place
        topology = pd.Topology.from_env(tp_size=RANKS[role])
        transport = pd.kv.SocketTransport(host="0.0.0.0", advertise=self.host)  # noqa: S104 - the channel has a key
        model = pd.load_model(checkpoint, topology=topology)
        channel = pd.KVChannel(pd.PagePool(model, PAGES), transport, key=key)
        self.engine = (pd.PrefillEngine if role == "prefill" else pd.DecodeEngine)(model, channel, ENGINE)
        self.engine.warm_up()
        self.listener = Listener((self.host, 0), authkey=key) if topology.is_leader else None
        return None if self.listener is None else (self.host, int(self.listener.address[1]))

    def serve(self) -> None:
        """Serve until the port is closed, its client is gone for good, or another rank is lost."""
        pd.remote.serve(self.engine, self.listener)


Actor: Any = ray.remote(num_cpus=1)(RankActor)


@attrs.frozen
class Group:
    """An engine: where its ranks are, and the port to it."""

    places: PlacementGroup
    actors: list[Any]
    port: Any

    @classmethod
    def start(cls, role: str, checkpoint: Path, key: bytes) -> "Group":
        """Start the ranks of an engine, near each other if the cluster can."""
        num_ranks = RANKS[role]
        places = placement_group([{"CPU": 1}] * num_ranks, strategy="PACK")
        ray.get(places.ready())
        actors = [
            Actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=rank)
            ).remote(rank, num_ranks)
            for rank in range(num_ranks)
        ]
        meeting_place = ray.get(actors[0].meeting_place.remote())
        path = str(checkpoint.resolve())
        address = ray.get([actor.load.remote(role, path, key, meeting_place) for actor in actors])[0]
        for actor in actors:
            actor.serve.remote()
        client = pd.remote.PrefillClient if role == "prefill" else pd.remote.DecodeClient
        return cls(places, actors, client(partial(Client, address, authkey=key)))

    def end(self) -> None:
        """Give its places back, whatever became of its ranks."""
        self.port.close()
        remove_placement_group(self.places)


def main(checkpoint: Path) -> None:
    ray.init(num_cpus=7, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": pythonpath()})
    key = os.urandom(32)
    try:
        with ThreadPoolExecutor() as threads:

            def begin(role: str) -> Future[Group]:
                return threads.submit(Group.start, role, checkpoint, key)

            roles = ("prefill", "prefill", "decode")
            first, second, decode = [each.result() for each in [begin(role) for role in roles]]
            ports = [first.port, second.port]
            with pd.Pairing(ports, decode.port, policy=pd.policy.round_robin) as pairing:
                quiet = ask(pairing, QUESTIONS)
                assert ask(pairing, QUESTIONS, on_first_event=lambda: ray.kill(first.actors[1])) == quiet
                while not pairing.stats.num_ports_lost:  # few rows may have needed that rank until here
                    assert ask(pairing, QUESTIONS) == quiet
                first.end()
                replacing = begin("prefill")  # in a thread: whoever steps the pairing must not wait for a process
                assert ask(pairing, QUESTIONS) == quiet
                third = replacing.result()
                pairing.add(third.port)
                assert ask(pairing, QUESTIONS) == quiet
                assert third.port.load().num_tokens > 0
                lost = pairing.stats.num_ports_lost
                pairing.remove(second.port, drain_s=10.0)  # there is little to do
                second.end()
                assert ask(pairing, QUESTIONS) == quiet
                assert pairing.ports == (decode.port, third.port)
            print(f"{lost} prefill lost a rank and was replaced, and 1 was removed;", end=" ")
            print(f"{len(quiet)} answers stayed the same, such as")
            print(", ".join(question + answer for question, answer in list(quiet.items())[:3]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
