"""The doctor on machines with planted faults: what fails, what is only slow, and how to mend it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.__main__ import main
from pdinfer.diagnosis import machine as real
from pdinfer.diagnosis.doctor import PROBES, doctor
from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.report import Diagnosis, Level
from pdinfer.diagnosis.software import PYTHON, REQUIRED, TRITON
from pdinfer.kernels.resolve import OpChoice
from pdinfer.process.compiler import REPORT
from tests.backends import child_environment
from tests.unit.diagnosis.machines import PLACES, laptop, limited, server, write

ROOT = Path(__file__).parents[3]
FAILS, SLOW = Level.FAILURE, Level.WARNING


def problems(diagnosis: Diagnosis) -> list[tuple[str, Level, str]]:
    found = [(section, problem) for section in diagnosis.sections for problem in section.problems]
    return [(section.name, problem.level, problem.sentence) for section, problem in found]


def facts(diagnosis: Diagnosis, name: str) -> dict[str, Any]:
    return {fact.name: fact for section in diagnosis.sections if section.name == name for fact in section.facts}


@pytest.mark.parametrize("make", [laptop, server])
def test_nothing_is_wrong_with_a_machine_as_it_should_be(tmp_path: Path, make: Callable[..., Machine]) -> None:
    diagnosis = doctor(make(tmp_path))
    assert problems(diagnosis) == []
    assert diagnosis.exit_code == 0


def broken(name: str, reason: str) -> dict[str, Any]:
    return {"why_not_imported": lambda module: reason if module == name else None}


def unchosen(device: str) -> Any:
    raise ImportError(f"libcuda.so is not there for {device}", name="triton")


@attrs.frozen
class Fault:
    """A machine that is broken in one way, and the only problem that the doctor may then find."""

    section: str
    level: Level
    sentence: str
    mend: str
    make: Callable[..., Machine] = laptop
    changes: dict[str, Any] = attrs.field(factory=dict)
    limits: dict[str, Any] | None = None
    files: dict[str, str | None] = attrs.field(factory=dict)

    def machine(self, root: Path) -> Machine:
        machine = self.make(
            root, **{name: dict(value) if isinstance(value, dict) else value for name, value in self.changes.items()}
        )
        if self.limits is not None:
            limited(root, **self.limits)
        for path, text in self.files.items():
            if text is None:
                (root / path).unlink()
            else:
                write(root, path, text)
        return machine


SHM = {"free_bytes": lambda _: (64 << 20, 4096)}
FLAGS = {"proc/cpuinfo": "flags\t\t: sse avx512_bf16\n"}
NVCC = {"usr/local/cuda/bin/nvcc": ""}
DEEP_EP = {"versions": {"deep_ep": "2.1.0"}}
NO_CC: dict[str, Any] = {"bin/cc": None}

FAULTS = {
    "old torch": Fault(
        "versions",
        FAILS,
        r"needs torch>=2\.8, found 2\.7\.1",
        "pip install 'torch>=2.8'",
        changes={"versions": {"torch": "2.7.1+cpu"}},
    ),
    "old python": Fault(
        "versions", FAILS, "Python 3.11 or newer, this is 3.10.2", "python3.12 -m venv", changes={"python": "3.10.2"}
    ),
    "no msgspec": Fault(
        "versions", FAILS, "msgspec>=0.19, found none", "pip install", changes={"versions": {"msgspec": None}}
    ),
    "broken triton on a GPU": Fault(
        "libraries",
        FAILS,
        "triton 3.6.0 is installed and cannot be imported: ImportError: libcuda",
        "pip install --force-reinstall --no-deps 'triton==3.6.0'",
        server,
        broken("triton", "ImportError: libcuda"),
    ),
    "broken triton on a CPU": Fault(
        "libraries",
        SLOW,
        "cannot be imported, so it is not used: ImportError: libcuda",
        "pip install",
        changes={"versions": {"triton": "3.6.0"}, **broken("triton", "ImportError: libcuda")},
    ),
    "broken DeepGEMM": Fault(
        "libraries",
        SLOW,
        "deep_gemm 2.0 is installed and cannot be imported",
        "pip install",
        server,
        {"versions": {"deep_gemm": "2.0"}, **broken("deep_gemm", "signal 11")},
        files=NVCC,
    ),
    "broken DeepGEMM of SGLang's": Fault(
        "libraries",
        SLOW,
        "deep_gemm 0.1.4 is installed and cannot be imported",
        "'sgl-deep-gemm==0.1.4'",
        server,
        {"versions": {"sgl-deep-gemm": "0.1.4"}, **broken("deep_gemm", "signal 11")},
        files=NVCC,
    ),
    "Mooncake without its library": Fault(
        "libraries",
        FAILS,
        r"cannot load Mooncake .*install it \(Debian: libibverbs1\)",
        "apt-get install -y libibverbs1",
        server,
        broken("mooncake.engine", "ImportError: libibverbs.so.1: cannot open shared object file"),
    ),
    "old Mooncake": Fault(
        "libraries",
        FAILS,
        "refuses mooncake-transfer-engine 0.3.4",
        r"pip install 'mooncake-transfer-engine>=0.3.13'",
        changes={"versions": {"mooncake-transfer-engine": "0.3.4"}},
    ),
    "two Mooncakes": Fault(
        "libraries",
        FAILS,
        "overwrite each other's files",
        "pip uninstall -y mooncake",
        server,
        {"versions": {"mooncake-transfer-engine-non-cuda": "0.3.13"}},
    ),
    "a provider that raises": Fault(
        "ops",
        FAILS,
        "no model can be loaded on cpu: ImportError: libcuda",
        "--no-deps triton",
        changes={"choices": unchosen},
    ),
    "torch without CUDA": Fault(
        "devices",
        SLOW,
        "torch was built without CUDA",
        "pip install",
        changes={},
        files={"proc/driver/nvidia/version": "NVRM version: Kernel Module  550.54.15"},
    ),
    "a GPU that torch cannot use": Fault(
        "devices",
        FAILS,
        "torch for CUDA 12.8 finds no GPU with driver 550.54.15",
        "pip install",
        server,
        {"gpus": tuple},
    ),
    "no compiler for native ops": Fault(
        "compiler",
        SLOW,
        "without the native rows, fp8: the library needs a C compiler",
        "apt-get install -y gcc",
        changes={
            "lost_kernels": lambda: dict.fromkeys(("rows", "fp8"), "needs a C compiler"),
            "compiler_sets": lambda: None,
        },
        files=NO_CC,
    ),
    "no headers of C": Fault(
        "compiler",
        SLOW,
        r"the native int8: .* rooms\.h: No such file",
        "apt-get install -y gcc libc6-dev",
        changes={"lost_kernels": lambda: {"int8": "could not be compiled by cc: rooms.h: No such file or directory"}},
    ),
    "a source that does not compile": Fault(
        "compiler",
        SLOW,
        r"the native fp8: the library has a source, fp8\.c, .*; please report this: fp8\.c:1:2: error: no",
        "",
        changes={"lost_kernels": lambda: {"fp8": f"has a source, fp8.c, ...; {REPORT}: fp8.c:1:2: error: no"}},
    ),
    "a compiler that is too old": Fault(
        "compiler",
        SLOW,
        r"bin/cc is too old for this CPU, .* no use of avx512_bf16 \(products and attention",
        "",
        files=FLAGS,
    ),
    "no compiler for Triton": Fault(
        "compiler", FAILS, "Triton compiles the launchers", "apt-get install -y gcc", server, files=NO_CC
    ),
    "a read-only cache": Fault(
        "compiler",
        SLOW,
        "compiled anew in every process: /proc/pdinfer cannot be written",
        "export XDG_CACHE_HOME",
        changes={"environment": {"XDG_CACHE_HOME": "/proc"}},
    ),
    "a read-only cache of Triton's": Fault(
        "compiler",
        FAILS,
        "Triton cannot write what it compiles to /proc/triton",
        "export TRITON_CACHE_DIR",
        server,
        {"environment": {"TRITON_CACHE_DIR": "/proc/triton"}},
    ),
    "kernels in Python": Fault(
        "compiler",
        SLOW,
        "runs Triton's kernels in Python",
        "unset TRITON_INTERPRET",
        changes={"environment": {"TRITON_INTERPRET": "1"}},
    ),
    "low memlock": Fault(
        "limits",
        FAILS,
        "8 MiB may be locked, and RDMA locks .* 16 MiB for each peer",
        "ulimit -l unlimited",
        server,
        limits={"files": 65536},
    ),
    "few peers' memlock": Fault(
        "limits", SLOW, "1 GiB may be locked", "ulimit -l unlimited", server, limits={"files": 65536, "locked": 1 << 30}
    ),
    "full /dev/shm with GPUs": Fault(
        "limits", FAILS, "/dev/shm has 4 KiB free, and NCCL between 2 GPUs", "--shm-size 32g", server, SHM
    ),
    "small /dev/shm": Fault(
        "limits",
        SLOW,
        "/dev/shm has 64 MiB, little for NCCL",
        "--shm-size 32g",
        server,
        {"free_bytes": lambda _: (64 << 20, 64 << 20)},
    ),
    "full /dev/shm": Fault("limits", SLOW, "/dev/shm has 4 KiB free; other programs", "mount -o remount", changes=SHM),
    "very few open files": Fault(
        "limits", FAILS, "128 files and sockets may be open", "ulimit -n 65536", limits={"files": 128}
    ),
    "few open files": Fault(
        "limits", SLOW, "512 files and sockets may be open", "ulimit -n 65536", limits={"files": 512}
    ),
    "few ports": Fault(
        "ports",
        SLOW,
        "201 local ports",
        "sysctl -w net.ipv4",
        files={"proc/sys/net/ipv4/ip_local_port_range": "40000 40200"},
    ),
    "no ports": Fault(
        "ports", FAILS, "11 local ports", "sysctl", files={"proc/sys/net/ipv4/ip_local_port_range": "40000\t40010"}
    ),
    "RDMA that is not in the container": Fault(
        "network",
        FAILS,
        "mlx5_0, mlx5_1 cannot be opened",
        "--device /dev/infiniband",
        server,
        files={"dev/infiniband/uverbs0": None},
    ),
    "a card that is down": Fault(
        "network",
        SLOW,
        "mlx5_2 has no active port",
        "",
        server,
        files={
            "sys/class/infiniband/mlx5_2/ports/1/state": "1: DOWN",
            "sys/class/infiniband/mlx5_2/device/numa_node": "0",
        },
    ),
    "no peer memory": Fault(
        "network",
        SLOW,
        "nvidia_peermem is not loaded",
        "modprobe nvidia_peermem",
        server,
        files={"sys/module/nvidia_peermem/version": None},
    ),
    "DeepEP, and GPUs that cannot drive cards": Fault(
        "network",
        FAILS,
        "lacks EnableStreamMemOPs=1 and PeerMappingOverride=1, and gdrdrv is not loaded: DeepEP cannot start",
        "modprobe gdrdrv",
        server,
        DEEP_EP,
        files={"proc/driver/nvidia/params": 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'},
    ),
    "DeepEP, and one option of the driver": Fault(
        "network",
        FAILS,
        "lacks PeerMappingOverride=1, and",
        "/etc/modprobe.d/nvidia.conf",
        server,
        DEEP_EP,
        files={"proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: ""\n'},
    ),
    "DeepGEMM without nvcc": Fault(
        "compiler",
        FAILS,
        "DeepGEMM compiles its kernels with nvcc .*, and /usr/local/cuda/bin/nvcc is not there",
        "apt-get install -y cuda-nvcc-12-8",
        server,
        {"versions": {"sgl-deep-gemm": "0.1.4.post1"}},
    ),
    "a toolkit without nvcc": Fault(
        "compiler",
        FAILS,
        "nvcc when they are first used, and /opt/cuda/bin/nvcc is not there",
        "set CUDA_HOME",
        server,
        {"versions": {"deep_gemm": "2.6"}, "environment": {"CUDA_HOME": "/opt/cuda"}},
        files=NVCC,
    ),
    "a read-only cache of DeepGEMM's": Fault(
        "compiler",
        FAILS,
        "DeepGEMM cannot write what it compiles to /proc/kernels",
        "export DG_JIT_CACHE_DIR",
        server,
        {"versions": {"deep_gemm": "2.6"}, "environment": {"DG_JIT_CACHE_DIR": "/proc/kernels"}},
        files=NVCC,
    ),
    "more ranks than GPUs": Fault(
        "ranks",
        FAILS,
        "LOCAL_RANK is 2 and this process sees 2 GPUs",
        "unset CUDA_VISIBLE_DEVICES",
        server,
        {"environment": {"LOCAL_RANK": "2"}},
    ),
    "a rank on all CPUs": Fault(
        "ranks",
        SLOW,
        "rank 1 may run on CPUs 0-3, and cuda:1 is near 2-3 of NUMA node 1",
        "numactl --cpunodebind=1 --membind=1",
        server,
        {"environment": {"LOCAL_RANK": "1"}},
    ),
    "a GPU far from all CPUs": Fault(
        "ranks",
        SLOW,
        "rank 1 gets none of the CPUs 2-3 near cuda:1: this process has 0-1",
        "",
        server,
        files={"proc/self/status": "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-1\n"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_only_that(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    machine = fault.machine(tmp_path)
    if name == "no peer memory":
        (tmp_path / "sys/module/nvidia_peermem").rmdir()
    diagnosis = doctor(machine)
    ((section, level, sentence),) = problems(diagnosis)
    assert (section, level) == (fault.section, fault.level)
    assert re.search(fault.sentence, sentence)
    (problem,) = (*diagnosis.failures, *diagnosis.warnings)
    assert fault.mend in problem.mend
    assert bool(problem.mend) == bool(fault.mend)
    assert diagnosis.exit_code == (level is FAILS)
    assert problem.sentence in " ".join(str(diagnosis).split())


def test_who_may_lock_any_memory_is_not_limited(tmp_path: Path) -> None:
    machine = server(tmp_path)
    limited(tmp_path, files=65536, capabilities=1 << 14)
    assert problems(doctor(machine)) == []


def test_every_gpu_is_told_its_nearest_card(tmp_path: Path) -> None:
    told = facts(doctor(server(tmp_path)), "network")
    assert told["cuda:0"].remarks == ("mlx5_0 below its PCIe switch",)
    assert told["cuda:1"].remarks == ("mlx5_1 below its PCIe switch",)
    assert told["cuda:1"].value == "0000:17:00.0, NUMA node 1"
    assert told["mlx5_0"].remarks == ("port 1: ACTIVE, Ethernet", "NUMA node 0")


def test_a_gpu_without_a_card_on_its_node_is_slow(tmp_path: Path) -> None:
    machine = server(tmp_path)
    (tmp_path / "sys/class/infiniband/mlx5_1/ports/1/state").write_text("1: DOWN")
    diagnosis = doctor(machine)
    sentences = [sentence for _, _, sentence in problems(diagnosis)]
    assert [
        sentence for sentence in sentences if "cuda:1 (0000:17:00.0) has no RDMA card on its NUMA node 1" in sentence
    ]
    assert len(sentences) == 2
    assert facts(diagnosis, "network")["cuda:1"].remarks == ("mlx5_0 on another NUMA node",)


def test_every_rank_is_told_its_gpu_and_the_cpus_near_it(tmp_path: Path) -> None:
    diagnosis = doctor(server(tmp_path, environment={"LOCAL_RANK": "1"}))
    told = facts(diagnosis, "ranks")
    assert told["CPUs of this process"].value == "0-3"
    assert (told["rank 1"].value, told["rank 1"].remarks) == (
        "cuda:1, NUMA node 1",
        ("CPUs 2-3 are near it, and 2-3 are its share of them",),
    )
    assert told["current device"].value == "cuda:0"
    assert told["current device"].remarks == ("load_model(device='cuda:1') makes that of LOCAL_RANK current",)
    machine = server(tmp_path / "near", environment={"LOCAL_RANK": "1"}, current_device=lambda: 1)
    write(tmp_path / "near", "proc/self/status", "Cpus_allowed_list:\t3\n")
    near = doctor(machine)
    assert not [problem for problem in problems(near) if problem[0] == "ranks"]
    assert facts(near, "ranks")["current device"].remarks == ()


def test_a_machine_of_one_node_does_not_know_what_is_near(tmp_path: Path) -> None:
    machine = server(tmp_path)
    for number, place in enumerate(PLACES):
        write(tmp_path, f"sys/devices/{place}/0000:{0x16 + number:02x}:00.0/numa_node", "-1")
    told = facts(doctor(machine), "ranks")["rank 0"]
    assert (told.value, told.remarks) == ("cuda:0, NUMA node not known", ("which CPUs are near it is not known",))


def test_gpus_may_drive_cards_in_two_ways(tmp_path: Path) -> None:
    by_options = facts(doctor(server(tmp_path / "options")), "network")["IBGDA"]
    assert (by_options.value, by_options.remarks) == ("by the driver's options", ("gdrdrv is not loaded",))
    machine = server(tmp_path / "module", **DEEP_EP)
    write(tmp_path / "module", "proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n")
    write(tmp_path / "module", "sys/module/gdrdrv/version")
    diagnosis = doctor(machine)
    assert problems(diagnosis) == []
    by_module = facts(diagnosis, "network")["IBGDA"]
    assert (by_module.value, by_module.remarks) == ("through gdrdrv, a little slower", ("gdrdrv is loaded",))
    hidden = server(tmp_path / "hidden", **DEEP_EP)
    (tmp_path / "hidden/proc/driver/nvidia/params").unlink()
    assert facts(doctor(hidden), "network")["IBGDA"].value == "not known: the driver shows no options"
    assert problems(doctor(hidden)) == []


def test_deep_gemm_finds_nvcc_and_keeps_its_kernels(tmp_path: Path) -> None:
    machine = server(tmp_path, versions={"sgl-deep-gemm": "0.1.4.post1"})
    write(tmp_path, "usr/local/cuda/bin/nvcc")
    told = facts(doctor(machine), "compiler")
    assert told["nvcc"].value == "/usr/local/cuda/bin/nvcc"
    assert told["DeepGEMM's cache"].value == str(tmp_path / "home/.deep_gemm")
    by_nvrtc = server(tmp_path / "nvrtc", versions={"deep_gemm": "2.6"}, environment={"DG_JIT_USE_NVRTC": "1"})
    assert problems(doctor(by_nvrtc)) == []
    assert facts(doctor(by_nvrtc), "libraries")["deep_gemm"].value == "can be imported"


def test_ops_say_why_they_are_not_faster(tmp_path: Path) -> None:
    choice = OpChoice("linear[fp8]", "torch", ("triton: is for CUDA",), slow="makes floats", others=("reference",))
    told = facts(doctor(laptop(tmp_path, choices=lambda _: (choice,))), "ops")["cpu: linear[fp8]"]
    assert told.value == "torch, else reference"
    assert told.remarks == ("not triton: is for CUDA", "slow: makes floats")


def test_the_doctor_survives_whatever_is_broken(tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError("a broken machine")

    asked = ("version", "why_not_imported", "gpus", "choices", "free_bytes", "why_not_written")
    diagnosis = doctor(server(tmp_path, **dict.fromkeys(asked, fail)))
    assert [section.name for section in diagnosis.sections] == [name for name, _ in PROBES]
    found = {sentence for _, _, sentence in problems(diagnosis)}
    assert found == {
        "could not be examined to its end: ZeroDivisionError: a broken machine",
    }
    assert facts(diagnosis, "limits")["locked memory"].value == "unlimited"  # what was seen before stays


def test_a_machine_without_proc_and_sys_is_examined(tmp_path: Path) -> None:
    machine = attrs.evolve(laptop(tmp_path), root=tmp_path / "nowhere")
    assert doctor(machine).exit_code == 0


# ---- this machine --------------------------------------------------------------------------------------------------


def test_names_that_are_no_unicode_are_spelled_out(tmp_path: Path) -> None:
    folder = os.fsdecode(b"/home/j\xfcrgen")
    why = {"why_not_written": lambda _: "Permission denied"}
    diagnosis = doctor(laptop(tmp_path, environment={"XDG_CACHE_HOME": folder, "PATH": ""}, **why))
    assert r"/home/j\udcfcrgen/pdinfer" in str(diagnosis).encode().decode()
    assert json.loads(diagnosis.to_json())["exit_code"] == diagnosis.exit_code


def test_imports_are_tried_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine_library.py").write_text("")
    (tmp_path / "broken_library.py").write_text("raise OSError('libfoo.so is not there')")
    (tmp_path / "deadly_library.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert real.why_not_imported("fine_library") is None
    assert real.why_not_imported("broken_library") == "OSError: libfoo.so is not there"
    assert real.why_not_imported("deadly_library") == "the import ends the process with signal 11"


def test_writing_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert real.why_not_written(tmp_path / "not" / "yet") is None
    assert list(tmp_path.iterdir()) == []
    assert real.why_not_written(Path("/proc/pdinfer"))
    (tmp_path / "file").write_text("")
    assert real.why_not_written(tmp_path / "file" / "below") == "Not a directory"


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {f"{name}>={'.'.join(map(str, version))}" for name, version in REQUIRED.items()}
    assert required == set(project["dependencies"])
    assert project["requires-python"] == ">={}.{}".format(*PYTHON)
    assert project["optional-dependencies"]["triton"][0].startswith("triton>={}.{};".format(*TRITON))


def test_the_command_line_prints_a_report_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    healthy = doctor(laptop(tmp_path / "laptop"))
    ill = doctor(server(tmp_path / "server", **SHM))
    for diagnosis, status in ((healthy, 0), (ill, 1)):
        monkeypatch.setattr("pdinfer.__main__.doctor", lambda diagnosis=diagnosis: diagnosis)
        assert main(["doctor"]) == status
        assert capsys.readouterr().out == f"{diagnosis}\n"
        assert main(["doctor", "--json"]) == status
        told = json.loads(capsys.readouterr().out)
        assert (told["schema"], told["exit_code"]) == ("pdinfer.doctor/1", status)
        assert [section["name"] for section in told["sections"]] == [name for name, _ in PROBES]
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stdout", None)  # as with >&-
            assert main(["doctor"]) == status
            reads, writes = os.pipe()
            os.close(reads)
            with open(writes, "w") as stdout:  # as with | true
                closed.setattr(sys, "stdout", stdout)
                assert main(["doctor"]) == status
            with open("/dev/full", "w") as stdout:
                closed.setattr(sys, "stdout", stdout)
                assert main(["doctor"]) == 1
            assert capsys.readouterr().err == "doctor: [Errno 28] No space left on device\n"
    levels = [problem["level"] for section in told["sections"] for problem in section["problems"]]
    assert levels == ["failure"]
    with pytest.raises(SystemExit, match="2"):
        main(["nurse"])


def test_names_that_a_terminal_cannot_show_are_spelled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("/café/\udcff")

    monkeypatch.setattr("pdinfer.__main__.doctor", broken)
    with (tmp_path / "told").open("w", encoding="ascii") as told:
        monkeypatch.setattr(sys, "stderr", told)
        assert main(["doctor"]) == 1
    assert (tmp_path / "told").read_text() == "doctor: /caf\\xe9/\\udcff\n"


@pytest.mark.full
def test_json_on_the_command_line_is_json() -> None:
    command = [sys.executable, "-m", "pdinfer", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, env=child_environment(), timeout=300, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"]


@pytest.mark.full
def test_this_machine_is_examined() -> None:
    diagnosis = pd.doctor()
    assert {fact.name for section in diagnosis.sections for fact in section.facts} >= {
        "torch",
        "cpu",
        "cpu: mla_decode",
    }
    assert not any("could not be examined" in sentence for _, _, sentence in problems(diagnosis))
