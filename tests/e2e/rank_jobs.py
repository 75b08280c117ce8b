"""What ranks do in tests: functions that run on every rank of a world, by name (see tests/ranks.py). Called in the
test's own process, without sizes, they are the one rank that others are compared with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import pdinfer as pd
from pdinfer.engine.ranks.wakeup import Wakeup
from pdinfer.execution.runner import ModelRunner
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kv.view import KVView
from pdinfer.model import load as load_module
from pdinfer.model import load_plan
from pdinfer.model import model as model_module
from pdinfer.model.batch import Batch, Row
from pdinfer.parallel import groups as groups_module
from pdinfer.parallel.groups import Group, Groups
from pdinfer.process.memory import DeviceMemory
from tests.e2e.rank_worlds import miss_soon
from tests.forks import FAR_S
from tests.ranks import COLLECTIVE_S


def noted(groups: Groups) -> list[str]:
    """The collectives that this rank takes part in from now on, those of all groups in one list."""
    calls: list[str] = []
    for group in attrs.astuple(groups, recurse=False):
        if isinstance(group, Group):
            object.__setattr__(group, "calls", calls)
    return calls


def load(folder: str, sizes: dict[str, int], *, dtype: str = "float32", **options: Any) -> pd.Model:
    """This rank's part of the model in `folder`."""
    topology = pd.Topology.from_env(**sizes) if sizes else None
    return pd.load_model(folder, topology=topology, dtype=getattr(torch, dtype), **options)


def logits(
    folders: Sequence[str], sizes: dict[str, int], prompts: Sequence[Sequence[int]], **options: Any
) -> list[dict[str, Any]]:
    """For each folder the logits of each prompt, with `mtp` of the last one behind token 5 too, and the collectives;
    then its hidden states, in chunks, and the experts of its last layer."""
    found = []
    for folder in folders:
        model = load(folder, sizes, **options)
        calls, last = noted(model.groups), model.config.num_hidden_layers - 1
        looked = model.activations(prompts[-1], layers=(last, 0), routing=True, chunk_size=7)
        found.append(
            {
                "hidden": looked.hidden_LTD.tolist(),
                "experts": looked.routing[last].experts_TK.sort(-1)[0].tolist(),
                "logits": [model.logits(prompt).tolist() for prompt in prompts],
                "mtp": model.mtp_logits(prompts[-1], 5).tolist() if model.mtp else [],
                "weights_id": model.weights_id.hex(),
                "page_bytes": model.kv_layout(pd.CacheConfig(page_size=4)).page_bytes,
                "calls": calls,
            }
        )
    return found


def identities(folders: Sequence[str], sizes: dict[str, int]) -> list[str]:
    return [load(folder, sizes).weights_id.hex() for folder in folders]


def load_own(folders: Sequence[str], sizes: dict[str, int]) -> None:
    """Every rank loads another folder."""
    load(folders[int(os.environ["RANK"])], sizes)


def load_in_strips_on_rank_0(folder: str, sizes: dict[str, int]) -> list[str]:
    """Rank 1 would read plain matrices, whatever this CPU is: what the experts of each layer lie in."""
    in_strips = frozenset({Plain}) if os.environ["RANK"] == "0" else frozenset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "lie_in_strips", lambda _: in_strips)
        model = load(folder, sizes, dtype="bfloat16")
    return [type(layer.experts.gate_up).__name__ for layer in model.moe_layers()]


def load_at_own_pace(folder: str, sizes: dict[str, int]) -> list[int]:
    """Rank 0 takes care to be heard of after every tensor, others are not heard of until they are done: how often all
    heard of each other, and how many tensors this rank read."""
    rounds, tensors = [], []

    class Told(groups_module.InTouch):
        def __init__(self, group: Group, device: torch.device) -> None:
            super().__init__(group, device, every_s=0.0 if group.rank == 0 else 1e6)

        def _all_are_done(self, done: int) -> bool:
            rounds.append(done)
            return super()._all_are_done(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "InTouch", Told)
        load(folder, sizes, progress=lambda done, total: tensors.append(done))
    return [len(rounds), len(tensors)]


def connect_own(sizes: Sequence[dict[str, int]]) -> None:
    """Every rank has another idea of the sizes."""
    pd.Topology.from_env(**sizes[int(os.environ["RANK"])]).connect()


def prefill(folder: str, sizes: dict[str, int], prompts: Sequence[Sequence[int]], chunk: int) -> dict[str, Any]:
    """All prompts together, `chunk` tokens of each per step, as an engine does, an empty step, and one of decode: the
    cache, and the logits behind every step's last tokens."""
    model = load(folder, sizes, mtp=True)
    layout = model.kv_layout(pd.CacheConfig(page_size=4))
    counts = [layout.num_pages(len(prompt) + 1) for prompt in prompts]
    memory = model.allocate_pages(layout, sum(counts))
    runner = ModelRunner(model, memory)
    pages = [range(sum(counts[:at]), sum(counts[: at + 1])) for at in range(len(prompts))]
    seen = []
    for _ in runner.prefill([]):
        pass
    for start in range(0, max(map(len, prompts)), chunk):
        rows = [
            Row(prompt[start : start + chunk], start, own, next(iter(prompt[start + chunk :]), None))
            for prompt, own in zip(prompts, pages, strict=True)
            if len(prompt) > start
        ]
        for _ in runner.prefill(rows):
            pass
        seen.append(model.head(runner._last_BD).tolist())
    rows = [Row([7], len(prompt), own) for prompt, own in zip(prompts, pages, strict=True)]
    for step in (rows, []):
        batch = Batch.build(step, page_size=4, device=model.device, decode=True, cp=model.groups.cp)
        seen.append(model.head(model.norm(model.forward(batch, KVView.of(memory)))).tolist())
    return {"logits": seen, "cache": memory.buffer.view(torch.float32).flatten().tolist()}


def sized_pool(folder: str, pages_in_use: Sequence[int], fraction: float) -> int:
    """The pages of a pool of each rank where its machine has room for 100, and so many in use."""
    model = load(folder, {"tp_size": 1})
    rank, page_bytes = model.topology.rank, model.kv_layout(pd.CacheConfig()).page_bytes
    here = DeviceMemory(total=100 * page_bytes, in_use=pages_in_use[rank] * page_bytes, shared_by=7 + rank // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "device_memory", lambda _: here)
        return pd.PagePool(model, pd.CacheConfig(mem_fraction_static=fraction)).num_pages


def timeouts(sizes: dict[str, int]) -> dict[str, float]:
    """How long a collective of each group of several ranks may take, in seconds."""
    groups = attrs.astuple(pd.Topology.from_env(**sizes).connect(), recurse=False)
    lookouts = {id(group.lookout) for group in groups if isinstance(group, Group) and group.process_group is not None}
    assert len(lookouts) == 1
    return {
        group.name: group.process_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in groups
        if isinstance(group, Group) and group.process_group is not None
    }


def stand_still(folder: str) -> str:
    """The last rank stands still, while one waits for it in a collective and the first one in an exchange: what each
    of these is told."""
    miss_soon()
    world = pd.Topology.from_env().connect().world
    wakeup = Wakeup(world, lambda number: None)
    world.lookout.look = wakeup.check
    pids = world.all_gather(torch.tensor([os.getpid()], dtype=torch.int64, device="cpu")).tolist()
    others, end = world.size - 1, time.monotonic() + FAR_S
    while len(wakeup._beats._watches) < others:
        assert time.monotonic() < end
        time.sleep(0.01)
    world.all_reduce(torch.zeros(1, device="cpu"))
    if world.rank == others:
        os.kill(os.getpid(), signal.SIGSTOP)
    calls = (
        lambda: world.exchange([], [(others, torch.zeros(1, device="cpu"))]),
        lambda: world.all_reduce(torch.zeros(1, device="cpu")),
    )
    with pytest.raises(pd.RankLost) as raised:
        calls[world.rank]()
    (Path(folder) / str(world.rank)).touch()
    while len(os.listdir(folder)) < others:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(pids[others], signal.SIGKILL)
    wakeup.close()
    return str(raised.value)


def beside_the_host(sizes: dict[str, int]) -> list[int]:
    """Collectives of the host and ours, in another order on each rank; then either ends before the other."""
    groups = pd.Topology.from_env(**sizes).connect()
    ours, of_two, hosts = (torch.tensor([number], dtype=torch.int64, device="cpu") for number in (1, 10, 100))
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(hosts, async_op=True),
        lambda: dist.all_reduce(ours, group=groups.world.process_group, async_op=True),
        lambda: dist.all_reduce(of_two, group=groups.tp.process_group, async_op=True),
    ]
    for work in [call() for call in (calls if dist.get_rank() % 2 else reversed(calls))]:
        work.wait()
    groups.close()
    with pytest.raises(ValueError, match="is not initialized in the world group map"):
        dist.get_backend(groups.tp.process_group)
    dist.all_reduce(hosts)
    again = pd.Topology.from_env(**sizes).connect()
    dist.destroy_process_group()
    again.world.all_reduce(ours)
    again.close()
    return [int(ours), int(of_two), int(hosts)]


def beside_a_host_of_devices_alone(folder: str) -> int:
    """The host's groups carry no host tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    groups = pd.Topology.from_env(tp_size=2).connect(timeout_s=COLLECTIVE_S)
    total = int(groups.tp.all_reduce(torch.ones(1, dtype=torch.int64, device="cpu")))
    groups.world.all_reduce(torch.ones(1, device="cpu"))
    return total


def beside_a_larger_host() -> None:
    """An engine of one rank less than the host has."""
    size = dist.get_world_size() - 1
    pd.Topology(rank=min(dist.get_rank(), size - 1), world_size=size, dp_size=size).connect()


def meet_elsewhere(port: int) -> int:
    """Three ranks meet in a store that belongs to none of them. The first one dies, and the others meet there again."""
    dist.barrier()
    dist.destroy_process_group()
    store, rank = dist.TCPStore("127.0.0.1", port, is_master=False), int(os.environ["RANK"])
    first = pd.Topology(rank=rank, world_size=3, dp_size=3).connect(store=dist.PrefixStore("first", store))
    with pytest.raises(pd.ConfigError, match="initialized before: give it to init_process_group"):
        pd.Topology(rank=rank, world_size=3, dp_size=3).connect(store=store)
    first.world.all_reduce(torch.zeros(1, device="cpu"))
    if rank == 0:
        os._exit(3)
    with pytest.raises(pd.RankLost):
        first.world.all_reduce(torch.zeros(1, device="cpu"))
    first.close()
    again = pd.Topology(rank=rank - 1, world_size=2, dp_size=2).connect(store=dist.PrefixStore("again", store))
    total = int(again.world.all_reduce(torch.ones(1, dtype=torch.int64, device="cpu")))
    again.close()
    return total
