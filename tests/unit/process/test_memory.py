"""How much of a device's memory is in use, and how many pages a pool gets of the rest."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
import torch

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError
from pdinfer.kv.memfd import Memfd
from pdinfer.kv.pool import PagePool
from pdinfer.model import model as model_module
from pdinfer.parallel.groups import Groups
from pdinfer.process.memory import DeviceMemory, device_memory, main_memory, main_memory_bytes
from pdinfer.testing import random_model, tiny_config
from tests.unit.parallel.thread_groups import groups_of, on_ranks

CPU = torch.device("cpu")
MIB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    """Make a file system of a machine with 1000 MiB, of which 400 are available, and with `files`."""
    meminfo = f"MemTotal: {1000 << 10} kB\nMemFree: {100 << 10} kB\nMemAvailable: {400 << 10} kB\nHugePages_Total: 0\n"
    for name, text in ({"proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group_files(folder: str, limit: str, used: int, inactive: int, *, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    stat = f"anon 5\n{names[2]} {inactive * MIB}\n"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": str(used * MIB), f"{folder}/memory.stat": stat}


V2 = {"proc/self/cgroup": "0::/pods/ours/job\n"}
V1 = {"proc/self/cgroup": "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "total", "in_use"),
    [
        ({}, 1000, 600),
        (V2, 1000, 600),
        (V2 | group_files("sys/fs/cgroup/pods/ours/job", "max", 90, 10), 1000, 600),
        (V2 | group_files("sys/fs/cgroup/pods/ours", str(300 * MIB), 90, 10), 300, 80),
        (V2 | group_files("sys/fs/cgroup/pods/ours", str(500 * MIB), 90, 10), 1000, 600),  # the machine has less left
        (V1 | group_files("sys/fs/cgroup/memory", str(200 * MIB), 90, 40, version=1), 200, 50),
        (V1 | group_files("sys/fs/cgroup/memory/docker/abc", str(100 * MIB), 90, 0, version=1), 100, 90),
        (V1 | group_files("sys/fs/cgroup/memory", str(2**63 - 4096), 90, 0, version=1), 1000, 600),
    ],
)
def test_a_container_counts_where_it_leaves_less_than_the_machine(
    tmp_path: Path, files: dict[str, str], total: int, in_use: int
) -> None:
    here = main_memory(machine(tmp_path, files))
    assert (here.total / MIB, here.in_use / MIB) == (total, in_use)


def test_without_proc_it_is_what_this_process_had(tmp_path: Path) -> None:
    here = main_memory(tmp_path)
    assert here.total == main_memory_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert MIB < here.in_use < here.total


def test_pages_that_nobody_has_touched_are_in_use_too(tmp_path: Path) -> None:
    machine(tmp_path, {})
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/fd").symlink_to("/proc/self/fd")
    before = main_memory(tmp_path).in_use
    memfd = Memfd(64 * MIB, "pool")
    assert main_memory(tmp_path).in_use - before == 64 * MIB
    memfd.view[: 16 * MIB] = bytes(16 * MIB)  # from now on the kernel counts these itself
    assert main_memory(tmp_path).in_use - before == 48 * MIB
    memfd.close()
    assert main_memory(tmp_path).in_use == before


def test_of_a_gpu_it_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [1]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 - 30 - sum(kept) - device.index, 80))
    assert device_memory(torch.device("cuda:1")) == DeviceMemory(total=80, in_use=31)


def put_in_use(monkeypatch: pytest.MonkeyPatch, total: int, in_use: int) -> None:
    here = DeviceMemory(total=total, in_use=in_use)
    monkeypatch.setattr(model_module, "device_memory", lambda _: here)


def test_a_pool_without_a_size_holds_64_full_sequences_or_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(tiny_config(max_position_embeddings=100))
    layout = model.kv_layout(CacheConfig(page_size=16))
    wanted = 64 * 7
    for free, expected in ((2 * wanted, wanted), (2 * wanted - 2, wanted - 1), (2, 1)):
        put_in_use(monkeypatch, (free + 9) * layout.page_bytes, 9 * layout.page_bytes)
        assert model.auto_num_pages(layout, None) == expected
    put_in_use(monkeypatch, 10 * layout.page_bytes, 9 * layout.page_bytes)
    with pytest.raises(ConfigError, match="a pool of automatic size leaves"):
        model.auto_num_pages(layout, None)


@pytest.mark.parametrize(
    ("fraction", "in_use", "expected"), [(0.5, 0, 50), (0.5, 20, 30), (0.259, 20, 5), (0.215, 20, 1), (0.995, 98, 1)]
)
def test_a_fraction_of_the_memory_is_for_what_is_in_use_and_for_pages(
    fraction: float, in_use: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model()
    layout = model.kv_layout(CacheConfig(page_size=16))
    put_in_use(monkeypatch, 100 * layout.page_bytes, in_use * layout.page_bytes)
    assert PagePool(model, CacheConfig(page_size=16, mem_fraction_static=fraction)).num_pages == expected


def test_a_fraction_of_a_gpu_counts_what_any_process_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.85 of 141 GB with 80 GB of weights leaves 39.85 GB, not 119.85."""
    model = random_model()
    layout = model.kv_layout(CacheConfig(page_size=16))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (61 * 10**9, 141 * 10**9))
    monkeypatch.setattr(model_module, "device_memory", lambda _: device_memory(torch.device("cuda:0")))
    assert model.auto_num_pages(layout, 0.85) == int(141e9 * 0.85 - 80e9) // layout.page_bytes


@pytest.mark.parametrize(("in_use", "buffer", "expected"), [(60, 10, 31), (60, 0, 21), (95, 30, 5)])
def test_a_fraction_does_not_count_the_buffer_of_a_dispatcher(
    in_use: int, buffer: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for weights and pages, which get no more than what is free."""
    model = random_model()
    layout = model.kv_layout(CacheConfig(page_size=16))
    put_in_use(monkeypatch, 100 * layout.page_bytes, in_use * layout.page_bytes)
    model.experts.buffer_bytes = buffer * layout.page_bytes
    assert model.auto_num_pages(layout, 0.815) == expected


def test_weights_beyond_the_fraction_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_use(monkeypatch, 80 << 30, 65 << 30)
    told = r"mem_fraction_static 0\.8 leaves -1\.00 GiB for pages .* 65\.00 of 80\.00 GiB of cpu are in use"
    with pytest.raises(ConfigError, match=told):
        PagePool(random_model(), CacheConfig(mem_fraction_static=0.8))


def test_a_second_pool_gets_what_a_higher_fraction_adds() -> None:
    """On this machine's own memory, with the first pool untouched."""
    model = random_model()
    here = device_memory(CPU)
    free = 1 - here.in_use / here.total
    pools = [PagePool(model, CacheConfig(page_size=256, mem_fraction_static=1 - free * left)) for left in (0.6, 0.3)]
    first, second = (pool.memory.num_bytes / here.total / free for pool in pools)
    assert first + second < 0.9  # 0.4 + 0.3, and room for what others do meanwhile; it was 1.1 and more
    assert second > 0


@pytest.mark.parametrize(
    ("in_use", "machines", "expected"),
    [((40, 40, 50), (7, 7, 8), 20), ((40, 40, 50), (0, 0, 0), 30), ((40, 40, 75), (7, 7, 8), 5)],
)
def test_ranks_have_as_many_pages_as_the_poorest_and_share_a_machine(
    in_use: tuple[int, ...], machines: tuple[int, ...], expected: int
) -> None:
    model = random_model()
    layout = model.kv_layout(CacheConfig())

    def pages(groups: Groups) -> int:
        rank = groups.world.rank
        room = (80 - in_use[rank]) * layout.page_bytes
        return attrs.evolve(model, groups=groups)._least_room(machines[rank], room) // layout.page_bytes

    assert on_ranks(groups_of(dp_size=3), pages) == [expected] * 3
