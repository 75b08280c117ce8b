"""The programs that measure a card run at small sizes on a CPU, and so are known to work before they see one."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.backends import ROOT, child_environment
from tests.conformance import fake_deep_gemm, fake_mega_moe

sys.path.append(str(ROOT / "benchmarks" / "gpu"))

import attention_cases
import card
import case
import engine_steps
import floors
import mega_moe
import product_cases
import pushes
import row_cases
import run
import slice as steps
import timing

GPU = ROOT / "benchmarks" / "gpu"
CPU = torch.device("cpu")


def output_of(program: Any, *arguments: str) -> str:
    """Run a program here, and return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert program.main(arguments) == 0
    return told.getvalue()


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_the_plan_tells_the_floor_of_every_kernel_and_names_every_card() -> None:
    told = output_of(run, "--dry-run", "--card", "H100")
    for each in run.CASES:
        assert each.name in told
    decode = next(line for line in told.splitlines() if "16 heads, 64 x 8192, Q 1" in line)
    num_bytes = 64 * 8192 * 1152 + 2 * 64 * 16 * (512 + 64 + 512)
    assert f"{num_bytes / 1e6:.1f}" in decode
    assert f"{num_bytes / 3.35e12 * 1e6:.1f}" in decode
    assert {run.plan(name).splitlines()[0].split()[2] for name in card.NOMINAL} == set(card.NOMINAL)


@pytest.mark.full
def test_the_plan_needs_nothing_but_the_library() -> None:
    done = subprocess.run(
        [sys.executable, str(GPU / "run.py"), "--dry-run"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run.plan("H200") + "\n"


def test_a_run_at_small_sizes_measures_every_kernel_and_finds_none_wrong() -> None:
    output = output_of(run, "--tiny", "--provider", "torch")
    lines = lines_of(output)
    assert {"bench": "gpu", "case": "tokens", "value": "equal"} in lines
    assert not [line for line in lines if "wrong" in line]
    measured = {line["case"] for line in lines if "goal" in line}
    assert measured == {each.tiny().name for each in run.CASES}
    assert all(line["value"] > 0 and line["floor_us"] > 0 for line in lines if "goal" in line)
    assert "absent: " in output.splitlines()[-1]


def bench(**changed: Any) -> run.Bench:
    ceilings = case.Ceilings(copy=1e9, read=1e9, bf16=1e9)
    return run.Bench(
        **{"device": CPU, "provider": "torch", "ceilings": ceilings, "deadline": 1e18, "tiny": True, **changed}
    )


def first_of(kind: type[case.Case]) -> case.Case:
    return next(each for each in run.CASES if isinstance(each, kind)).tiny()


@pytest.mark.parametrize(
    "kind",
    [
        attention_cases.Decode,
        attention_cases.SparseDecode,
        attention_cases.Prefill,
        product_cases.MaskedExperts,
        product_cases.PackedExperts,
        product_cases.Dense,
        row_cases.Scatter,
        row_cases.Combine,
    ],
)
def test_a_wrong_kernel_is_told_and_not_timed(kind: type[case.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: run.Bench, one: case.Case, provider: str) -> Any:
        op = right(self, one, provider)
        return op if provider == "reference" else broken(op, one)

    def broken(op: Any, one: case.Case) -> Any:
        def run_it(*inputs: Any, **options: Any) -> Any:
            if one.exact:
                inputs = (inputs[0], inputs[1].flip(0), inputs[2])
                return op(*inputs, **options)
            return 1.05 * op(*inputs, **options)

        return run_it

    right = run.Bench.op_of
    monkeypatch.setattr(run.Bench, "op_of", wrong)
    (line,) = bench().lines(first_of(kind))
    assert line["case"] == first_of(kind).name
    assert "relative error" in line["wrong"] or "numbers differ" in line["wrong"]


def test_results_that_are_not_numbers_are_wrong() -> None:
    good, any_case = torch.ones(3), run.CASES[0]
    assert case.complaint(good, good.clone(), any_case) is None
    assert case.complaint(torch.tensor([1.0, torch.nan, 1.0]), good, any_case)
    assert case.complaint(good[:2], good, any_case)


def test_what_is_absent_or_late_is_told() -> None:
    (line,) = bench(provider="nobody").lines(run.CASES[0].tiny())
    assert "no provider is called 'nobody'" in line["missing"]
    (line,) = bench(deadline=0.0).lines(run.CASES[0].tiny())
    assert line["missing"] == "no time left"
    found = timing.race({"a": [lambda: None], "b": [lambda: 1 // 0]}, CPU, rounds=2)
    assert isinstance(found["a"], timing.Times)
    assert found["b"] == timing.Missing("ZeroDivisionError: integer division or modulo by zero")


def test_contenders_take_turns() -> None:
    turns: list[str] = []
    timing.race({"a": [lambda: turns.append("a")], "b": [lambda: turns.append("b")]}, CPU, rounds=3)
    runs = "".join(turns[-6 * timing.MOST_CALLS :])
    assert runs == ("a" * timing.MOST_CALLS + "b" * timing.MOST_CALLS) * 3


def test_ratios_above_one_say_that_pdinfer_is_faster() -> None:
    ours, theirs = timing.Times((1.0, 2.0, 4.0), True), timing.Times((2.0, 6.0, 4.0), False)
    line = run.against(ours, theirs)
    assert (line["ratio"], line["ratio_low"], line["ratio_high"], line["runs"]) == (2.0, 1.0, 3.0, 3)


def test_a_goal_is_a_share_of_what_it_names() -> None:
    ceilings = case.Ceilings(copy=1000.0, read=1.0, bf16=100.0)
    work = case.Work(num_bytes=500, flops=100, in_fp8=True)
    assert case.Goal("copy", 0, 0).share(1.0, work, ceilings, {}) == 0.5
    assert case.Goal("bf16", 0, 0).share(2.0, work, ceilings, {}) == 0.5
    assert case.Goal("2 x bf16", 0, 0).share(2.0, work, ceilings, {}) == 0.25
    assert case.Goal("sdpa", 0, 0).share(2.0, work, ceilings, {"sdpa": 1.0}) == 0.5
    assert case.Goal("sdpa", 0, 0).share(2.0, work, ceilings, {}) is None
    assert work.floor_s(ceilings) == 0.5


def test_inputs_rotate_past_the_cache_on_a_card() -> None:
    cuda = torch.device("cuda")
    assert timing.num_input_sets(1 << 20, cuda) == timing.MOST_INPUT_SETS
    assert timing.num_input_sets(200 << 20, cuda) == 3
    assert timing.num_input_sets(4 << 30, cuda) == 1


def test_sizes_are_those_of_deepseek_v3() -> None:
    experts = next(each for each in run.CASES if isinstance(each, product_cases.MaskedExperts))
    hidden, intermediate = experts.sizes
    assert experts.work.num_bytes > 32 * 3 * hidden * intermediate
    assert row_cases.Gather().page_bytes == 73728
    assert (
        attention_cases.Decode(heads=16, batch=1, context=1, packed=True, goal=attention_cases.MEMORY).row_bytes == 656
    )
    assert attrs.evolve(experts, rows=2).work.flops == 2 * 32 * 6 * hidden * intermediate


@pytest.mark.parametrize(("name", "bits"), [("int4", 4.5), ("mxfp4", 4.25)])
def test_four_bits_are_measured_by_their_bytes_beside_other_formats(name: str, bits: float) -> None:
    packed = [each for each in run.CASES if isinstance(each, product_cases.PackedExperts) and each.kind.name == name]
    sizes = {(each.rows, each.room) for each in packed}
    assert sizes == {(rows, room) for rows in (1, 4, 16, 64) for room in (0, 128)} | {(4096, 0)}
    small = attrs.evolve(packed[0], rows=0).tiny()
    gate_up, down = small.inputs(CPU, 0)[2:]
    held = sum(each.nbytes for weight in (gate_up, down) for each in (weight.numbers, weight.scale))
    assert small.work.num_bytes == held == 2 * 3 * 256 * 128 * bits / 8
    assert small.spec("cpu").weight_formats == {name}
    assert [*small.rivals(small.inputs(CPU, 0))] == ["experts in bf16", "experts in FP8"]


def test_the_kit_is_listed_and_may_travel() -> None:
    """What pdinfer needs and the machine lacks is in it, and the library's own pins are DeepGEMM's."""
    told = subprocess.run(
        ["bash", str(GPU / "kit.sh"), "--list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for package in ("msgspec==", "xxhash==", "sgl-deep-gemm==0.1.4.post1", "apache-tvm-ffi==0.1.11", "vllm==0.24.0"):
        assert package in told
    assert "_flashmla_C" in told
    total, most = told.splitlines()[-1].removeprefix("MiB in all: ").split(" of ")
    assert float(total) < 64 == int(most)


def test_the_kit_says_what_it_takes() -> None:
    done = subprocess.run(
        ["bash", str(GPU / "kit.sh"), "--nonsense"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("kv_format", ["auto", pytest.param("fp8", marks=pytest.mark.full)])
def test_steps_of_a_small_slice_are_measured(kv_format: str) -> None:
    output = output_of(steps, "--tiny", "--batches", "2", "--contexts", "70", "--kv-format", kv_format)
    (line,) = [line for line in lines_of(output) if "step_us" in line]
    assert line["case"] == "decode B 2, context 70" + ", packed" * (kv_format == "fp8")
    assert line["step_us"] > 0
    assert (line["captured"], line["steps"]) == (0, steps.STEPS)
    assert line["over_floor"] == pytest.approx(line["step_us"] / line["floor_us"], rel=0.01)
    (told,) = [text for text in output.splitlines() if text.startswith("step decode B 2, context 70")]
    assert told.endswith("; goals missed: captured")
    assert "B 2, context 70" in output.splitlines()[-1]


def test_the_whole_model_follows_from_its_layers() -> None:
    """Here a dense layer takes 10, one with experts 20, and the rest 5."""
    told = steps.whole_us({"dense": 15.0, "2 x dense": 25.0, "slice": 75.0}, 3)
    assert told == {"dense_us": 10.0, "moe_us": 20.0, "rest_us": 5.0, "whole_us": 5 + 3 * 10 + 58 * 20.0}


class Marker:
    """An event of a device."""

    def __init__(self, enable_timing: bool) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True


@pytest.mark.full
def test_providers_are_passed_over() -> None:
    told = output_of(steps, "--tiny", "--batches", "1", "--contexts", "5", "--without", "native,torch")
    (providers,) = [line["value"] for line in lines_of(told) if line["case"] == "ops"]
    assert set(providers.values()) == {"reference", "composition"}


def test_only_steps_that_were_replayed_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Marker)
    model = steps.drawn_model(steps.v3_config(tiny=True), CPU)
    pool = steps.pd.PagePool(model, steps.pd.CacheConfig(page_size=steps.PAGE_SIZE, num_pages=8))
    some = steps.Steps.of(model, pool, 2, 5)
    some.watch()
    some.run()
    assert not some.replays  # nothing is captured on a CPU
    graphs = some.runner.resident.graphs
    monkeypatch.setattr(type(graphs), "step", lambda self, *arguments: arguments)
    del graphs.step
    some.watch()
    assert graphs.step(2, 0, 0) == (2, 0, 0)
    ((before, after),) = some.replays
    assert before.is_recorded
    assert after.is_recorded


@pytest.mark.full
def test_pushes_of_a_small_slice_arrive_and_are_measured() -> None:
    output = output_of(pushes, "--tiny", "--rounds", "1", "--chunks", "2", "--chunk", "64")
    lines = [line for line in lines_of(output) if "ratio" in line]
    assert [line["case"].partition("/")[2] for line in lines] == ["shm", "tcp"]
    for line in lines:
        assert line["runs"] == 1
        assert line["bytes"] == 2 * 64 * 4 * 2 * (128 + 16)
        assert line["landed_ms"] > 0 < line["value"]


@pytest.mark.full
@pytest.mark.parametrize("drafts", ["0", "2"])
def test_steps_of_small_engines_are_measured(drafts: str) -> None:
    output = output_of(engine_steps, "--tiny", "--transport", "tcp", "--kv-format", "fp8", "--drafts", drafts)
    lines = [line for line in lines_of(output) if "steps" in line]
    assert [line["case"].split(",")[0] for line in lines] == ["B 1", "B 2"]
    assert [line["num_tokens"] for line in lines] == [12, 24]
    assert all(line["value"] > 0 < line["prefill_tok_s"] for line in lines)
    assert all(line["step_us"] > 0 < line["floor_us"] and line["host_us"] is None for line in lines)
    told = [text.split(",")[0] for text in output.splitlines() if text.startswith("step ")]
    assert told == ["step B 1", "step B 2"]


def served_steps(**changed: Any) -> engine_steps.Times:
    return engine_steps.Times(steps=[0.004, 0.002, 0.003], first_s={"0": 0.5}, num_tokens=5, **changed)


@attrs.frozen
class At:
    """An event of a device, at a number of milliseconds."""

    ms: float

    def elapsed_time(self, later: At) -> float:
        return later.ms - self.ms


def test_the_host_takes_what_a_step_takes_beside_its_replay() -> None:
    """Of the three steps one was not replayed."""
    replays: list[list[tuple[At, At]]] = [[(At(0.0), At(3.5))], [], [(At(9.0), At(11.9))]]
    assert served_steps(replays=replays).host_us() == 300.0
    assert served_steps(replays=[[], [], []]).host_us() is None


def test_a_line_of_engines_tells_steps_floors_and_captures() -> None:
    options = engine_steps.argparse.Namespace(
        prompt=100, new=6, transport="loopback", kv_format="auto", drafts=0, without=[], tiny=True
    )
    model = steps.drawn_model(steps.v3_config(tiny=True), CPU, fp8=False)
    ceilings = case.Ceilings(copy=1e9, read=1e9, bf16=1e12)
    times = served_steps(replays=[[], [], []], num_captured=2)
    line = engine_steps.line_of(model, times, 2, options, ceilings)
    floor_us = 1e6 * floors.Step(model.config, 2, 103, fp8=False).floor_s(ceilings)
    assert (line["step_us"], line["floor_us"]) == (3000.0, round(floor_us, 1))
    assert (line["captured"], line["steps"], line["over_floor"]) == (2, 3, round(3000 / floor_us, 2))
    assert "wrong" in engine_steps.line_of(model, engine_steps.Times(), 2, options, ceilings)
    failed = engine_steps.Times(steps=[0.1], failed=["out of pages"])
    assert engine_steps.line_of(model, failed, 2, options, ceilings)["wrong"] == "1 requests failed: out of pages"


def fail(*_: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_kernel_that_fails_on_the_card_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be had there is missing, and the others are measured all the same."""
    monkeypatch.setattr(run.Bench, "check", fail)
    (line,) = bench().lines(run.CASES[0].tiny())
    assert line["wrong"] == "RuntimeError: an illegal memory access was encountered"
    monkeypatch.setattr(run.Bench, "check", lambda *_: None)
    monkeypatch.setattr(run, "race", lambda given, _, **__: dict.fromkeys(given, timing.Missing("OutOfMemoryError: x")))
    (line,) = bench().lines(run.CASES[0].tiny())
    assert line["wrong"] == "OutOfMemoryError: x"


def test_a_family_whose_process_ended_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -6, stdout=""))
    options = run.argparse.Namespace(provider="torch", like="")
    (line,) = run.run_family("dense", options, case.Ceilings(copy=1.0, read=1.0, bf16=1.0), 60.0)
    assert line["wrong"] == "its process ended: -6"


@pytest.mark.parametrize("program", [run, steps, engine_steps], ids=lambda each: each.__name__)
def test_programs_end_with_an_error_when_a_line_is_wrong(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the run on a card names their part among those that failed."""
    name = "whole_run" if program is run else "run"
    for kind, status in (("wrong", 1), ("missing", 0)):
        monkeypatch.setattr(program, name, lambda *_, kind=kind: iter([{"bench": "b", "case": "c", kind: "why"}]))
        with contextlib.redirect_stdout(io.StringIO()) as told:
            assert program.main(["--tiny"]) == status
        assert "why" in told.getvalue()


def test_a_step_of_a_slice_that_fails_is_told_and_the_others_run() -> None:
    line = steps.tried({"case": "B 1"}, fail)
    assert line == {"case": "B 1", "wrong": "RuntimeError: an illegal memory access was encountered"}
    assert "B 1" in steps.table([line]).splitlines()[-1]


def test_the_floor_of_a_step_is_the_sum_of_its_kernels() -> None:
    """Of the slice of DeepSeek-V3, whose sizes stand here once more: what is read, by kind."""
    one = floors.Step(steps.v3_config(), 1, 4096, fp8=True)
    found = {kernel.name: kernel for kernel in one.kernels()}
    assert {kernel.name.partition(":")[0]: kernel.count for kernel in one.kernels()} == {
        "dense": 1,
        "MoE": 3,
        "head": 1,
    }
    assert found["MoE: o"].work.flops == 2 * 7168 * 16384
    assert found["dense: q_a, kv_a"].work == product_cases.Dense(rows=1, outputs=2112, channels=7168).work
    assert found["MoE: attention"].work.num_bytes == 4096 * 1152 + 2 * 128 * (512 + 64 + 512)
    assert found["head"].work.num_bytes == 2 * (129280 * 7168 + 129280 + 7168)
    experts = product_cases.MaskedExperts(experts=8, rows=1).work
    assert found["MoE: experts"].work == experts
    ceilings = case.Ceilings(copy=1e12, read=1e12, bf16=1e30)
    assert one.floor_s(ceilings) == pytest.approx(
        sum(kernel.count * kernel.work.num_bytes for kernel in one.kernels()) / 1e12
    )
    packed = {kernel.name: kernel.work for kernel in attrs.evolve(one, packed=True).kernels()}
    assert packed["MoE: attention"].num_bytes == 4096 * 656 + 2 * 128 * (512 + 64 + 512)
    many = {kernel.name: kernel.work for kernel in attrs.evolve(one, batch=1000).kernels()}
    assert many["MoE: experts"].flops == 8000 * experts.flops // 8
    read = product_cases.MaskedExperts(experts=32, rows=250).work.num_bytes
    assert many["MoE: experts"].num_bytes == pytest.approx(read, rel=1e-3)  # of 1000 tokens, each expert has some


def test_a_step_that_drafts_costs_the_passes_of_its_layer() -> None:
    config = steps.v3_config(num_nextn_predict_layers=1)
    plain, drafting = (
        {kernel.name: kernel for kernel in floors.Step(config, 32, 100, fp8=True, num_drafts=count).kernels()}
        for count in (0, 3)
    )
    assert drafting["head"].work.flops == 4 * plain["head"].work.flops
    assert drafting["first draft: MoE: o"].work.flops == 4 * plain["MoE: o"].work.flops
    assert (drafting["first draft: head"].count, drafting["next draft: head"].count) == (1, 2)
    assert drafting["next draft: head"].work == plain["head"].work
    assert not any("draft" in name for name in plain)


def test_the_floors_of_engines_are_told_on_any_machine() -> None:
    told = output_of(engine_steps, "--dry-run", "--card", "H800", "--batches", "32,128").splitlines()
    sums = [float(line.split()[-1]) for line in told if line.startswith("sum ")]
    wanted = [
        floors.Step(steps.v3_config(), batch, 2048 + 24, fp8=True).floor_s(card.NOMINAL["H800"]) for batch in (32, 128)
    ]
    assert sums == [round(1e6 * floor, 1) for floor in wanted]


def test_a_sentence_on_a_step_names_the_goals_that_it_misses() -> None:
    line: dict[str, Any] = {"case": "B 1", "step_us": 9.5, "over_floor": 1.9, "captured": 4, "steps": 4}
    assert floors.told(line) == (
        "step B 1: 9.5 us, 1.9 of its floor, host_us not measured, captured 4 of 4; goals missed: none"
    )
    assert floors.told({**line, "host_us": 300.0, "over_kernels": 1.15}).endswith("goals missed: none")
    worst = {**line, "host_us": 300.1, "over_kernels": 1.16, "captured": 3}
    assert floors.told(worst).endswith("goals missed: the sum of its kernels, host_us, captured")


def test_the_kernel_of_a_whole_layer_of_experts_says_why_it_is_missing() -> None:
    lines = [line for line in lines_of(output_of(mega_moe, "--tiny")) if "baseline" in line]
    assert [line["case"] for line in lines] == ["32 experts, top 8, 1 tokens", "32 experts, top 8, 3 tokens"]
    assert all(line["baseline_value"] > 0 for line in lines)
    assert all("deep_gemm" in line["missing"] for line in lines) or torch.cuda.is_available()


def test_the_kernel_of_a_whole_layer_of_experts_is_called_as_the_library_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a stand-in, whose group of one rank is over gloo."""
    init = torch.distributed.init_process_group
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _backend, **where: init("gloo", **where))
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_mega_moe.added_to(fake_deep_gemm.build("sgl")))
    try:
        lines = [line for line in lines_of(output_of(mega_moe, "--tiny")) if "baseline" in line]
    finally:
        torch.distributed.destroy_process_group()
    assert len(lines) == len(mega_moe.TINY_TOKENS)
    assert not any("missing" in line for line in lines)
    assert all(line["relative_error"] < 0.02 for line in lines)


def test_the_run_on_a_card_is_a_script_whose_parts_are_there() -> None:
    script = (GPU / "card_run.sh").read_text()
    subprocess.run(["bash", "-n", str(GPU / "card_run.sh")], check=True, timeout=60)
    named = set(re.findall(r"benchmarks/gpu/(\w+\.(?:py|sh))", script))
    named |= set(re.findall(r"measure \S+ \S+ (\w+\.py)", script))
    assert named >= {"engine_steps.py", "slice.py", "pushes.py", "run.py", "mega_moe.py", "kit.sh"}
    assert all((GPU / name).exists() for name in named)


@pytest.mark.full
def test_the_run_on_a_card_runs_whole_at_small_sizes(tmp_path: Path) -> None:
    """Each part prints lines, each step has its sentence, and kernels are those that the script is for."""
    done = subprocess.run(
        ["bash", str(GPU / "card_run.sh"), "--tiny"],
        env=child_environment(OUT=str(tmp_path), PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    *told, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert last.endswith("s: end; failed: none; not begun: none")
    parts = {line.partition(" s: ")[2] for line in told if line.startswith("== ")}
    assert parts == {path.stem for path in tmp_path.glob("*.txt")}
    assert parts >= {f"engines{kind}" for kind in ("", "-drafts", "-fp8", "-own", "-tcp")}
    assert "passed" in (tmp_path / "captured.txt").read_text()
    for name in parts - {"captured"}:
        lines = lines_of((tmp_path / f"{name}.txt").read_text())
        assert any("value" in line for line in lines), name
        assert not any("wrong" in line for line in lines), name
    measured = {line["case"].split()[0] for line in lines_of((tmp_path / "kernels.txt").read_text()) if "goal" in line}
    assert measured == {"MLA", "masked", "index", "dense"}
    sentences = [line for line in told if line.startswith("step ")]
    assert {line.split(":")[0] for line in sentences} >= {
        "step B 1, 100+12, loopback, KV auto",
        "step B 2, 100+12, loopback, KV auto, 2 drafts",
        "step B 2, 100+12, loopback, KV auto, without deep_gemm+flash_mla",
        "step B 2, 100+12, tcp, KV auto",
        "step B 2, 100+12, loopback, KV fp8",
        "step decode B 3, context 200",
        "step decode B 3, context 200, packed",
    }
