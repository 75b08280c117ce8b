"""Engines in processes of their own, from wherever Python runs; nothing is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.planning.calibration import LEAST_ROWS
from pdinfer.planning.measured import seen
from tests.backends import ROOT, child_environment
from tests.e2e.setups import by_request, tokens_of
from tests.waiting import TIMEOUT_S, wait_until

TINY = ROOT / "examples" / "tiny"
PAGES = pd.CacheConfig(page_size=16, num_pages=64)
REQUEST = pd.Request(
    request_id="a", prompt=(256, *b"calc 47+38="), sampling=pd.SamplingParams(max_new_tokens=3, temperature=0)
)
ANSWER = [ord("8"), ord("5"), ord(";")]


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which sockets are made; its name is short, as theirs have to be."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except FileNotFoundError:
        return False


@contextmanager
def pair(**more: Any) -> Iterator[tuple[pd.Pairing, Any, Any]]:
    with ThreadPoolExecutor() as pool:
        spawn = pd.remote.spawn_prefill, pd.remote.spawn_decode
        prefill, decode = pool.map(lambda start: start(TINY, cache=PAGES, **more), spawn)
    with pd.Pairing(prefill, decode) as pairing:
        yield pairing, prefill, decode


def test_engines_in_processes_of_their_own_serve_and_end(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = b"sixteen bytes or more"
    with pair(key=key, warm_up=3) as (pairing, prefill, decode):
        steady = [warm_up for port in (prefill, decode) for warm_up in port.warm_ups[1:]]
        rows = Counter(row.kind for row in seen(steady))
        assert rows == {"prefill": LEAST_ROWS, "decode": 2 * 7}  # of 16 and 1024 tokens, of 1 to 64 sequences
        assert tokens_of(pairing.generate([REQUEST])) == ANSWER
        assert decode.load().transport == "shm"
        ports = prefill, decode
        for port in ports:
            assert port.process.poll() is None
            assert os.getsid(port.process.pid) == port.process.pid  # the host's Ctrl-C is not for it
            arguments = Path(f"/proc/{port.process.pid}/cmdline").read_bytes()
            assert f"\0pdinfer-{port.role}\0".encode() in arguments
            assert key not in arguments
        assert list(scratch.iterdir())
        prefill.process.kill()  # it cannot clean up behind itself
        wait_until(lambda: pairing.step() == [] and bool(pairing.stats.ports_lost))
    shown = capsys.readouterr().err
    assert re.search(r"loading prefill: 100 % of \d+\.\d MB\n", shown)
    assert re.search(r"loading decode: 100 % of \d+\.\d MB\n", shown)
    wait_until(lambda: [port.process.poll() for port in ports] == [-signal.SIGKILL, 0])
    wait_until(lambda: not list(scratch.iterdir()))


@pytest.mark.full
def test_a_process_is_ordered_the_rest_too(scratch: Path) -> None:
    more = {"transport": partial(pd.kv.SocketTransport, host="127.0.0.1"), "warm_up": 3}
    with pair(engine=pd.EngineConfig(num_draft_tokens=2, max_running_requests=2), **more) as (pairing, prefill, decode):
        assert decode.load().transport == "tcp"
        events = by_request(pairing.generate([REQUEST]))["a"]
        assert tokens_of(events) == ANSWER
        assert events[-1].usage is not None
        assert events[-1].usage.num_draft_tokens
        prefill.process.terminate()
        assert prefill.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert decode.process.wait(TIMEOUT_S) == 0


PROGRAM = f"""
import os
import pdinfer as pd
with pd.Pairing(*[spawn({str(TINY)!r}, cache=pd.CacheConfig(page_size=16, num_pages=64))
                  for spawn in (pd.remote.spawn_prefill, pd.remote.spawn_decode)]) as pairing:
    print("pids", *[port.process.pid for port in pairing.ports], flush=True)
    sampling = pd.SamplingParams(max_new_tokens=3, temperature=0)
    request = pd.Request(prompt=(256, *b"calc 47+38="), sampling=sampling)
    print("tokens", *[event.token for event in pairing.generate([request])], flush=True)
    AT_LAST

"""


def run_python(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check_program(done: subprocess.CompletedProcess[str], scratch: Path) -> None:
    """It answered, and nothing is left."""
    assert f"tokens {' '.join(map(str, ANSWER))}" in done.stdout, done.stderr[-3000:]
    pids = [int(pid) for pid in re.findall(r"^.*pids (\d+) (\d+)$", done.stdout, re.MULTILINE)[0]]
    wait_until(lambda: not any(map(is_there, pids)))
    wait_until(lambda: not list(scratch.iterdir()))


@pytest.mark.full
def test_a_script_without_a_guard(tmp_path: Path, scratch: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("AT_LAST", "pass"))
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    check_program(done, scratch)


@pytest.mark.full
@pytest.mark.parametrize("flags", [("-",), ("-i",), ("-c", "import code, sys; code.interact()")])
def test_a_prompt_or_a_cell(flags: tuple[str, ...], scratch: Path) -> None:
    check_program(run_python(*flags, text=PROGRAM.replace("AT_LAST", "pass")), scratch)


@pytest.mark.full
def test_a_parent_that_is_killed_takes_its_engines_along(scratch: Path) -> None:
    done = run_python("-", text=PROGRAM.replace("AT_LAST", "os.kill(os.getpid(), 9)"))
    assert done.returncode == -signal.SIGKILL
    check_program(done, scratch)


@pytest.mark.full
def test_a_parent_that_is_killed_while_an_engine_loads_leaves_no_process(scratch: Path) -> None:
    program = f"""
import os, subprocess
import pdinfer as pd
def die(done, total):
    os.kill(os.getpid(), 9)
start = subprocess.Popen.__init__
def record(self, *arguments, **more):
    start(self, *arguments, **more)
    print("pid", self.pid, flush=True)
subprocess.Popen.__init__ = record
pd.remote.spawn_prefill({str(TINY)!r}, progress=die)
"""
    done = run_python("-c", program)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split()[1])
    wait_until(lambda: not is_there(pid))
    assert not list(scratch.iterdir())


@pytest.mark.full
def test_an_engine_that_stands_still_is_killed_when_its_port_is_closed(scratch: Path) -> None:
    port = pd.remote.spawn_prefill(TINY, cache=PAGES, config=pd.remote.RemoteConfig(exit_s=0.5))
    os.kill(port.process.pid, signal.SIGSTOP)
    port.close()
    wait_until(lambda: port.process.poll() == -signal.SIGKILL)
    wait_until(lambda: not list(scratch.iterdir()))
