"""Worlds of ranks that serve engines, and a Pairing over them in the test's own process."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

import pdinfer as pd
from pdinfer.groups import Groups
from pdinfer.testing import random_model
from tests.ranks import Outcome, Ranks

Sizes = Mapping[str, int]
START_S = 60.0
NAMES = tuple(field.name for field in attrs.fields(Groups) if field.name != "owns_backend")


@attrs.define
class World:
    """A Pairing over two worlds of ranks. `outcomes` is there when they have ended: prefill's ranks, then decode's."""

    pairing: pd.Pairing
    prefills: list[pd.remote.PrefillClient]
    decodes: list[pd.remote.DecodeClient]
    outcomes: list[Outcome] = attrs.field(factory=list)

    @property
    def values(self) -> list[dict[str, Any]]:
        assert not [outcome.trace for outcome in self.outcomes if outcome.error]
        return [outcome.value for outcome in self.outcomes]


@contextmanager
def serving(
    ranks: Ranks,
    prefill: Sizes,
    decode: Sizes,
    *,
    engine: Mapping[str, Any] | None = None,
    collective_s: float = 30.0,
    **more: Any,
) -> Iterator[World]:
    """Ranks with sizes such as {"tp_size": 2, "dp_size": 2}; leaving it closes them. `more` goes to `serve_rank`."""
    counts = {"prefill": size_of(prefill), "decode": size_of(decode)}
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Listener(f"{folder}/host", "AF_UNIX", 16) as listener:
        arguments = [folder, dict(prefill), dict(decode), dict(engine or {})]
        outcomes: list[Outcome] = []

        def run() -> None:
            job = "tests.e2e.rank_worlds:serve_rank"
            outcomes.extend(ranks.outcomes(job, sum(counts.values()), *arguments, collective_s=collective_s, **more))

        thread = threading.Thread(target=run)
        thread.start()
        num_leaders = prefill.get("dp_size", 1) + decode.get("dp_size", 1)
        ports: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for _ in range(num_leaders):
            connection = listener.accept()
            role = connection.recv_bytes().decode()
            client = pd.remote.PrefillClient if role == "prefill" else pd.remote.DecodeClient
            ports[role].append(client(connection, timeout_s=START_S))
        world = World(pd.Pairing(ports["prefill"], ports["decode"]), ports["prefill"], ports["decode"])
        try:
            yield world
        finally:
            world.pairing.close()
            thread.join()
            world.outcomes = outcomes
            for outcome in outcomes:  # shown when the test fails
                print(outcome.trace, end="")


def size_of(sizes: Sizes) -> int:
    """How many ranks these make."""
    return sizes.get("dp_size", 1) * sizes.get("tp_size", 1) * sizes.get("cp_size", 1)


# ---- in the processes ----------------------------------------------------------------------------------------------


@cache
def model_of(family: str, mtp: bool) -> pd.Model:
    return random_model(pd.testing.tiny_config(family), mtp=mtp)


def join_world(
    name: str, folder: str, rank: int, sizes: Sizes, collective_s: float
) -> tuple[pd.Topology, Groups, list[str]]:
    """Makes this process a rank of another world; its groups note their calls in the list."""
    if dist.is_initialized():
        dist.destroy_process_group()
    topology = pd.Topology(rank=rank, world_size=size_of(sizes), **sizes)
    if topology.world_size == 1:
        return topology, Groups.single(), []
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=collective_s),
    )
    calls: list[str] = []
    groups = topology.connect()
    noted = {name: attrs.evolve(getattr(groups, name), calls=calls) for name in NAMES}
    return topology, attrs.evolve(groups, **noted), calls


def serve_rank(
    folder: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    engine: dict[str, Any],
    *,
    family: str = "v3",
    mtp: bool = False,
    num_pages: int = 128,
    collective_s: float = 30.0,
) -> dict[str, Any]:
    """One rank: serves its engine until the host closes it."""
    rank = int(os.environ["RANK"])
    role, sizes = ("prefill", prefill) if rank < size_of(prefill) else ("decode", decode)
    rank -= 0 if role == "prefill" else size_of(prefill)
    topology, groups, calls = join_world(role, folder, rank, sizes, collective_s)
    model = attrs.evolve(model_of(family, mtp), topology=topology, groups=groups)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=num_pages))
    channel = pd.KVChannel(pool, pd.kv.SocketTransport(path=Path(folder) / f"{role}{rank}"))
    kind = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}[role]
    made = kind(model, channel, pd.EngineConfig(**engine))
    connection = None
    if topology.is_leader:
        connection = Client(f"{folder}/host", "AF_UNIX")
        connection.send_bytes(role.encode())
    pd.remote.serve(made, connection)
    pool.check()
    return {
        "role": role,
        "rank": rank,
        "calls": calls,
        "bytes": channel.stats.bytes_sent,
        "left": pool.num_pages - pool.num_available,
    }
