"""What ranks do in tests of live rebalancing (see tests/ranks.py)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pdinfer as pd
from pdinfer.moe.balance.process import SolverProcess
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.migration.transfer import ExpertTransfer
from tests.e2e import rank_worlds
from tests.e2e.rank_worlds import join_world, size_of
from tests.waiting import TIMEOUT_S

Engine = pd.PrefillEngine | pd.DecodeEngine
TWO = {"dp_size": 2, "ep_size": 2}


def scattered(running: pd.ExpertPlacement, seed: int) -> pd.ExpertPlacement:
    """Return any placement of these sizes but `running`, the same for a seed on every rank. An expert may be twice on a
    rank."""
    random = np.random.default_rng(seed)
    ranks, experts = running.num_ranks, running.num_logical_experts
    more = random.integers(0, experts, (running.num_layers, running.num_slots - experts))
    table = np.array([random.permutation(np.concatenate([np.arange(experts), row])) for row in more])
    if np.array_equal(table, running.physical_to_logical_map):
        return scattered(running, seed + 1_000_000)
    return pd.ExpertPlacement(physical_to_logical_map=table, num_logical_experts=experts, num_ranks=ranks)


# ---- under load ----------------------------------------------------------------------------------------------------


def serve_rank(
    folder: str,
    checkpoint: str,
    prefill: dict[str, int],
    decode: dict[str, int],
    config: dict[str, Any],
    _fault: Any,
) -> dict[str, Any]:
    """Serve an engine. Decode's ranks stage one placement after the other, until `count` were in use; prefill's follow
    their load. The rest of `config` as for `rank_worlds.serve_rank`."""
    rank = int(os.environ["RANK"])
    role, sizes = ("prefill", prefill) if rank < size_of(prefill) else ("decode", decode)
    rank -= 0 if role == "prefill" else size_of(prefill)
    topology = join_world(role, folder, rank, sizes, config.pop("backend", "gloo"))
    count, experts = config.pop("count"), {"num_redundant_experts": config.pop("redundant")}
    if role == "prefill":
        config["eplb_rebalance_num_iterations"] = 10
    engine = rank_worlds.make_engine(
        checkpoint,
        topology,
        Path(folder) / f"{role}{rank}",
        role,
        experts=experts | {"ep_dispatch_algorithm": "dynamic", "expert_distribution_recorder_mode": "stat"},
        **config,
    )
    addresses, killed = addresses_of(engine), kill_once()
    ended = threading.Event()
    stager = threading.Thread(target=stage_all, args=(engine, count, ended))
    if role == "decode":
        stager.start()
    connection = None
    if topology.is_leader:
        connection = Client(f"{folder}/host", "AF_UNIX")
        connection.send_bytes(role.encode())
    pd.remote.serve(engine, connection)
    ended.set()
    if role == "decode":
        stager.join()
    engine.channel.pool.check()
    load = engine.load()
    assert addresses_of(engine) == addresses
    return {
        "role": role,
        "rank": rank,
        "killed": len(killed),
        "alike": [load.placement_epoch, load.placement_error, placement_of(engine)],
        "graphs": dict(engine.graphs.num_steps) if isinstance(engine, pd.DecodeEngine) else {},
    }


def kill_once() -> list[int]:
    """Kill this rank's solver process at its first request; return where its number will be."""
    ask, killed = SolverProcess.ask, []

    def broken(solver: SolverProcess, *arguments: Any, **named: Any) -> None:
        ask(solver, *arguments, **named)
        if not killed and (process := solver._process) is not None:
            killed.append(process.pid)
            process.kill()

    SolverProcess.ask = broken  # type: ignore[method-assign]
    return killed


def count_agreements() -> list[bool]:
    """Return a list that grows by one with every agreement of this rank."""
    agreed, seen = Rebalancing.agreed, []

    def counted(rebalancing: Rebalancing, *arguments: Any, **named: Any) -> bool:
        seen.append(agreed(rebalancing, *arguments, **named))
        return seen[-1]

    Rebalancing.agreed = counted  # type: ignore[method-assign]
    return seen


def stage_all(engine: Engine, count: int, ended: threading.Event) -> None:
    """Stage placements until `count` have come into use. A dropped one is staged again."""
    while not ended.wait(0.02):
        load = engine.load()
        if load.placement_epoch >= count:
            return
        running = engine.model.experts.placement
        if not load.is_placement_staged and running is not None:
            try:
                engine.experts.stage(scattered(running, load.placement_epoch), epoch=load.placement_epoch + 1)
            except pd.ConfigError:  # it came into use meanwhile
                continue


def addresses_of(engine: Engine) -> list[int]:
    """Return the addresses of the experts' weights and tables."""
    replicas = engine.model.experts.replicas
    tables = [] if replicas is None else [replicas.slots_LEX, replicas.until_LEX]
    weights = [stack for layer in engine.model.moe_layers() for stack in (layer.experts.gate_up, layer.experts.down)]
    return [tensor.data_ptr() for tensor in (*tables, *weights) if isinstance(tensor, torch.Tensor)]


def placement_of(engine: Engine) -> Any:
    placement = engine.model.experts.placement
    return None if placement is None else placement.physical_to_logical_map.tolist()


# ---- engines that idle ---------------------------------------------------------------------------------------------


def idle_engine(
    checkpoint: str, folder: str, sizes: dict[str, int], *, backend: str = "gloo", **config: Any
) -> pd.DecodeEngine:
    """Make a decode engine of this rank, without requests."""
    topology = join_world("idle", folder, int(os.environ["RANK"]), sizes, backend)
    experts = {"num_redundant_experts": 4, "expert_distribution_recorder_mode": "window"}
    channel_at = Path(folder) / f"idle{topology.rank}"
    engine = rank_worlds.make_engine(checkpoint, topology, channel_at, "decode", experts=experts, num_pages=8, **config)
    assert isinstance(engine, pd.DecodeEngine)
    return engine


def step_until(engine: Engine, done: Callable[[], bool]) -> None:
    """Step and wait as a host does."""
    end = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < end, engine.load()
        assert engine.step() == []
        engine.wait(0.05)


def placed(load: pd.types.DecodeLoad) -> list[Any]:
    return [load.placement_epoch, load.is_placement_staged, bool(load.placement_error)]


def stage_and_cancel(checkpoint: str, folder: str) -> dict[str, Any]:
    """Rank 0 alone stages, rank 1 stages another placement and cancels, then both stage the same."""
    with idle_engine(checkpoint, folder, TWO, rebalance_bytes_per_step=1) as engine:
        rank, running = int(os.environ["RANK"]), engine.model.experts.placement
        assert running is not None
        mine = [scattered(running, 10 + rank), scattered(running, 20)]
        seen = []
        agreements = count_agreements()
        if rank == 0:
            engine.experts.stage(mine[0])
        first = len(agreements)
        step_until(engine, lambda: len(agreements) > first + 3)
        seen.append(placed(engine.load()))
        if rank == 1:
            engine.experts.stage(mine[0])
        first = len(agreements)
        step_until(engine, lambda: len(agreements) > first + 3)
        seen.append(placed(engine.load()))
        if rank == 1:
            engine.experts.cancel()
        step_until(engine, lambda: not engine.load().is_placement_staged)
        seen.append(placed(engine.load()))
        engine.experts.stage(mine[1])
        first = len(agreements)
        step_until(engine, lambda: not engine.load().is_placement_staged)
        seen.append(placed(engine.load()))
        return {"seen": seen, "agreements": len(agreements) - first, "same": engine.model.experts.placement == mine[1]}


def logits_after_moves(checkpoint: str, folder: str, prompt: list[int], **config: Any) -> list[list[float]]:
    """Take two placements into use, one behind the other, and return the logits that these experts give. `config` as
    for `idle_engine`."""
    with idle_engine(checkpoint, folder, TWO, **config) as engine:
        for seed in range(2):
            running = engine.model.experts.placement
            assert running is not None
            engine.experts.stage(scattered(running, seed))
            step_until(engine, lambda: not engine.load().is_placement_staged)
        assert engine.load().placement_epoch == 2
        logits: list[list[float]] = engine.model.logits(prompt).tolist()
        return logits


def fail_in_the_middle(checkpoint: str, folder: str) -> dict[str, Any]:
    """Rank 1 runs out of memory in the second part of a migration, and has enough for the next try."""
    with idle_engine(checkpoint, folder, TWO, rebalance_bytes_per_step=1) as engine:
        rank, running = int(os.environ["RANK"]), engine.model.experts.placement
        assert running is not None
        before = [layer.experts.read_slot(slot) for layer in engine.model.moe_layers() for slot in range(6)]
        new = scattered(running, 3)
        pack, parts = ExpertTransfer.pack, []

        def broken(transfer: ExpertTransfer, part: int) -> None:
            parts.append(part)
            if part == 1 and rank == 1:
                raise MemoryError("a test's fault")
            pack(transfer, part)

        ExpertTransfer.pack = broken  # type: ignore[method-assign]
        try:
            engine.experts.stage(new)
            step_until(engine, lambda: not engine.load().is_placement_staged)
        finally:
            ExpertTransfer.pack = pack  # type: ignore[method-assign]
        after = [layer.experts.read_slot(slot) for layer in engine.model.moe_layers() for slot in range(6)]
        failed = engine.load()
        untouched = all(map(torch.equal, before, after)) and engine.model.experts.placement is running
        engine.experts.stage(new)
        step_until(engine, lambda: not engine.load().is_placement_staged)
        return {
            "parts": parts,
            "error": failed.placement_error,
            "untouched": untouched,
            "epochs": [failed.placement_epoch, engine.load().placement_epoch],
            "error_after": engine.load().placement_error,
        }


def add_up(checkpoint: str, folder: str) -> dict[str, Any]:
    """Ranks counted different things, and rank 1 asks for the sum."""
    rank = int(os.environ["RANK"])
    with idle_engine(checkpoint, folder, TWO) as engine:
        recorder = engine.model.experts.recorder
        assert recorder is not None
        recorder.step_LE += 1 + rank
        recorder.end_step()
        assert engine.experts.load is None
        if rank == 1:
            engine.experts.sum_load()
        step_until(engine, lambda: engine.experts.load is not None)
        assert engine.experts.load is not None
        return {"load": engine.experts.load.tolist(), "staged": engine.load().is_placement_staged}
