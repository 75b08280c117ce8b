"""The choice of a provider for each op, and how it is explained."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels import DeviceSpec, OpSpec, compositions, reference, resolve, resolve_ops
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.ops import OP_NAMES, Composed, Declined, FusedOps, function_of
from pdinfer.kernels.resolve import explain_backends
from pdinfer.kernels.spec import OPS_OF_FORMAT
from pdinfer.kernels.torch import provider as torch_provider
from pdinfer.kernels.triton import provider as triton_provider

FLOAT32 = OpSpec(device="cpu", dtype=torch.float32)
FUSED = [op for op in OP_NAMES if function_of(compositions, op) is not None]
PLAIN = [op for op in OP_NAMES if op not in FUSED]
SERVED = [[op, "composition" if op in FUSED else "torch"] for op in OP_NAMES]
"""What is served where there is only torch."""
IN_TRITON = {*triton_provider.PLACES}


def test_without_a_wish_the_first_provider_serves_everything() -> None:
    assert [[choice.op, choice.provider] for choice in resolve_ops(FLOAT32).choices] == SERVED


def test_providers_for_other_devices_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[str] = set()

    def note(name: str) -> ModuleType:
        taken.add(name.split(".")[2])
        return import_module(name)

    monkeypatch.setattr(resolve, "importlib", SimpleNamespace(import_module=note))
    resolve_ops(OpSpec(device="cpu"))
    assert not taken & {"deep_gemm", "flash_mla", "triton"}
    resolve_ops(V3_ON_H200)
    assert {"deep_gemm", "flash_mla", "triton"} <= taken


def test_one_name_forces_all_ops() -> None:
    resolved = resolve_ops(FLOAT32, forced="reference")
    assert {choice.op for choice in resolved.choices if choice.provider == "reference"} == {*PLAIN}
    assert all(resolved.ops[op] is function_of(reference, op) for op in PLAIN)
    assert {choice.provider for choice in resolved.choices if choice.op in FUSED} == {"composition"}


def test_every_fused_op_has_a_composition() -> None:
    assert {op for op in vars(FusedOps) if not op.startswith("_")} == {op for op in FUSED if not op.endswith("]")}


@pytest.mark.parametrize("op", PLAIN)
def test_one_op_is_forced_alone(op: str) -> None:
    resolved = resolve_ops(FLOAT32, forced={op: "reference"})
    assert {choice.op for choice in resolved.choices if choice.provider == "reference"} == {op}
    assert resolved.ops[op] is function_of(reference, op)


@pytest.mark.parametrize("forced", ["cuda-magic", {"linear": "cuda-magic"}], ids=["all", "one"])
def test_an_unknown_provider_is_refused_by_name(forced: Any) -> None:
    with pytest.raises(
        BackendUnavailable,
        match=r"no provider is called 'cuda-magic'; there are native, deep_gemm, .*composition, torch, reference",
    ):
        resolve_ops(FLOAT32, forced=forced)


def only_pages_of_64(op: str, spec: OpSpec) -> str | None:
    return None if op != "mla_decode" or spec.page_size == 64 else f"reads pages of 64 tokens, got {spec.page_size}"


@pytest.fixture
def newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add two preferred providers: one cannot run here, one has `linear`, and `mla_decode` for one page size. Nothing
    else comes before torch."""
    absent, partial = ModuleType("tests_absent_ops"), ModuleType("tests_partial_ops")
    for op in ("linear", "route", "add_rms_norm", "mla_decode"):
        setattr(absent, op, print)
    absent.unavailable = lambda spec: f"needs a quantum device, got {spec.device}"  # type: ignore[attr-defined]
    partial.unavailable = lambda spec: None  # type: ignore[attr-defined]
    partial.linear = reference.linear  # type: ignore[attr-defined]
    partial.mla_decode = reference.mla_decode  # type: ignore[attr-defined]
    partial.refuses = only_pages_of_64  # type: ignore[attr-defined]
    for module in (absent, partial):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    added = (resolve.Provider("absent", absent.__name__), resolve.Provider("partial", partial.__name__))
    everywhere = [each for each in resolve.PROVIDERS if each.name in ("composition", "torch", "reference")]
    monkeypatch.setattr(resolve, "PROVIDERS", (*added, *everywhere))


@pytest.mark.usefixtures("newcomers")
def test_each_provider_of_an_op_that_was_passed_over_has_a_reason() -> None:
    choices = {choice.op: choice for choice in resolve_ops(FLOAT32).choices}
    assert choices["linear"].provider == "partial"
    assert choices["linear"].refusals == ("absent: needs a quantum device, got cpu",)
    assert choices["route"].provider == "torch"
    assert choices["route"].refusals == ("absent: needs a quantum device, got cpu",)
    assert choices["linear[fp8]"].refusals == ()


@pytest.mark.usefixtures("newcomers")
def test_a_provider_of_a_fused_op_is_preferred_to_its_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_rms_norm(*_: Any) -> None: ...

    monkeypatch.setattr(sys.modules["tests_partial_ops"], "add_rms_norm", add_rms_norm, raising=False)
    resolved = resolve_ops(FLOAT32)
    assert resolved.ops.add_rms_norm is add_rms_norm
    (choice,) = (choice for choice in resolved.choices if choice.op == "add_rms_norm")
    assert (choice.provider, choice.refusals) == ("partial", ("absent: needs a quantum device, got cpu",))


@pytest.mark.usefixtures("newcomers")
@pytest.mark.parametrize(
    ("forced", "sentence"),
    [
        ("absent", "op rms_norm cannot run on cpu: absent: needs a quantum device, got cpu"),
        ({"route": "partial"}, "op route cannot run on cpu: partial: has no route"),
        (
            {"mla_decode": "partial"},
            "op mla_decode cannot run on cpu: partial: reads pages of 64 tokens, got None",
        ),
        ({"route": "composition"}, "op route cannot run on cpu: composition: has no route"),
    ],
    ids=["cannot-run", "lacks-the-op", "refuses-the-shape", "is-no-composition"],
)
def test_a_forced_provider_that_cannot_run_says_why(forced: Any, sentence: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        resolve_ops(FLOAT32, forced=forced)
    assert str(caught.value) == sentence


@pytest.mark.usefixtures("newcomers")
@pytest.mark.parametrize(("page_size", "provider"), [(64, "partial"), (32, "torch"), (None, "torch")])
def test_a_provider_refuses_an_op_by_its_shape(page_size: int | None, provider: str) -> None:
    """What is not known may be anything."""
    choices = {choice.op: choice for choice in resolve_ops(attrs.evolve(FLOAT32, page_size=page_size)).choices}
    assert (choices["mla_decode"].provider, choices["linear"].provider) == (provider, "partial")
    refused = [f"partial: reads pages of 64 tokens, got {page_size}"] if provider == "torch" else []
    assert list(choices["mla_decode"].refusals[1:]) == refused


FP8_STRIPS = ("linear[fp8_strips]", "grouped_mlp[fp8_strips]")


DECODE = ("mla_decode", "mla_absorbed")


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, *flags: str, strips: bool = True) -> None:
    """Have the native provider see a CPU with these flags, whose kernels read weights in strips or do not."""
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    of_fp8 = strips and flags == ("avx2",)
    served = SimpleNamespace(
        why_not=lambda _: None, strips_are_served=lambda: strips, fp8_strips_are_served=lambda: of_fp8
    )
    monkeypatch.setattr(native.build, "library", lambda: served)


@pytest.mark.parametrize(
    ("known", "refused"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, {}),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 72},
            dict.fromkeys(DECODE, "reads latents and rotary keys in steps of 32 elements, they have 512 and 72"),
        ),
        (
            {"kv_lora_rank": 16, "qk_rope_head_dim": 16},
            dict.fromkeys(DECODE, "reads latents and rotary keys in steps of 32 elements, they have 16 and 16"),
        ),
        ({"kv_lora_rank": 16}, {}),
        (
            {"kv_format": "fp8"},
            dict.fromkeys((*DECODE, "mla_prefill"), "reads pages of bfloat16, these are packed FP8"),
        ),
        ({"kv_format": "bfloat16"}, {}),
    ],
)
def test_native_kernels_refuse_shapes(
    known: dict[str, Any], refused: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At these shapes they would only pass their inputs on to torch."""
    on_a_cpu(monkeypatch, "avx2")
    spec = OpSpec(device="cpu", dtype=torch.bfloat16, **known)
    assert {op: native.refuses(op, spec) for op in OP_NAMES if native.refuses(op, spec)} == refused


def test_prefill_is_torchs_where_it_multiplies_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, "avx512_bf16", "amx_bf16")
    spec = OpSpec(device="cpu", dtype=torch.bfloat16)
    assert {op for op in OP_NAMES if native.refuses(op, spec)} == {"mla_prefill", *FP8_STRIPS}


def test_weights_stay_plain_where_torch_multiplies_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch, "avx512_bf16", strips=False)
    spec = OpSpec(device="cpu", dtype=torch.bfloat16)
    assert {op for op in OP_NAMES if native.refuses(op, spec)} == {"linear[strips]", "grouped_mlp[strips]", *FP8_STRIPS}


@pytest.mark.parametrize(("flags", "kept"), [(("avx2",), True), (("avx512_bf16", "amx_bf16"), False)], ids=str)
def test_fp8_weights_stay_so_where_strips_of_them_are_served(
    flags: tuple[str, ...], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu(monkeypatch, *flags)
    spec = OpSpec(device="cpu", dtype=torch.bfloat16, weight_formats={"fp8"})
    told = (
        "are held as they are stored"
        if kept
        else 'become bfloat16 (weights="auto"): linear[fp8] of native takes longer'
    )
    assert f"fp8 weights {told}" in explain_backends(spec)


def test_a_provider_is_asked_once_whether_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[OpSpec] = []
    monkeypatch.setattr(torch_provider, "unavailable", asked.append, raising=False)
    resolve_ops(FLOAT32)
    assert asked == [FLOAT32]


@pytest.mark.usefixtures("newcomers")
def test_calls_that_a_provider_declines_go_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that calls other ops gets those that were chosen, in whichever turn it is."""
    calls: list[Any] = []
    first, second = sys.modules["tests_absent_ops"], sys.modules["tests_partial_ops"]
    monkeypatch.setattr(first, "unavailable", lambda spec: None)

    def only_small(*arguments: Any) -> None:
        if arguments[0] != "small":
            raise Declined("is for small ones")
        calls.append(("first", arguments))

    monkeypatch.setattr(first, "linear", only_small)
    monkeypatch.setattr(first, "DECLINES", ("linear",), raising=False)
    later = Composed(lambda ops, *arguments: calls.append((ops, arguments)))
    monkeypatch.setattr(second, "linear", later)
    resolved = resolve_ops(FLOAT32)
    resolved.ops.linear("small", "w")
    resolved.ops.linear("large", "w")
    assert calls == [("first", ("small", "w")), (resolved.ops, ("large", "w"))]
    (choice,) = (choice for choice in resolved.choices if choice.op == "linear")
    assert (choice.provider, choice.others) == ("absent", ("partial",))
    assert f"{'linear':<{max(map(len, OP_NAMES))}}  absent, else partial\n" in explain_backends(FLOAT32)
    other = resolved.ops.replace(route=print)
    other.linear("large", "w")
    assert calls[-1][0] is other
    with pytest.raises(TypeError, match="no op is called rout"):
        resolved.ops.replace(rout=print)
    with pytest.raises(BackendUnavailable, match=r"^op linear: is for small ones$"):
        resolve_ops(FLOAT32, forced={"linear": "absent"}).ops.linear("large", "w")


def test_a_card_is_known_by_its_name_and_need_not_be_here() -> None:
    """H200 is sm_90 (https://developer.nvidia.com/cuda-gpus)."""
    assert DeviceSpec.of("H200") == DeviceSpec("cuda", "H200", (9, 0))
    assert DeviceSpec.of("cpu") == DeviceSpec.of(torch.device("cpu")) == DeviceSpec("cpu")
    assert str(DeviceSpec.of("H800")) == "H800"
    assert str(DeviceSpec.of("cpu")) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, of which torch tells more")
def test_of_a_card_that_is_not_named_nothing_is_assumed() -> None:
    assert DeviceSpec.of("cuda:1") == DeviceSpec("cuda", "", None)


def test_torch_names_the_card_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    assert DeviceSpec.of("cuda:1") == DeviceSpec("cuda", "card 1", (9, 1))
    assert DeviceSpec.of("H200") == DeviceSpec("cuda", "H200", (9, 0))


@pytest.mark.parametrize("name", ["H2000", "cuda:x", None])
def test_an_unknown_device_is_refused_with_the_cards_that_are_known(name: Any) -> None:
    with pytest.raises(BackendUnavailable, match=r"is neither a torch device name .* nor a card among A100, .*H200"):
        explain_backends(OpSpec(device=name))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"weight_formats": ["int3"]}, "weight_formats must be among fp8, w8a8_dynamic, w8a8, int4, mxfp4, got 'int3'"),
        ({"page_size": 0}, "page_size must be an int from 1"),
        ({"kv_format": "int8"}, "kv_format must be one of bfloat16, float16, float32, fp8, got 'int8'"),
    ],
)
def test_a_spec_with_a_wrong_value_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OpSpec(device="cpu", **wrong)


V3_ON_H200 = OpSpec(
    device="H200",
    num_heads=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    weight_formats={"fp8"},
    page_size=64,
    kv_format="bfloat16",
)


def test_explain_backends_takes_a_spec_of_a_card_that_is_not_here() -> None:
    pytest.importorskip("triton")
    lines = explain_backends(V3_ON_H200).splitlines()
    served = [line.split() for line in lines if line.split()[0] in OP_NAMES]
    of_many_rows = {"linear[fp8]": ["triton,", "else", "torch"]}
    assert served == [[op, *of_many_rows.get(op, ["triton" if op in IN_TRITON else other])] for op, other in SERVED]
    assert lines[-2] == "native is for cpu, device is H200"
    assert lines[-1] == 'fp8 weights are held as they are stored (weights="auto")'
    on_ampere = explain_backends(attrs.evolve(V3_ON_H200, device="A100")).splitlines()
    assert on_ampere[-1].startswith(
        'fp8 weights become bfloat16 (weights="auto"): linear[fp8] of torch makes floats of'
    )


V3_ON_H800 = attrs.evolve(V3_ON_H200, device="H800")
V32_IN_INT8 = attrs.evolve(V3_ON_H800, weight_formats={"w8a8", "w8a8_dynamic"}, kv_format="fp8")


@pytest.mark.parametrize("spec", [V3_ON_H800, V32_IN_INT8], ids=["v3-fp8", "v32-int8"])
def test_every_op_of_the_deployments_has_a_kernel(spec: OpSpec) -> None:
    """Plain products of floats are torch's, which calls cuBLAS, and so are dense ones of many rows in FP8 and
    `index_select`. Strips are for CPUs. No deployment on cards dispatches rows in INT8."""
    pytest.importorskip("triton")
    lines = explain_backends(spec).splitlines()
    by_op = dict(line.split(None, 1) for line in lines if line.split()[0] in OP_NAMES)
    assert by_op.keys() == {*OP_NAMES}
    others = dict.fromkeys(("linear", "linear[fp8]", "heads_in", "heads_out", "gather_rows"), "torch")
    others["grouped_mlp_int8_rows"] = "torch"
    others |= dict.fromkeys((op for op in OP_NAMES if op.endswith("strips]")), "composition")
    others |= dict.fromkeys(
        ("mla_absorbed", "gated_mlp", "choose_experts", "sort_rows", "sort_rows_fp8"), "composition"
    )
    assert all(provider.endswith(others.get(op, "triton")) for op, provider in by_op.items()), by_op
    assert not any("slow: " in line for line in lines)
    told = [line.strip() for line in lines]
    refused_libraries = {
        line.split()[1].rstrip(":") for line in told if re.match(r"not (deep_gemm|flash_mla): .", line)
    }
    assert refused_libraries == {name for name in ("deep_gemm", "flash_mla") if find_spec(name) is None}
    for kind in spec.weight_formats:
        assert f'{kind} weights are held as they are stored (weights="auto")' in lines


@pytest.mark.parametrize("weight_format", OPS_OF_FORMAT)
@pytest.mark.parametrize("card", ["H100", "H200", "H800"])
def test_quantized_weights_stay_so_on_hopper(card: str, weight_format: str) -> None:
    spec = attrs.evolve(V3_ON_H200, device=card, weight_formats={weight_format})
    told = explain_backends(spec)
    assert told.endswith(f'{weight_format} weights are held as they are stored (weights="auto")')
    assert "slow: " not in told


@pytest.mark.parametrize("weight_format", OPS_OF_FORMAT)
def test_a_spec_says_what_becomes_of_its_weights(monkeypatch: pytest.MonkeyPatch, weight_format: str) -> None:
    op = OPS_OF_FORMAT[weight_format][-1]
    monkeypatch.setattr(triton_provider, "unavailable", lambda _spec: "is elsewhere")
    spec = attrs.evolve(V3_ON_H200, weight_formats={weight_format})
    monkeypatch.setattr(torch_provider, "slow", lambda _op, _spec: None)
    kept = explain_backends(spec).splitlines()[-1]
    assert kept == f'{weight_format} weights are held as they are stored (weights="auto")'
    monkeypatch.setattr(torch_provider, "slow", lambda name, spec: f"waits on {spec.device}" if name == op else None)
    made = explain_backends(spec).splitlines()[-1]
    assert made == f'{weight_format} weights become bfloat16 (weights="auto"): {op} of torch waits on H200'


def test_explain_backends_is_a_table_of_all_ops() -> None:
    head, *lines = explain_backends("cpu", torch.float32).splitlines()
    assert head.split() == ["op", "provider"]
    slow = [line.strip() for line in lines if "slow: " in line]
    refusals = [line.strip() for line in lines if " not " in line]
    assert set(refusals) == {"not native: is for bfloat16, the model runs in torch.float32"}
    *lines, deep_gemm, flash_mla, triton = lines
    assert (deep_gemm, triton) == ("deep_gemm is for cuda, device is cpu", "triton is for cuda, device is cpu")
    assert flash_mla == "flash_mla is for cuda, device is cpu"
    lines = [line for line in lines if "slow: " not in line and " not " not in line]
    assert [line.split() for line in lines] == SERVED
    assert slow.count("slow: makes floats of FP8 weights in every call") == 2
    columns = {line.index(provider) for line, (_, provider) in zip(lines, SERVED, strict=True)}
    assert columns == {head.index("provider")}


@pytest.mark.usefixtures("newcomers")
def test_explain_backends_shows_reasons_below_their_op() -> None:
    lines = [line.strip() for line in explain_backends("cpu").splitlines()]
    at = lines.index(f"{'route':<{max(map(len, OP_NAMES))}}  torch")
    assert lines[at + 1] == "not absent: needs a quantum device, got cpu"
