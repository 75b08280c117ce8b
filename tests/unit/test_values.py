"""Everything that a host can print reads well: in at most 400 characters, and without looking into a tensor."""

from __future__ import annotations

import enum
import json
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.bench.summary import Finding, Interval, Stage
from pdinfer.diagnosis.report import Diagnosis, Fact, Section, failure, warning
from pdinfer.testing import random_model, tiny_config
from pdinfer.values import MAX_CHARACTERS, asdict, brief, shown
from tests.e2e.setups import local, request

TINY = Path("examples/tiny")
ADDRESS = pd.PeerAddress(engine_id=b"e" * 16, epoch=1, rank=0, endpoints=())


class NoOps(TorchDispatchMode):
    """Fails when any op runs."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a repr ran {func}")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when an op runs or a tensor is printed, which would wait for its device."""

    def printed(tensor: torch.Tensor, **_: Any) -> str:
        raise AssertionError(f"a repr printed a tensor of {tensor.shape}")

    monkeypatch.setattr(torch.Tensor, "__repr__", printed)
    with NoOps():
        yield


def members(value: object) -> Iterator[object]:
    """Yield what a host reaches from a value by its public fields, and the items of collections."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif attrs.has(type(value)):
        yield from (getattr(value, field.name) for field in attrs.fields(type(value)))
    elif isinstance(value, msgspec.Struct):
        yield from (getattr(value, name) for name in value.__struct_fields__)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | types.ModuleType):
        yield from (item for name, item in vars(value).items() if not name.startswith("_"))


def reached(*roots: object) -> dict[int, object]:
    """Return every object of pdinfer that is reached from the roots."""
    found: dict[int, object] = {}
    waiting, seen = [*roots], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, torch.Tensor | np.ndarray | str | bytes | enum.Enum):
            continue
        seen.add(id(value))
        if type(value).__module__.startswith("pdinfer"):
            found[id(value)] = value
        waiting += members(value)
    return found


@pytest.fixture(scope="module")
def roots() -> Iterator[list[object]]:
    """Yield what a first day with pdinfer leaves in a notebook."""
    model = random_model(tiny_config("v32"), mtp=True)
    with local() as setup:
        long = request(
            "long", prompt=tuple(range(90)), sampling=pd.SamplingParams(max_new_tokens=9, logprobs=20, seed=1)
        )
        pairing = setup.pairing
        ids = [pairing.submit(each) for each in (long, *(request(str(number)) for number in range(9)))]
        events: list[object] = [*pairing.step(), *pairing.step(), *pairing.step()]
        busy: list[object] = [engine.snapshot() for engine in (*setup.prefills, *setup.decodes)]
        while pairing.num_unfinished:
            pairing.wait(1.0)
            events += pairing.step()
        ports = [*setup.prefills, *setup.decodes]
        stats = [pairing.stats, *(port.load() for port in ports), *(port.channel.stats for port in ports)]
        snapshots = [port.channel.snapshot() for port in ports]
        load = bench.burst(500, prompt_tokens=9, output_tokens=9)
        placement = pd.ExpertPlacement.trivial(61, 256, 32, 32)
        yield [model, pairing, *ports, long, ids, events, busy, stats, snapshots, load, placement]


def test_reprs_are_short_and_touch_no_tensor(roots: list[object], untouched: None) -> None:
    values = reached(*roots).values()
    assert [text for text in map(repr, values) if len(text) > MAX_CHARACTERS] == []
    texts = {type(value).__name__: repr(value) for value in values}
    named = {"Model", "PagePool", "KVChannel", "PrefillEngine", "DecodeEngine", "Pairing", "Request", "KVLayout"}
    for name in named | {"PrefillLoad", "DecodeLoad", "ChannelStats", "PairingStats", "EngineConfig", "Linear", "MLA"}:
        assert texts[name].startswith(f"{name}(")
    assert len(texts) > 60


def test_the_reprs_of_the_objects_of_a_deployment() -> None:
    model = random_model(tiny_config("v3"), mtp=True)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=8))
    (channel,) = pd.KVChannel.loopback(pool)
    engine = pd.DecodeEngine(model, channel)
    pool.own(2)
    pool.grant(1)
    assert repr(model) == "Model(deepseek_v3, 3 layers, 0.1 M parameters and an MTP layer, float32 on cpu)"
    assert repr(pool) == "PagePool(8 pages of 16 tokens: 5 free, 2 owned, 1 granted, 0 cached)"
    assert repr(channel) == f"KVChannel({channel.address}, over loopback, {pool!r})"
    assert repr(engine) == f"DecodeEngine({channel.address}, 0 unfinished requests, {model!r}, {pool!r})"
    engine.close()
    assert repr(channel).endswith(", closed)")
    assert repr(engine).endswith(", closed)")


def test_a_pairing_counts_its_ports_and_says_when_it_is_closed() -> None:
    with local() as setup:
        setup.pairing.submit(request())
        assert repr(setup.pairing) == "Pairing(1 prefill, 1 decode, 1 unfinished requests)"
    assert repr(setup.pairing) == "Pairing(1 prefill, 1 decode, 0 unfinished requests, closed)"


def test_the_reprs_of_what_stands_around_a_pairing() -> None:
    tokenizer = pd.text.Tokenizer.load(TINY)
    body = json.dumps({"messages": [{"role": "user", "content": "secret"}], "stream": True, "n": 2, "stop": ["; "]})
    call = pd.text.openai.Call.parse(body, tokenizer, is_chat=True, model="m" * 500)
    text = pd.text.TextStream(tokenizer, call.requests[0])
    text.push(pd.TokenEvent(request_id="a", token=ord(";"), index=0))
    recorder, metrics = bench.Recorder(), pd.metrics.Recorder(labels={"model": "m" * 500})
    recorder.sent("a", prompt_tokens=3)
    metrics.read([pd.TokenEvent(request_id="a", token=7, index=0, at_s=0.5)])
    with local() as setup:
        host = pd.aio.AsyncPairing(setup.pairing)
        texts = [*map(repr, (tokenizer, call, text, recorder, metrics, host))]
        host._submitting.shutdown()
    assert texts == [
        "Tokenizer(259 tokens, 1 chat templates)",
        f"Call(chat.completion of '{'m' * 58}…, 2 requests, streams)",
        "TextStream(1 characters held back, stop_string=None)",
        "Recorder(1 requests)",
        "Recorder(1 requests stream, labels={… 1 in all})",
        "AsyncPairing(0 streams, Pairing(1 prefill, 1 decode, 0 unfinished requests))",
    ]


# -- tables ------------------------------------------------------------------------------------------------------------

MARKUP = "<script>alert('&')</script>"


class Cells(HTMLParser):
    """The texts of the cells of a table; anything but a plain table fails."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert (tag, attributes) in [("table", [("border", "1")]), ("tr", []), ("td", [])]
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.rows[-1][-1] += data


def cells(value: Any) -> list[list[str]]:
    return Cells(value._repr_html_()).rows


def test_a_table_of_stats_has_what_its_text_has(untouched: None) -> None:
    lost = pd.stats.LostPort(address=ADDRESS, role="decode", age_s=1.5, reason="it fell silent", is_back=True)
    stats = pd.stats.PairingStats(
        num_queued_requests=3,
        num_unfinished_requests=4,
        ended=(),
        num_retries=0,
        num_reroutes=0,
        num_moved=0,
        num_ports_lost=1,
        links_down=(),
        ports_lost=(lost,),
    )
    title, *rows = cells(stats)
    assert title == ["PairingStats"]
    assert repr(stats) == f"PairingStats({', '.join('='.join(row) for row in rows)})"
    load = pd.policy.PrefillLoad(
        address=ADDRESS,
        num_free_pages=1,
        num_total_pages=2,
        page_size=16,
        num_queued_requests=0,
        num_queued_tokens=0,
        placement_error=MARKUP,
    )
    assert ["placement_error", repr(MARKUP)] in cells(load)
    assert cells(pd.stats.ChannelStats(bytes_sent=7)) == [["ChannelStats"], ["bytes_sent", "7"]]


def test_a_table_of_a_summary_has_what_its_text_has() -> None:
    finding = Finding(check="slip", expected="<", found=">", advice="mend it")
    stage = Stage(name="compute", mean_ms=1.0, p50_ms=1.0, p99_ms=2.0, share=0.5)
    interval = Interval(mean=2.0, low=1.0, high=3.0, cv=0.1)
    summary = bench.Summary(
        name=MARKUP, findings=(finding,), stages=(stage,), intervals={"tpot": interval}, notes=("a note",)
    )
    rows, lines = cells(summary), str(summary).splitlines()
    assert len(rows) == len(lines) == 11
    for row, line in zip(rows, lines, strict=True):
        assert row[0] in " ".join(line.split())
        assert line.endswith(row[1])
    assert MARKUP in rows[1][0]


def test_a_table_of_a_diagnosis_has_what_its_text_has() -> None:
    diagnosis = Diagnosis(
        sections=(
            Section(
                name="limits",
                facts=(Fact(name="locked", value=3, remarks=("it is little", MARKUP)), Fact(name="file", value=None)),
                problems=(warning("it is slow"), failure("it fails " + MARKUP, "ulimit -l 9")),
            ),
        )
        * 50
    )
    rows = cells(diagnosis)
    assert rows[0] == ["pdinfer doctor", "50 failures, 50 warnings"]
    assert rows[1] == ["FAILURE", "limits", "it fails " + MARKUP, "$ ulimit -l 9"]
    assert rows[51] == ["WARNING", "limits", "it is slow"]
    assert rows[-2:] == [["limits", "locked", "3", "it is little", MARKUP], ["limits", "file", "-"]]
    text = " ".join(str(diagnosis).split())
    assert [cell for row in rows for cell in row if cell not in text] == []
    assert repr(diagnosis) == "Diagnosis(50 failures, 50 warnings; print it to read the report)"
    assert [each for each in map(repr, reached(diagnosis).values()) if len(each) > MAX_CHARACTERS] == []


def test_a_value_shows_what_differs_from_the_defaults() -> None:
    assert repr(pd.EngineConfig()) == "EngineConfig()"
    assert repr(pd.EngineConfig(num_draft_tokens=2)) == "EngineConfig(num_draft_tokens=2)"
    asked = pd.Request(prompt=range(10_000), sampling=pd.SamplingParams(temperature=0.0, seed=7))
    assert repr(asked) == (
        "Request(prompt=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, "
        "25, 26, 27, … 10000 in all), sampling=SamplingParams(temperature=0, seed=7))"
    )
    event = pd.TokenEvent(request_id="a", token=None, index=0, finish_reason=pd.FinishReason.FAILED, at_s=0.1 + 0.2)
    assert repr(event) == "TokenEvent(request_id='a', token=None, index=0, finish_reason=FinishReason.FAILED, at_s=0.3)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2**127, str(2**127)),
        (2**5000, "an int of 5001 bits"),
        ((1, 2**20_000), "(1, an int of 20001 bits)"),
        ("x" * 99, "'" + "x" * 58 + "…"),
        (b"\x00\xff", r"b'\x00\xff'"),
        (bytes(range(32)), "00010203… of 32 bytes"),
        ((1,), "(1,)"),
        ([], "[]"),
        ({"a": [1]}, "{'a': [1]}"),
        ({3}, "{3}"),
        (1.0000000000000002, "1.0000000000000002"),
        (True, "True"),
        (pd.FinishReason.STOP, "FinishReason.STOP"),
        (pd.Pairing, "class Pairing"),
        (brief, "function brief"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3] on cpu"),
        (torch.zeros(2, device="meta"), "float32[2] on meta"),
        (np.int64(3), repr(np.int64(3))),
        ([torch.zeros(2, device="meta")], "[float32[2] on meta]"),
        (pd.CacheConfig(num_pages=3), "CacheConfig(num_pages=3)"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_shown(value: object, text: str, untouched: None) -> None:
    assert shown(value) == text


def test_deeply_nested_and_long_values_stay_short() -> None:
    nested: Any = ()
    for _ in range(50):
        nested = (nested, "x" * 50)
    assert len(shown(nested)) <= 60
    assert len(shown({str(number): number for number in range(1000)})) <= 60


# -- plain data --------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return what a reader of the JSON gets; NaN is no JSON."""
    return json.loads(json.dumps(pd.metrics.asdict(value), allow_nan=False))


def test_every_value_that_is_reached_is_told_as_json_takes_it(roots: list[object]) -> None:
    told = 0
    for value in reached(*roots[4:]).values():
        if attrs.has(type(value)) or isinstance(value, msgspec.Struct):
            assert plain(value) == pd.metrics.asdict(value)
            told += 1
    assert told > 50


def test_plain_data_of_a_load_and_of_stats() -> None:
    with local() as setup:
        list(setup.pairing.generate(request("a")))
        load = setup.decodes[0].load()
        told, stats = plain(load), plain(setup.pairing.stats)
    assert told["address"]["engine_id"] == load.address.engine_id.hex()
    assert told["kv"]["bytes_sent"] == load.kv.bytes_sent
    assert ["rms_norm", dict(load.providers)["rms_norm"]] in told["providers"]
    assert stats["ended"] == [["length", 1]]


def test_errors_ranges_mappings_and_what_is_not_finite() -> None:
    failed = pd.TokenEvent(request_id="a", token=None, index=0, error=pd.Overloaded("full", retry_after_s=2.0))
    assert plain(failed)["error"] == {"code": "OVERLOADED", "message": "full; try again in 2 s", "retry_after_s": 2.0}
    with local() as setup:
        address = setup.decodes[0].address
    grant = pd.PageGrant(
        room=b"\x01" * 16,
        request_id="a",
        writers=(address,),
        destinations=(address,),
        tokens=range(3, 9),
        pages=(1, 2),
        generations=(0, 0),
        layout_id=b"\x02",
    )
    assert plain(grant)["tokens"] == [3, 9]
    assert plain(grant)["room"] == "01" * 16
    shape = pd.types.RequestShape(
        ordinal=0, num_prompt_tokens=1, num_output_tokens=0, max_new_tokens=1, found_tokens={address: 64}
    )
    assert plain(shape)["found_tokens"] == {str(address): 64}
    assert plain(attrs.evolve(failed, at_s=float("inf")))["at_s"] is None


@pytest.mark.parametrize("value", [None, 5, {"a": 1}, [1], torch.zeros(1), pd.EngineConfig, "text"], ids=repr)
def test_what_is_no_value_is_refused(value: Any) -> None:
    with pytest.raises(pd.ConfigError, match="asdict takes a value"):
        asdict(value)


def test_what_holds_tensors_or_engines_is_no_plain_data() -> None:
    model = random_model(tiny_config("v3"))
    with pytest.raises(pd.ConfigError, match=r"asdict takes values of pdinfer, got .*: ask"):
        asdict(model)


def test_a_plan_and_a_configuration_are_values_too() -> None:
    assert plain(pd.ModelConfig.from_checkpoint(TINY))["model_type"] == "deepseek_v3"
    assert plain(planning.Stall(at_s=1.0, for_s=2.0)) == {"at_s": 1.0, "for_s": 2.0}
