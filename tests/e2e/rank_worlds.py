"""Worlds of ranks that serve engines, and a Pairing over them in the test's own process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import pdinfer as pd
from pdinfer.groups import Groups
from tests.ranks import Outcome, Ranks

Sizes = Mapping[str, int]
START_S = 40.0
DEADLINE_S = 60.0
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
    checkpoint: str,
    collective_s: float = 30.0,
    fault: tuple[str, int, str] = ("", 0, ""),
    job: str = "tests.e2e.rank_worlds:serve_rank",
    **config: Any,
) -> Iterator[World]:
    """Ranks with sizes such as {"tp_size": 2, "dp_size": 2}; leaving it closes them. `config` as for `make_engine`."""
    counts = {"prefill": size_of(prefill), "decode": size_of(decode)}
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Listener(f"{folder}/host", "AF_UNIX", 16) as listener:
        arguments = [folder, checkpoint, dict(prefill), dict(decode), config, collective_s, fault]
        outcomes: list[Outcome] = []

        def run() -> None:
            try:
                outcomes.extend(ranks.outcomes(job, sum(counts.values()), *arguments, deadline_s=DEADLINE_S))
            finally:
                with contextlib.suppress(OSError):  # nobody else will come
                    Client(f"{folder}/host", "AF_UNIX").send_bytes(b"")

        thread = threading.Thread(target=run)
        thread.start()
        num_leaders = prefill.get("dp_size", 1) + decode.get("dp_size", 1)
        ports: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for _ in range(num_leaders):
            connection = listener.accept()
            role = connection.recv_bytes().decode()
            assert role, [outcome.trace for outcome in outcomes]
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


class NotedTopology(pd.Topology):
    """Its groups note their calls in one list, which `calls_of` finds."""

    def connect(self, *arguments: Any, **named: Any) -> Groups:
        calls: list[str] = []
        groups = super().connect(*arguments, **named)
        return attrs.evolve(groups, **{name: attrs.evolve(getattr(groups, name), calls=calls) for name in NAMES})


def join_world(name: str, folder: str, rank: int, sizes: Sizes, collective_s: float) -> pd.Topology:
    """Makes this process a rank of another world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    topology = NotedTopology(rank=rank, world_size=size_of(sizes), **sizes)
    if topology.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=collective_s),
        )
    return topology


def make_engine(
    checkpoint: str,
    topology: pd.Topology,
    channel_at: Path,
    role: str,
    *,
    mtp: bool = False,
    num_pages: int = 128,
    experts: pd.ExpertConfig | None = None,
    **config: Any,
) -> pd.PrefillEngine | pd.DecodeEngine:
    """This rank's engine, in float32 over pages of 4 tokens."""
    model = pd.load_model(checkpoint, dtype=torch.float32, topology=topology, mtp=mtp, experts=experts)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=num_pages))
    channel = pd.KVChannel(pool, pd.kv.SocketTransport(path=channel_at))
    kind = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}[role]
    return kind(model, channel, pd.EngineConfig(**config))


def serve_rank(
    folder: str,
    checkpoint: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    config: dict[str, Any],
    collective_s: float,
    fault: tuple[str, int, str],
) -> dict[str, Any]:
    """One rank: serves its engine until the host closes it. `fault` is (role, rank, what happens to it) in the model
    step after the first one."""
    rank = int(os.environ["RANK"])
    role, sizes = ("prefill", prefill) if rank < size_of(prefill) else ("decode", decode)
    rank -= 0 if role == "prefill" else size_of(prefill)
    topology = join_world(role, folder, rank, sizes, collective_s)
    engine = make_engine(checkpoint, topology, Path(folder) / f"{role}{rank}", role, **config)
    connection = None
    if topology.is_leader:
        connection = Client(f"{folder}/host", "AF_UNIX")
        connection.send_bytes(role.encode())
    if [role, rank] == list(fault[:2]):
        break_down(engine, fault[2])
    pd.remote.serve(engine, connection)
    pool = engine.channel.pool
    pool.check()
    return {
        "role": role,
        "rank": rank,
        "calls": engine.model.groups.world.calls,
        "bytes": engine.channel.stats.bytes_sent,
        "left": pool.num_pages - pool.num_available,
    }


def break_down(engine: pd.PrefillEngine | pd.DecodeEngine, how: str) -> None:
    """Has the process break down in its second step of the model."""
    runner: Any = engine._model_runner
    stream_layers = runner._model.stream_layers
    steps = []

    def broken(batch: Any, view: Any) -> Any:
        steps.append(batch)
        if len(steps) == 2:
            if how == "raise":
                raise ZeroDivisionError("a test's fault")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return stream_layers(batch, view)

    object.__setattr__(runner, "_model", Proxy(runner._model, broken))


class Proxy:
    """A model whose `stream_layers` is another one."""

    def __init__(self, model: pd.Model, stream_layers: Any) -> None:
        self._model = model
        self.stream_layers = stream_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any, view: Any) -> Any:
        return pd.Model.forward(self, batch, view)  # type: ignore[arg-type]
