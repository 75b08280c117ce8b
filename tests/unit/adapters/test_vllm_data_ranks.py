"""Data-parallel ranks: each is an engine of its own, at an address of its own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pdinfer.adapters.vllm.settings import Settings
from pdinfer.adapters.vllm.worker import IN_STEP_S, LEAST_IDLE_S
from pdinfer.errors import ConfigError
from tests.unit.adapters.fake_vllm import Pairs, run
from tests.unit.adapters.test_vllm import prompt_of, submit


def free_ports() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.mark.parametrize(
    ("listen", "rank", "says"),
    [
        ("tcp://127.0.0.1:7100", 0, "tcp://127.0.0.1:7100"),
        ("tcp://127.0.0.1:7100", 3, "tcp://127.0.0.1:7103"),
        ("tcp://[::1]:7100", 1, "tcp://[::1]:7101"),
        ("tcp://127.0.0.1:0", 1, "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1", 1, "tcp://127.0.0.1"),
        ("shm:///run/kv", 0, "shm:///run/kv"),
        ("shm:///run/kv", 2, "shm:///run/kv.2"),
        ("shm://", 2, "shm://"),
    ],
)
def test_a_rank_listens_where_nobody_else_does(listen: str, rank: int, says: str) -> None:
    assert Settings(sends=True, receives=False, listen=listen).of_rank(rank).listen == says


def test_a_rank_beyond_the_last_port_ends_at_start(pair: Pairs) -> None:
    with pytest.raises(ConfigError, match=r"got 'tcp://127\.0\.0\.1:65536'"):
        pair.engine("kv_producer", {"listen": "tcp://127.0.0.1:65535"}, data_rank=1, data_size=2)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_prompts_land_from_either_rank(pair: Pairs, scheme: str, tmp_path: Path) -> None:
    listen = f"tcp://127.0.0.1:{free_ports()}" if scheme == "tcp" else f"shm://{tmp_path}/kv"
    ranks = [pair.engine("kv_producer", {"listen": listen}, data_rank=rank, data_size=2) for rank in range(2)]
    own = {"listen": "tcp://127.0.0.1:0" if scheme == "tcp" else "shm://"}
    decodes = [pair.engine("kv_consumer", own, data_rank=rank, data_size=2) for rank in range(2)]
    assert ranks[0].address != ranks[1].address
    for at in range(8):
        prefill, decode = ranks[at % 2], decodes[at // 2 % 2]
        ours, theirs = submit(prefill, decode, prompt_of(30 + at, at), str(at))
        run([*ranks, *decodes], lambda of=(ours, theirs): all(one.is_over for one in of))  # type: ignore[misc]
        assert theirs.landed is not None
    assert [engine.counts.data["sent"] for engine in ranks] == [4, 4]


@pytest.mark.parametrize(("data_size", "least_s"), [(1, LEAST_IDLE_S), (2, IN_STEP_S)])
def test_a_rank_that_waits_hardly_holds_up_those_in_step_with_it(
    pair: Pairs, data_size: int, least_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = pair.engine("kv_producer", data_size=data_size)
    prefill.add("p", prompt_of(40), {"do_remote_decode": True, "room": "ab" * 16})
    slept: list[float] = []

    def wait(timeout_s: float) -> Any:
        return slept.append(timeout_s)

    monkeypatch.setattr(prefill.worker._worker._news, "wait", wait)
    for _ in range(4):
        prefill.step()
    assert slept[0] == least_s
    assert (max(slept) == IN_STEP_S) == (data_size > 1)
