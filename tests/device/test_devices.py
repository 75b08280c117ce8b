"""A rank's device is the current one wherever its model is loaded, runs or is captured, whatever thread does it: there
are libraries that launch on the current device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pdinfer as pd
from pdinfer.bench.run import environment
from pdinfer.errors import BackendUnavailable
from pdinfer.parallel import topology
from pdinfer.process import memory, streams
from pdinfer.process.modes import own_modes
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.device.models import PACKED
from tests.device.test_tokens import CPU, NUM_PAGES, PAGE_SIZE
from tests.e2e.drafts import Streams, check_equal
from tests.e2e.setups import Setup, by_request, collect, join, prompt_of
from tests.forks import FAR_S
from tests.mutants import ROOT
from tests.simulated import order
from tests.simulated.device import DEVICE, OTHER, Properties
from tests.simulated.watch import Watch
from tests.waiting import check_ends

# ---- several devices ------------------------------------------------------------------------------------------------


def test_a_thread_begins_with_the_first_device() -> None:
    order.set_device(OTHER)
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(order.current_stream().device))
    thread.start()
    check_ends(thread)
    assert seen == [DEVICE]
    assert order.current_stream().device == OTHER
    with order.on_device(DEVICE):
        assert order.Stream().device == DEVICE
    assert order.Stream().device == OTHER


def test_an_op_runs_on_the_device_of_its_tensors_and_is_counted_elsewhere() -> None:
    x = torch.zeros(3, device=OTHER)
    with Watch() as watch:
        x.add_(1)
    assert watch.totals()["elsewhere"] == 1
    with Watch() as watch, order.on_device(OTHER):
        x.add_(1)
    assert (watch.totals()["launches"], watch.totals()["elsewhere"]) == (1, 0)
    assert x.device == OTHER


def test_a_stream_makes_its_device_the_current_one() -> None:
    beside, ours = streams.new_stream(OTHER), order.current_stream(OTHER)
    with streams.on_stream(beside):
        assert (order.number_of(None), order.current_stream()) == (1, beside)
    assert (order.number_of(None), order.current_stream(OTHER)) == (0, ours)


@pytest.mark.parametrize("mix", [lambda x, y: x + y, lambda x, y: x.copy_(y), lambda x, y: x.to(y.device)])
def test_tensors_of_two_devices_do_not_mix(mix: Any) -> None:
    with pytest.raises(RuntimeError, match=r"tensors on different devices, .* at tests/device/test_devices.py"):
        mix(torch.zeros(3, device=DEVICE), torch.zeros(3, device=OTHER))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match=r"device gpusim:2 was asked for and torch sees 2 of its kind"):
        streams.make_current(torch.device("privateuseone", 2))


def test_without_a_number_the_current_device_stays() -> None:
    order.set_device(OTHER)
    streams.make_current(torch.device("privateuseone"))
    assert order.number_of(None) == 1


def test_a_device_has_the_number_of_the_current_one() -> None:
    order.set_device(OTHER)
    assert streams.present(torch.device("privateuseone")) == OTHER
    assert streams.present(DEVICE) == DEVICE


@pytest.mark.parametrize("name", ["mem_get_info", "graph"])
def test_a_module_that_lacks_something_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = torch.get_device_module(DEVICE)
    monkeypatch.delattr(owner if name in vars(owner) else type(owner), name)
    with pytest.raises(BackendUnavailable, match=rf"device gpusim:0 cannot hold a model.*torch\.gpusim has no {name};"):
        streams.present(DEVICE)


def test_the_memory_of_a_device_is_what_its_module_says(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = torch.get_device_module(DEVICE)
    monkeypatch.setattr(type(module), "mem_get_info", lambda _, device: (100 + device.index, 300))
    monkeypatch.setattr(type(module), "get_device_properties", lambda _, device: Properties(300 + device.index))
    assert memory.device_memory(OTHER) == memory.DeviceMemory(total=300, in_use=199)
    assert memory.device_memory_bytes(OTHER) == 301


def test_a_run_is_recorded_with_the_devices_that_torch_sees() -> None:
    found = environment()
    assert (found["gpu"], found["gpus"]) == ("gpusim", "2")


def test_autocast_of_the_device_is_off_in_a_step() -> None:
    kind = DEVICE.type
    with torch.autocast(kind, dtype=torch.bfloat16), own_modes(DEVICE):
        assert not torch.is_autocast_enabled(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16), own_modes(DEVICE):
        assert not torch.is_autocast_enabled("cpu")


def test_ranks_meet_by_the_backend_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailable, match=r"tensors on gpusim, and torch\.distributed has no backend"):
        topology._backend_of("gpusim")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "gpusim", "hccl")
    assert topology._backend_of("gpusim") == "cpu:gloo,gpusim:hccl"
    assert topology._backend_of("cuda") == "cpu:gloo,cuda:nccl"
    assert topology._backend_of("cpu") == "gloo"


def test_a_model_runs_on_a_device_called_npu(tmp_path: Path) -> None:
    """With streams, graphs, pinned memory and a transport, in a process of its own: torch knows one such name."""
    write_checkpoint(tmp_path, tiny_config_dict("v32", **LAYERS), mtp=True)
    command = [sys.executable, "-m", "tests.device.npu_job", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=FAR_S)
    assert done.returncode == 0, done.stderr


# ---- a rank ---------------------------------------------------------------------------------------------------------


def test_a_loaded_model_has_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made current before ranks meet: what meets there may use it."""
    connect, seen = pd.Topology.connect, list[int]()

    def connected(topology: pd.Topology, device: torch.device) -> Any:
        seen.append(order.number_of(None))
        return connect(topology, device)

    monkeypatch.setattr(pd.Topology, "connect", connected)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, tiny_config_dict())
        pd.load_model(folder, device=OTHER)
    assert seen == [order.number_of(None)] == [1]


def test_a_capture_is_of_the_device_that_is_asked_for() -> None:
    """`torch.cuda.graph` takes the current device, and one stream for the whole process, where it is told nothing."""
    module: Any = torch.get_device_module(DEVICE)
    with streams.no_collection(), module.graph(module.GPUSIMGraph()):  # as a host does that has one device
        pass
    x, out = torch.ones(3, device=OTHER), torch.zeros(3, device=OTHER)
    stream: Any = streams.new_stream(OTHER)
    graph = streams.capture(lambda: out.copy_(x * 2), stream)  # type: ignore[arg-type, return-value]
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [10] * 3


def test_what_runs_on_another_stream_is_not_in_the_graph() -> None:
    """So a capture on the wrong device is empty, and each replay leaves what the capture left."""
    x, out = torch.ones(3, device=OTHER), torch.zeros(3, device=OTHER)
    module: Any = torch.get_device_module(DEVICE)
    graph = module.GPUSIMGraph()
    with streams.no_collection(), module.graph(graph):
        out.copy_(x * 2)
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [2] * 3


def requests() -> list[pd.Request]:
    return [
        pd.Request(
            request_id=str(length),
            prompt=prompt_of(length),
            sampling=pd.SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True),
        )
        for length in (3, 14, 37)
    ]


LAYERS = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
PACKED_PAGES = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, kv_format="fp8")
PARTS = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, rope_apart=True, index_format="int8")


def served(model: pd.Model, transport: str, cache: pd.CacheConfig = PACKED_PAGES) -> Streams:
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    engine = pd.EngineConfig(max_running_requests=4, num_draft_tokens=1, graph_batch_sizes=(4,))
    with join(model, transport, prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        setup.decodes[0].warm_up()
        events = by_request(submitted(setup))
        assert "steps that ran captured: 0" not in str(setup.decodes[0].graphs)
    return events


def submitted(setup: Setup) -> list[pd.Event]:
    for request in requests():
        setup.pairing.submit(request)
    return collect(setup.pairing)


def random_model_on(device: torch.device) -> pd.Model:
    return random_model(tiny_config("v32", **LAYERS, **dict(PACKED)), device=device, mtp=True)


@pytest.mark.parametrize("transport", [pytest.param("loopback", marks=pytest.mark.full), "tcp"])
def test_engines_of_any_thread_launch_on_their_device(transport: str) -> None:
    """Steps, captures, replays, drafts and pushes: a kernel of a library without a guard would go where they go."""
    there = random_model_on(OTHER)
    order.set_device(DEVICE)  # as in the thread of a server that did not load the model
    with Watch(everywhere=True) as watch:
        streams = served(there, transport)
    names = {line.partition(" @ ")[0] for line in watch.counts["elsewhere"]}
    assert names <= {"zero_", "new_zeros"}, watch.counts["elsewhere"]  # pages and states, by torch
    check_equal(random_model_on(CPU), requests(), streams, served_on_cpu(random_model_on(CPU)))


def test_steps_over_pages_in_parts_are_captured(tmp_path: Path) -> None:
    """So joining them waits for nothing."""
    write_checkpoint(tmp_path, tiny_config_dict("v32", **LAYERS), mtp=True)
    here, there = (pd.load_model(tmp_path, device=device, mtp=True, cache=PARTS) for device in (CPU, DEVICE))
    check_equal(here, requests(), served(there, "tcp", PARTS), served_on_cpu(here, PARTS))


def served_on_cpu(model: pd.Model, cache: pd.CacheConfig = PACKED_PAGES) -> Streams:
    pool = pd.PagePool(model, cache)
    with join(model, "shared", decode_pools=[pool], engine=pd.EngineConfig(num_draft_tokens=1)) as setup:
        return by_request(submitted(setup))


def test_a_model_by_itself_computes_on_its_device() -> None:
    model = random_model_on(OTHER)
    order.set_device(DEVICE)
    with Watch() as watch:
        logits_TV = model.logits([1, 2, 3])
        model.mtp_logits([1, 2, 3], 4)
        model.activations([1, 2, 3])
    names = {line.partition(" @ ")[0] for line in watch.counts["elsewhere"]}
    assert names <= {"zero_"}, watch.counts["elsewhere"]  # pages, by torch
    assert logits_TV.device == OTHER
