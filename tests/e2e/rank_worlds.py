"""Worlds of ranks that serve engines, and a Pairing over them in the test's own process."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
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
from pdinfer.engine.ranks import wakeup
from pdinfer.parallel.groups import Groups
from pdinfer.process.silence import RANKS
from tests.ranks import COLLECTIVE_S, Outcome, Ranks

Sizes = Mapping[str, int]
START_S = 600.0
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
    fault: tuple[str, int, str] = ("", 0, ""),
    job: str = "tests.e2e.rank_worlds:serve_rank",
    **config: Any,
) -> Iterator[World]:
    """Ranks with sizes such as {"tp_size": 2, "dp_size": 2}; leaving it closes them. `config` as for `make_engine`."""
    counts = {"prefill": size_of(prefill), "decode": size_of(decode)}
    with tempfile.TemporaryDirectory(prefix="pd") as folder, Listener(f"{folder}/host", "AF_UNIX", 16) as listener:
        arguments = [folder, checkpoint, dict(prefill), dict(decode), config, fault]
        outcomes: list[Outcome] = []

        def run() -> None:
            try:
                outcomes.extend(ranks.outcomes(job, sum(counts.values()), *arguments))
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
        world = World(
            pd.Pairing(ports["prefill"], ports["decode"], config=pd.PairingConfig(port_wait_s=0.0)),
            ports["prefill"],
            ports["decode"],
        )
        try:
            yield world
        finally:
            world.pairing.close()
            thread.join()
            world.outcomes = outcomes
            for outcome in outcomes:  # shown when the test fails
                print(outcome.trace, end="")


def size_of(sizes: Sizes) -> int:
    return sizes.get("dp_size", 1) * sizes.get("tp_size", 1) * sizes.get("cp_size", 1)


# ---- in the processes ----------------------------------------------------------------------------------------------


class NotedTopology(pd.Topology):
    """Its groups note their calls in one list, which `calls_of` finds."""

    def connect(self, *arguments: Any, **named: Any) -> Groups:
        calls: list[str] = []
        groups = super().connect(*arguments, **named)
        return attrs.evolve(groups, **{name: attrs.evolve(getattr(groups, name), calls=calls) for name in NAMES})


def join_world(name: str, folder: str, rank: int, sizes: Sizes, backend: str = "gloo") -> pd.Topology:
    """Makes this process a rank of another world, whose tensors the backend of torch.distributed carries."""
    if dist.is_initialized():
        dist.barrier()  # who leaves while others still connect closes their connections
        dist.destroy_process_group()
    topology = NotedTopology(rank=rank, world_size=size_of(sizes), **sizes)
    if topology.world_size > 1:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/{name}",
            rank=rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    return topology


def make_engine(
    checkpoint: str,
    topology: pd.Topology,
    channel_at: Path,
    role: str,
    *,
    mtp: bool = False,
    weights: str = "auto",
    device: str = "cpu",
    num_pages: int = 128,
    page_size: int = 4,
    experts: Mapping[str, Any] | None = None,
    warm_up: bool = False,
    **config: Any,
) -> pd.PrefillEngine | pd.DecodeEngine:
    """This rank's engine, in float32, on a device whose "*" is its rank; a decode engine warmed up, if asked, before it
    counts steps."""
    model = pd.load_model(
        checkpoint,
        device=device.replace("*", str(topology.rank)),
        dtype=torch.float32,
        weights=weights,
        topology=topology,
        mtp=mtp,
        experts=None if experts is None else pd.moe.ExpertConfig(**experts),
    )
    pool = pd.PagePool(model, pd.CacheConfig(page_size=page_size, num_pages=num_pages))
    channel = pd.KVChannel(pool, pd.kv.SocketTransport(path=channel_at))
    kind = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}[role]
    engine = kind(model, channel, pd.EngineConfig(**config))
    if warm_up and isinstance(engine, pd.DecodeEngine):
        engine.warm_up()
        engine.graphs.num_steps.clear()
    return engine


def serve_rank(
    folder: str,
    checkpoint: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    config: dict[str, Any],
    fault: tuple[str, int, str],
) -> dict[str, Any]:
    """One rank: serves its engine until the host closes it. `config` is what `make_engine` takes, and the `backend` of
    its world. `fault` is (role, rank, what happens to it) in the model step after the first one."""
    rank = int(os.environ["RANK"])
    role, sizes = ("prefill", prefill) if rank < size_of(prefill) else ("decode", decode)
    rank -= 0 if role == "prefill" else size_of(prefill)
    topology = join_world(role, folder, rank, sizes, config.pop("backend", "gloo"))
    engine = make_engine(checkpoint, topology, Path(folder) / f"{role}{rank}", role, **config)
    connection = None
    if topology.is_leader:
        connection = Client(f"{folder}/host", "AF_UNIX")
        connection.send_bytes(role.encode())
    if fault[2] == "stop" and role == fault[0]:  # its connections stay open, so it is missed by its silence
        miss_soon()
    broken = Path(folder) / "broken"
    if [role, rank] == list(fault[:2]):
        break_down(fault[2], broken)
    try:
        pd.remote.serve(engine, connection)
    except pd.RankLost as error:
        if str(error).startswith(f"rank {rank} left"):
            os._exit(3)  # as a host would that cannot go on; its last words have been told
        if fault[2] == "stop":  # it has been missed: let it go
            os.kill(int(broken.read_text()), signal.SIGKILL)
        raise
    pool = engine.channel.pool
    pool.check()
    return {
        "role": role,
        "rank": rank,
        "calls": engine.model.groups.world.calls,
        "bytes": engine.channel.stats.bytes_sent,
        "left": pool.num_pages - pool.num_available,
        "graphs": dict(engine.graphs.num_steps) if isinstance(engine, pd.DecodeEngine) else {},
    }


def meet_alone(checkpoint: str, folder: str) -> dict[str, Any]:
    """One rank of a world whose engines are made with different limits, then alike, warmed up, and closed by one."""
    rank = int(os.environ["RANK"])
    topology = NotedTopology.from_env(tp_size=2, ep_size=1)
    told = []
    for number, limits in enumerate(
        ({"num_pages": 64 + rank}, {"chunked_prefill_size": 8 + rank}, {"page_size": 4 << rank})
    ):
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(
                    make_engine(checkpoint, topology, Path(folder) / f"{number}-{rank}", "decode", **limits)
                )
            except pd.ConfigError as error:
                told.append(str(error))
    engine = make_engine(
        checkpoint, topology, Path(folder) / f"good-{rank}", "decode", mtp=True, num_draft_tokens=2, num_pages=32
    )
    steps = [step.kind for step in engine.warm_up().steps]
    num_calls = len(engine.model.groups.world.calls or ())
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        engine.step()
        engine.wait(0.5)
    num_idle = len(engine.model.groups.world.calls or ()) - num_calls
    if rank == 1:
        engine.close()
    while not engine.closed:
        engine.step()
        engine.wait(1.0)
    return {"told": told, "steps": steps, "num_idle": num_idle, "free": engine.channel.pool.num_free}


def miss_soon() -> None:
    """Has this rank miss others as users' ranks do."""
    wakeup.RANKS = RANKS


def break_down(how: str, broken: Path) -> None:
    """Has this process break down in its second step of the model, and leave its number in a file."""
    run, steps = pd.Model.stream_layers, []

    def broken_run(*arguments: Any, **named: Any) -> Any:
        steps.append(arguments)
        if len(steps) == 2:
            broken.write_text(str(os.getpid()))
            if how == "raise":
                raise ZeroDivisionError("a test's fault")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
        return run(*arguments, **named)

    pd.Model.stream_layers = broken_run  # type: ignore[method-assign]
