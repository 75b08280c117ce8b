"""A public call refuses an argument of a wrong kind by its name, with an error of pdinfer's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import pdinfer as pd
from pdinfer import bench, kernels, kv, metrics, moe, planning, remote
from pdinfer.checks import typed
from pdinfer.moe.placement.difference import plan_migration
from pdinfer.planning.simulation.deployment import Network
from pdinfer.testing import random_model, tiny_config
from tests.e2e.setups import local, model_of, pool_of, request

MODEL = model_of()
H800 = planning.hardware("H800")
CLUSTER: dict[str, Any] = {"shape": "1P1D", "prefill_s": lambda _: 0.1, "decode_s": lambda _: 0.1}
WRONG: dict[str, Any] = {
    "none": None,
    "int": 5,
    "float": 1.5,
    "nan": float("nan"),
    "huge": 10**400,
    "bool": True,
    "text": "no such thing",
    "bytes": b"bytes",
    "object": object(),
    "list": [object()],
    "mapping": {"a": object()},
    "class": kv.SocketTransport,
    "model": MODEL,
    "config": pd.remote.RemoteConfig(),
    "tensor": torch.zeros(2),
    "function": lambda: None,
}
Call = Callable[[Any], object]


def ends() -> pd.KVChannel:
    return pd.KVChannel.loopback(pool_of(MODEL))[0]


def engines() -> tuple[pd.PrefillEngine, pd.DecodeEngine]:
    one, other = pd.KVChannel.loopback(*[pool_of(MODEL)] * 2)
    return pd.PrefillEngine(MODEL, one), pd.DecodeEngine(MODEL, other)


def pairing(**more: Any) -> pd.Pairing:
    prefill, decode = engines()
    return pd.Pairing(**{"prefill": prefill, "decode": decode, **more})


@functools.cache
def one(make: Callable[[], Any]) -> Any:
    """Return the one that all calls share: they are refused, and leave it as it is."""
    return make()


def plan_of(**more: Any) -> planning.EnginePlan:
    return planning.EnginePlan(**{"name": "P", "config": MODEL.config, "topology": pd.Topology(), **more})


def remaining(name: str, drain_s: Any) -> None:
    """Have a port leave."""
    apart = pairing()
    more = {"role": "decode"} if name == "switching" else {}
    getattr(apart, name)(apart.ports[0], drain_s=drain_s, **more)


def each(call: Callable[..., object], good: dict[str, Any], **right: str) -> Iterator[Any]:
    """Yield a parameter set for each argument of a call: the call with that argument, and the kinds that are right."""
    for name in good:
        kinds = frozenset(right.get(name, "").split())
        yield pytest.param(lambda value, name=name: call(**{**good, name: value}), kinds, id=f"{call.__name__}({name})")


def row(name: str, call: Call, right: str = "") -> Any:
    return pytest.param(call, frozenset(right.split()), id=name)


MADE = [
    *each(pd.load_model, {"checkpoint": "nowhere"}),
    *(
        row(f"load_model({name})", lambda value, name=name: pd.load_model("nowhere", **{name: value}), right)
        for name, right in {
            "device": "text",
            "dtype": "none text",
            "weights": "text",
            "topology": "none",
            "progress": "none bool class function",
            "providers": "none text mapping",
            "check_finite": "bool",
            "mtp": "bool",
            "experts": "none",
            "placement": "none",
            "cache": "none",
        }.items()
    ),
    *each(pd.PagePool, {"model": MODEL, "config": pd.CacheConfig(num_pages=2)}, model="model", config="none"),
    *each(
        pd.KVChannel,
        {"pool": pool_of(MODEL), "transport": None, "key": None, "clock": None, "random_bytes": None},
    ),
    *(
        row(
            f"{role.__name__}({name})",
            lambda value, r=role, n=name: r(**{"model": MODEL, "channel": ends(), n: value}),
            right,
        )
        for role in (pd.PrefillEngine, pd.DecodeEngine)
        for name, right in {
            "model": "model",
            "channel": "",
            "config": "none",
            "logits_processors": "none mapping",
            "clock": "function class",
        }.items()
    ),
    *(
        row(f"Pairing({name})", lambda value, name=name: pairing(**{name: value}), right)
        for name, right in {
            "prefill": "",
            "decode": "",
            "config": "none",
            "policy": "function class",
            "clock": "function class",
            "random_bytes": "function class",
        }.items()
    ),
    *(
        row(
            f"Pairing.local({name})",
            lambda value, name=name: pd.Pairing.local(**{"checkpoint_or_model": MODEL, name: value}),
            right,
        )
        for name, right in {
            "checkpoint_or_model": "model",
            "cache": "none",
            "engine": "none",
            "config": "none",
            "policy": "function class",
            "logits_processors": "none mapping",
        }.items()
    ),
    *each(
        kv.SocketTransport,
        {"host": "127.0.0.1", "port": 0, "digest": True, "strangers": None},
        host="text",
        digest="bool",
        strangers="none",
        port="int",
    ),
    *each(
        kv.ShmTransport,
        {"path": None, "digest": True, "strangers": None},
        path="none text",
        digest="bool",
        strangers="none",
    ),
    row("LoopbackTransport", kv.LoopbackTransport),
    *each(kv.Strangers, {"max_links": 1, "grace_s": 1.0}, max_links="int", grace_s="int float"),
    row("KVEvents", kv.KVEvents),
    row("PrefillClient", lambda value: remote.PrefillClient(value, timeout_s=0.1), "class function"),
    row("DecodeClient(config)", lambda value: remote.DecodeClient(lambda: None, config=value), "none config"),  # type: ignore[arg-type, return-value]
    row("serve(engine)", lambda value: remote.serve(value, None)),
    row("SLO", lambda value: pd.bench.SLO(ttft_s=value), "none int float"),
    *each(Network, {"bytes_per_s": 1.0, "token_bytes": 1}, bytes_per_s="none int float", token_bytes="int"),
    *each(
        planning.Change,
        {"engine": "P0", "at_s": 0.0, "speed": 1.0},
        engine="text",
        at_s="int float",
        speed="int float",
    ),
    *each(planning.Stall, {"at_s": 0.0, "for_s": 1.0}, at_s="int float", for_s="int float"),
    *each(planning.EnginePlan, {"name": "P", "config": MODEL.config, "topology": pd.Topology()}, name="text"),
    *(
        row(f"EnginePlan({name})", lambda value, name=name: plan_of(**{name: value}), right)
        for name, right in {
            "cache": "",
            "engine": "",
            "other_engine": "none",
            "experts": "",
            "mtp": "",
            "stored": "",
            "weights": "",
            "device": "",
            "device_bytes": "none",
            "prompt_tokens": "none int",
        }.items()
    ),
    *each(planning.ClusterPlan, {"prefill": [plan_of()], "decode": [plan_of()]}),
    row("roofline(imbalance)", lambda value: planning.roofline(plan_of(), H800, imbalance=value), "none int float"),
    *(
        row(f"roofline.{name}", lambda value, name=name: getattr(planning.roofline(plan_of(), H800), name)(value))
        for name in ("bound", "floor_s", "rate")
    ),
    *(
        row(f"cluster({name})", lambda value, name=name: planning.cluster(**CLUSTER, **{name: value}), right)
        for name, right in {
            "prefill": "none",
            "decode": "none",
            "bytes_per_s": "none",
            "token_bytes": "int",
            "num_pushes": "int",
            "latency_s": "int float",
            "pairing": "none",
            "changes": "",
            "stalls": "",
            "colocated": "bool",
            "step_cv": "float",
            "accept_rate": "",
            "ranks": "int",
        }.items()
    ),
    *(
        row(f"Recorder.{name}", lambda value, name=name: getattr(metrics.Recorder(), name)(value), "mapping")
        for name in ("read", "refused", "render")
    ),
    row("simulate", lambda value: planning.simulate(value, value)),
    row("PromptMaker", bench.PromptMaker, "int"),
    row("join_traces", lambda value: metrics.join_traces(value, "nowhere/x.json")),
    row("Topology", lambda value: pd.Topology(tp_size=value)),
    row("OpSpec", lambda value: kernels.OpSpec(device="cpu", weight_formats=value)),
    row("resolve_ops", kernels.resolve_ops),
    row("random_model", random_model, "none"),
    row("tiny_config", tiny_config),
]

CALLED = [
    row("explain_backends", pd.explain_backends, "model"),
    row("ModelConfig.from_checkpoint", pd.ModelConfig.from_checkpoint),
    row("ModelConfig.from_dict", pd.ModelConfig.from_dict),
    row("quantize_checkpoint", lambda value: pd.quantize_checkpoint(value, "nowhere")),
    row("rebalance_experts", lambda value: pd.rebalance_experts(value, 4, 1, 1, 1)),
    row("ExpertPlacement.slots_of", lambda value: pd.ExpertPlacement.trivial(1, 2, 1).slots_of(value)),
    row("plan_migration", lambda value: plan_migration(value, value, expert_bytes=1)),
    row("write_placement", lambda value: moe.write_placement("nowhere/x.json", value)),
    row("Model.logits", MODEL.logits, "bytes"),
    row("Model.mtp_logits", lambda value: MODEL.mtp_logits([1], value), "int"),
    row("Model.kv_layout", MODEL.kv_layout),
    *(
        row(f"PagePool.{name}", lambda value, name=name: getattr(pool_of(MODEL), name)(value), right)
        for name, right in {
            "own": "int",
            "grant": "int",
            "share": "",
            # the items of long lists of numbers are not looked at
            "release": "list",
            "adopt": "list",
            "generations": "list bytes",
        }.items()
    ),
    row("KVChannel.loopback", pd.KVChannel.loopback),
    *(
        row(f"KVChannel.{name}", lambda value, name=name: getattr(one(ends), name)(value))
        for name in ("connect", "connected", "drop_peer", "expect", "accept", "is_full")
    ),
    row("KVChannel.wait", lambda value: one(ends).wait(value), "int float"),
    row("KVChannel.finish", lambda value: one(ends).finish(value, value)),
    row("KVChannel.abort", lambda value: one(ends).abort(value, pd.TransferError("x"))),
    row("KVChannel.push", lambda value: one(ends).push(value, layers=range(1), tokens=range(1), pages=(0,))),
    *(
        row(
            f"{side}.{name}",
            lambda value, side=side, name=name: getattr(one(engines)[side == "decode"], name)(value),
            right,
        )
        for side in ("prefill", "decode")
        for name, right in {
            "connect": "",
            "disconnect": "",
            "cancel": "text",
            "wait": "int float",
            "drain": "int float",
            "notify": "function class",
            "stage_placement": "",
        }.items()
    ),
    row("PrefillEngine.submit", lambda value: one(engines)[0].submit(value, value)),
    row("DecodeEngine.submit", lambda value: one(engines)[1].submit(value, writers=())),
    row("DecodeEngine.submit(writers)", lambda value: one(engines)[1].submit(request(), writers=value)),
    row("DecodeEngine.change_writers", lambda value: one(engines)[1].change_writers("a", writers=value)),
    row("Pairing.submit", lambda value: one(pairing).submit(value)),
    row("Pairing.cancel", lambda value: one(pairing).cancel(value), "text"),
    row("Pairing.generate", lambda value: one(pairing).generate(value), "mapping tensor"),
    row("Pairing.add", lambda value: one(pairing).add(value)),
    row("Pairing.remove", lambda value: one(pairing).remove(value, drain_s=0.0)),
    row("Pairing.joining", lambda value: one(pairing).joining(value)),
    row("Pairing.removal", lambda value: one(pairing).removal(value, drain_s=0.0)),
    row("Pairing.switching", lambda value: one(pairing).switching(value, "decode", drain_s=0.0)),
    *(
        row(f"Pairing.{name}(drain_s)", lambda value, name=name: remaining(name, value), "int float")
        for name in ("remove", "removal", "switching")
    ),
    row("Pairing.wait", lambda value: one(pairing).wait(value), "int float"),
    row("Pairing.drain", lambda value: one(pairing).drain(value), "int float"),
    *each(
        bench.burst,
        {"num_requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        num_requests="int",
        prompt_tokens="int function class",
        output_tokens="int function class",
    ),
    row("bench.run(pairing)", lambda value: bench.run(value, bench.burst(1, prompt_tokens=1, output_tokens=1))),
    row("bench.run(load)", lambda value: bench.run(one(pairing), value)),
    *(
        row(f"bench.{call.__name__}", call)
        for call in (bench.check, bench.merge, bench.from_vllm, bench.replay, bench.read_trace)
    ),
]


@pytest.mark.parametrize(("call", "right"), [*MADE, *CALLED])
def test_a_wrong_kind_is_refused_with_an_error_of_our_own(call: Call, right: frozenset[str]) -> None:
    assert right <= WRONG.keys()
    for kind in WRONG.keys() - right:
        with pytest.raises(pd.PDInferError) as caught:
            call(WRONG[kind])
        assert len(str(caught.value)) < 500, kind


def test_the_mistakes_of_a_first_day() -> None:
    pool, prefill = pool_of(MODEL), engines()[0]
    with pytest.raises(pd.ConfigError, match=r"^KVChannel: pool must be Pages, got Model\("):
        pd.KVChannel(MODEL, kv.SocketTransport())  # type: ignore[arg-type]
    with pytest.raises(pd.ConfigError, match=r"make an object of it first: SocketTransport\(\.\.\.\)$"):
        pd.KVChannel(pool, kv.SocketTransport)  # type: ignore[arg-type]
    of_before = type("Mine", (), dict.fromkeys(["close", "connect", "fence", "name", "register", "send", "write"]))()
    with pytest.raises(
        pd.ConfigError, match=r"transport must be Transport, got .*, which has no cut, in_doubt, ticks$"
    ):
        pd.KVChannel(pool, of_before)  # type: ignore[arg-type]
    with pytest.raises(pd.ConfigError, match=r"^load_model: progress must be bool \| Callable\[\[int, int\], None\]"):
        pd.load_model("examples/tiny", progress=1)  # type: ignore[arg-type]
    with pytest.raises(pd.ConfigError, match=r"^load_model: checkpoint must be str \| PathLike\[str\], got None$"):
        pd.load_model(None)  # type: ignore[arg-type]
    with pytest.raises(pd.ConfigError, match="every engine is added once"):
        pd.Pairing([prefill, prefill], engines()[1])
    with pytest.raises(pd.ConfigError, match=r"^Pairing: decode must be DecodePort"):
        pd.Pairing(prefill, prefill)  # type: ignore[arg-type]


def test_an_engine_takes_an_open_channel_with_pages_of_its_own_model() -> None:
    channel = ends()
    other = random_model(tiny_config("v2"))
    with pytest.raises(pd.ConfigError, match=r"has pages of another model than Model\(deepseek_v2"):
        pd.PrefillEngine(other, channel)
    with pytest.raises(pd.ConfigError, match="num_draft_tokens"):  # which leaves the channel to a better try
        pd.DecodeEngine(MODEL, channel, pd.EngineConfig(num_draft_tokens=1))
    pd.DecodeEngine(MODEL, channel)
    with pytest.raises(pd.ConfigError, match=r"has an engine already, .* make a new channel"):
        pd.PrefillEngine(MODEL, channel)
    channel.close()
    with pytest.raises(pd.ConfigError, match=r"is closed: make a new channel"):
        pd.DecodeEngine(MODEL, channel)


def test_closed_objects_answer_with_errors_of_our_own() -> None:
    with local() as setup:
        pairing, prefill, decode = setup.pairing, setup.prefills[0], setup.decodes[0]
    assert prefill.step() == decode.step() == pairing.step() == []
    assert [*prefill.channel.poll(), *prefill.channel.poll_stops()] == []
    assert decode.drain(0.0)
    assert not pairing.wait(0.0)
    failed = list(pairing.generate(request()))
    assert [type(event.error) for event in failed] == [pd.RequestError]
    for call in (
        lambda: pairing.submit(request()),
        lambda: pairing.add(engines()[0]),
        lambda: pd.Pairing(prefill, decode),
        lambda: prefill.connect(decode.address),
        prefill.warm_up,
        lambda: pd.KVChannel(prefill.pool, prefill.channel.transport),
    ):
        with pytest.raises(pd.PDInferError, match=r"closed|make one transport per channel"):
            call()


# -- the check itself --------------------------------------------------------------------------------------------------


class Named(Protocol):
    """A protocol with an attribute and a method."""

    name: str

    def call(self) -> None: ...


class Good:
    name = "good"

    def call(self) -> None: ...


@typed
def taken(
    number: int = 0,
    share: float = 0.0,
    *rest: str,
    named: Named | None = None,
    several: Sequence[Named] = (),
    table: Mapping[str, int] | None = None,
    path: str | Path = "",
    anything: Any = None,
) -> tuple[Any, ...]:
    """Take arguments of many kinds."""
    return number, share, rest, named, several, table, path, anything


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {}),
        ((1, 2.5, "a", "b"), {}),
        ((), {"named": Good()}),
        ((), {"several": [Good(), Good()], "table": {}, "path": Path(), "anything": object()}),
    ],
)
def test_right_arguments_arrive_as_they_are(args: Any, kwargs: Any) -> None:
    number, share, *others = taken(*args, **kwargs)
    assert (number, share, others[0]) == ((*args, 0, 0.0)[:2] if args else (0, 0.0)) + (args[2:],)
    assert [value for value in others[1:] if value] == [value for value in kwargs.values() if value]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((True,), {}, "taken: number must be int, got True"),
        ((1.0,), {}, "taken: number must be int, got 1.0"),
        ((1, float("nan")), {}, "taken: share must be float, got nan"),
        ((1, 1, "a", 2), {}, "taken: rest must be str, got 2"),
        ((), {"named": Good}, "taken: named must be Named | None, got class Good; make an object of it first: Good("),
        ((), {"named": 5}, "taken: named must be Named | None, got 5"),
        ((), {"several": [Good(), 5]}, "taken: several must be Sequence[Named], got ["),
        ((), {"several": iter([Good()])}, "taken: several must be Sequence[Named], got <list_iterator"),
        ((), {"several": "text"}, "taken: several must be Sequence[Named], got 'text'"),
        ((), {"several": b"text"}, "taken: several must be Sequence[Named], got b'text'"),
        ((), {"table": [1]}, "taken: table must be Mapping[str, int] | None, got [1]"),
        ((), {"path": None}, "taken: path must be str | Path, got None"),
    ],
)
def test_wrong_arguments_are_told_with_call_name_kind_and_value(args: Any, kwargs: Any, told: str) -> None:
    with pytest.raises(pd.ConfigError) as caught:
        taken(*args, **kwargs)
    assert str(caught.value).startswith(told)


def test_what_python_says_itself_stays() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nosuch'"):
        taken(nosuch=1)  # type: ignore[call-arg]
