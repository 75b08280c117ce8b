"""The scripts of examples/slurm and the containers of examples/kubernetes, run on this host as the platforms would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.backends import ROOT, child_environment
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

SRUN = """#!/bin/bash
# Runs what Slurm would run on the one node of a component, and passes signals on.
while [[ "$1" == --* ]]; do
  [[ "$1" == --het-group=* ]] && component=${1#*=}
  shift
done
echo "$component $*" >>"$STEPS"
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0
exec "$@"
"""
STUBS = {
    "srun": SRUN,
    "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
    "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
    "torchrun": f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder of programs that stand for those of a cluster."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Kill the engines that a failed test leaves: torchrun starts each in a session of its own."""
    yield
    for pid in workers(tmp_path, ""):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def workers(folder: Path, role: str) -> list[int]:
    """Return the processes of engines of a role, or of both for "", that were told of a path below a folder, without
    torchrun."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        is_engine = len(words) > 1 and any(word.endswith("group_engine.py") for word in words)
        if is_engine and "torch.distributed.run" not in words and str(folder) in " ".join(words) and role in words:
            found.append(int(path.parent.name))
    return found


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, which is killed in the end."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(**environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (process.stdin, process.stdout):
            if end is not None:
                end.close()


def ask(process: subprocess.Popen[str], question: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{question}\n")
    process.stdin.flush()
    lines: list[str] = []
    check_ends(started(lambda: lines.append(process.stdout.readline())))  # type: ignore[union-attr]
    return lines[0].strip()


@pytest.mark.full(minutes=5)
def test_a_job_of_slurm_serves_loses_an_engine_and_ends(tmp_path: Path, stubs: Path) -> None:
    steps, group = tmp_path / "steps", tmp_path / "group"
    environment = {
        "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}",
        "STEPS": str(steps),
        "GROUP": str(group),
        "ENGINES": "prefill decode decode",
        "CHECKPOINT": str(ROOT / "examples" / "tiny"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "RANKS_PER_NODE": "2",
        "LISTEN": "127.0.0.1",
        "NUM_PAGES": "64",
    }
    with running(["bash", "examples/slurm/xpyd.sbatch"], environment) as job:
        assert ask(job, "calc 47+38=") == "calc 47+38=85;"
        assert (group / "key").stat().st_mode & 0o077 == 0
        wait_until(lambda: len(list((group / "engines").glob("*.json"))) == 6)  # each rank is a port
        os.kill(workers(group, "decode")[0], signal.SIGKILL)
        for number in range(1, 9):
            assert ask(job, f"calc {number}+1=") == f"calc {number}+1={number + 1};"
        wait_until(lambda: len(steps.read_text().splitlines()) >= 5)  # its step began anew
        wait_until(lambda: len(workers(group, "decode")) == 4)
        assert job.stdin is not None
        job.stdin.close()
        assert job.wait(TIMEOUT_S) == 0
        assert not workers(group, "")
        assert not group.exists()
    told = [re.sub(r"/\S*/", "", line.partition(" --")[0]) for line in steps.read_text().splitlines()]
    first = ["0 python group_front.py", "1 bash engine.sh prefill 1", "2 bash engine.sh decode 2"]
    assert sorted(told[:4]) == [*first, "3 bash engine.sh decode 3"]
    assert told[4] in told[:4]


# -- Kubernetes --------------------------------------------------------------------------------------------------------

DNS = """
import json, os, socket
plain = socket.getaddrinfo

def resolve(host, port, *more, **options):
    with open(os.environ["SERVICES"]) as file:
        services = json.load(file)
    if host not in services:
        return plain(host, port, *more, **options)
    if not services[host]:
        raise socket.gaierror(socket.EAI_NONAME, "no pod is ready")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in services[host]]

socket.getaddrinfo = resolve
"""
"""What stands for the DNS of a cluster: sitecustomize.py of its programs."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Pods:
    """Pods of the manifest on this host. Each has an address of the loopback network, and services name those that are
    ready, as their probes say. Of what a manifest says only sizes, ports, and paths of the image are others here."""

    def __init__(self, folder: Path, stubs: Path) -> None:
        yaml = pytest.importorskip("yaml")
        objects = list(yaml.safe_load_all((ROOT / "examples/kubernetes/group.yaml").read_text("utf-8")))
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self._folder, self._running = folder, ExitStack()
        self._pods: list[tuple[str, str, Path]] = []
        self._port = free_port()
        (folder / "sitecustomize.py").write_text(DNS)
        (folder / "key").write_text(os.urandom(32).hex())
        self._environment = {
            "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src"))),
            "SERVICES": str(folder / "services.json"),
        }
        self.tell()

    def engine(self, role: str) -> subprocess.Popen[str]:
        """Start the leader of a group of one pod."""
        number = len(self._pods) + 2
        template = self._objects["LeaderWorkerSet", role]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        address = f"127.0.0.{number}"
        given = {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": address, "POD_IP": address}
        changed = {"--nproc-per-node 8": "--nproc-per-node 2", "29500": str(free_port())}
        changed["$POD_IP:7000"] = f"$POD_IP:{self._port}"
        changed["/models/checkpoint"] = f"--num-pages 64 {ROOT / 'examples/tiny'}"
        return self._start(template["spec"], role, address, given, changed)

    def front(self) -> subprocess.Popen[str]:
        changed = {f"{role}:7000-7007": f"{role}:{self._port}-{self._port + 1}" for role in ("prefill", "decode")}
        return self._start(self._objects["Deployment", "front"]["spec"]["template"]["spec"], "", "", {}, changed)

    def _start(
        self, spec: Any, role: str, address: str, given: dict[str, str], changed: dict[str, str]
    ) -> subprocess.Popen[str]:
        (container,) = spec["containers"]
        ready = self._folder / f"ready-{len(self._pods)}"
        assert container["readinessProbe"]["exec"]["command"] == ["test", "-f", "/tmp/ready"]
        *shell, script = container["command"]
        for theirs, ours in {
            **changed,
            "/tmp/ready": str(ready),
            "/etc/pdinfer/key": str(self._folder / "key"),
        }.items():
            assert script.count(theirs) == 1, theirs
            script = script.replace(theirs, ours)
        values = {each["name"]: each.get("value", given.get(each["name"], "")) for each in container.get("env", ())}
        self._pods.append((role, address, ready))
        return self._running.enter_context(running([*shell, script], {**self._environment, **given, **values}))

    def tell(self) -> None:
        """Have the services name the pods that are ready."""
        named: dict[str, list[str]] = {"prefill": [], "decode": []}
        for role, address, ready in self._pods:
            if role and ready.exists():
                named[role].append(address)
        path = self._folder / "services.json"
        path.with_suffix(".new").write_text(json.dumps(named))
        path.with_suffix(".new").rename(path)

    def wait_ready(self, number: int) -> None:
        wait_until(lambda: self.tell() or self._pods[number][2].exists())  # type: ignore[func-returns-value]
        self.tell()

    def close(self) -> None:
        self._running.close()


@pytest.mark.full(minutes=5)
def test_containers_of_the_manifest_serve_drain_and_end_when_a_rank_dies(tmp_path: Path, stubs: Path) -> None:
    with contextlib.closing(Pods(tmp_path, stubs)) as pods:
        pods.engine("prefill")
        first, front = pods.engine("decode"), pods.front()
        pods.wait_ready(2)  # the front end, once there is a pair
        assert ask(front, "calc 47+38=") == "calc 47+38=85;"
        second = pods.engine("decode")
        pods.wait_ready(3)
        first.terminate()  # as Kubernetes does; it drains
        for number in range(1, 9):
            assert ask(front, f"calc {number}+1=") == f"calc {number}+1={number + 1};"
        first.wait(TIMEOUT_S)
        rank, _ = workers(tmp_path, "decode")
        os.kill(rank, signal.SIGKILL)
        assert second.wait(TIMEOUT_S) != 0  # so that the group is made anew
        third = pods.engine("decode")
        pods.wait_ready(4)
        assert ask(front, "calc 8+8=") == "calc 8+8=16;"
        assert third.poll() is None
        assert front.stdin is not None
        front.stdin.close()
        assert front.wait(TIMEOUT_S) == 0
