"""Metrics: text that Prometheus's own parser reads, true figures, counters that never fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.metrics import Recorder
from pdinfer.metrics.names import BUCKETS_S, METRICS
from pdinfer.metrics.recorder import _of_engine
from pdinfer.metrics.series import MAX_SERIES, Counters
from pdinfer.stats import ChannelStats, DecodeLoad, EngineLoad, PairingStats, PeerStats, PrefillLoad
from pdinfer.testing import random_model
from pdinfer.types import Usage
from tests.e2e.setups import greedy
from tests.golden.samples import DECODE_LOAD, PREFILL_LOAD
from tests.waiting import check_ends, started

NOT_SHOWN = {
    *("page_size", "token_bytes", "max_running_requests"),  # never change
    *("providers", "placement_epoch", "is_placement_staged", "placement_error"),  # are no numbers to watch
    *("cost", "queued", "unsent_bytes", "accept_length"),  # are for policies
}
"""The fields of loads that are in no metric."""
parser = pytest.importorskip("prometheus_client.parser")
Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: str) -> dict[Sample, float]:
    """Every sample, by its name and labels, as Prometheus's parser reads it. None is there twice."""
    read = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in read}
    assert len(found) == len(read)
    return found


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def test_metrics_of_real_engines_are_valid_and_add_up() -> None:
    model, recorder = random_model(), Recorder()
    pools = [pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=64)) for _ in range(2)]
    prefill_end, decode_end = pd.KVChannel.loopback(*pools)
    prefill, decode = pd.PrefillEngine(model, prefill_end), pd.DecodeEngine(model, decode_end)
    with pd.Pairing(prefill, decode) as pairing:
        for number in range(3):
            pairing.submit(pd.Request(prompt=(3, 5, 7, 9, number), sampling=greedy(4, ignore_eos=True)))
        before = recorder.render(pairing)
        ended: list[str] = []
        while pairing.num_unfinished:
            ended += recorder.read(pairing.step())
        text = recorder.render(pairing)
    assert len(ended) == 3
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    kinds = {metric.name.removesuffix("_total"): metric.kind for metric in METRICS}
    assert {name: family.type for name, family in families.items()} == kinds
    without = {name for name, family in families.items() if not family.samples}
    assert without == {"pdinfer_requests_refused", "pdinfer_engine_step_age_seconds"}, "of these there was nothing here"
    assert [line for line in before.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]
    assert value(before, "pdinfer_requests_unfinished") == 3
    assert value(before, "pdinfer_output_tokens_total") == 0
    for name, expected in {
        "pdinfer_requests_unfinished": 0,
        "pdinfer_time_to_first_token_seconds_count": 3,
        "pdinfer_inter_token_latency_seconds_count": 9,
        "pdinfer_request_duration_seconds_count": 3,
        "pdinfer_request_queue_seconds_count": 3,
        "pdinfer_prompt_tokens_total": 15,
        "pdinfer_output_tokens_total": 12,
        "pdinfer_ports_lost_total": 0,
    }.items():
        assert value(text, name) == expected, name
    assert value(text, "pdinfer_requests_ended_total", reason="length") == 3
    here, there = (engine.address.engine_id.hex()[:8] for engine in (prefill, decode))
    sent = value(text, "pdinfer_kv_sent_bytes_total", engine=here, peer=there)
    assert sent == value(text, "pdinfer_kv_received_bytes_total", engine=there, peer=here) > 0
    assert value(text, "pdinfer_kv_link_up", engine=here, peer=there) == 1
    assert value(text, "pdinfer_ports", role="decode") == 1
    pages = [value(text, "pdinfer_pages", engine=there, role="decode", state=s) for s in ("free", "cached", "used")]
    assert sum(pages) == 64
    assert pages[2] == 0
    assert value(text, "pdinfer_engine_info", engine=here, role="prefill", transport="loopback") == 1


def event(token: int | None, index: int, at_s: float | None, *, reason: str = "", name: str = "a") -> pd.TokenEvent:
    usage = Usage(prompt_tokens=4, output_tokens=2, cached_tokens=3, queue_s=0.5, ttft_s=None)
    return pd.TokenEvent(
        request_id=name,
        token=token,
        index=index,
        at_s=at_s,
        finish_reason=pd.FinishReason(reason) if reason else None,
        usage=usage if reason else None,
    )


@attrs.define
class Port:
    """A port that tells what a test says."""

    said: EngineLoad

    @property
    def role(self) -> str:
        return "prefill" if isinstance(self.said, PrefillLoad) else "decode"

    def load(self) -> EngineLoad:
        return self.said


@attrs.define
class Observed:
    """A Pairing that tells what a test says."""

    ports: Sequence[Port] = ()
    num_retries: int = 0

    @property
    def stats(self) -> PairingStats:
        counts = {"num_queued_requests": 0, "num_unfinished_requests": 0, "num_reroutes": 0, "num_moved": 0}
        return PairingStats(ended=(), num_retries=self.num_retries, num_ports_lost=0, links_down=(), **counts)


def address(name: bytes) -> pd.PeerAddress:
    return pd.PeerAddress(name, 0, 0)


def decode_load(kv: ChannelStats, **more: Any) -> DecodeLoad:
    counts = ("waiting_requests", "waiting_tokens", "granted_requests", "running_requests", "running_tokens")
    return DecodeLoad(
        address=address(b"dddd"),
        num_free_pages=1,
        num_total_pages=4,
        page_size=4,
        kv=kv,
        **{f"num_{name}": 0 for name in counts},
        **more,
    )


@pytest.mark.parametrize(("role", "load"), [("prefill", PREFILL_LOAD), ("decode", DECODE_LOAD)])
def test_every_field_of_a_load_is_shown_or_said_not_to_be(role: str, load: EngineLoad) -> None:
    """A new one would otherwise be in no metric, and nobody would have decided so."""
    before, shown = list(_of_engine(role, load)), {"address", "kv"}
    for field in attrs.fields(type(load)):
        value = getattr(load, field.name)
        if isinstance(value, bool | int | float | str):
            other = f"{value}2" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
            if list(_of_engine(role, attrs.evolve(load, **{field.name: other}))) != before:
                shown.add(field.name)
    fields = {field.name for field in attrs.fields(type(load))}
    assert not (new := fields - shown - NOT_SHOWN), (
        f"give {new} a metric in metrics/recorder.py, or list it in NOT_SHOWN"
    )
    assert not (seen := shown & NOT_SHOWN), f"{seen} has a metric: take it out of NOT_SHOWN"


def test_requests_that_end_in_the_queue_count_in_the_durations() -> None:
    recorder = Recorder()
    with pd.Pairing.local(random_model(), policy=lambda *_: None) as pairing:
        for name in "ab":
            pairing.submit(pd.Request(request_id=name, prompt=(3, 5), sampling=greedy(4)))
        pairing.cancel("a")
        assert recorder.read(pairing.step()) == ["a"]
        pairing.close()
        assert recorder.read(pairing.step()) == ["b"]
        text = recorder.render(pairing)
    assert value(text, "pdinfer_request_duration_seconds_count") == 2
    assert value(text, "pdinfer_request_queue_seconds_count") == 2


def test_a_histogram_counts_what_is_at_most_a_bound() -> None:
    recorder = Recorder()
    recorder.read([event(1, 0, 0.002), event(2, 1, 0.0525), event(3, 2, 500.0, reason="length")])
    recorder.read([event(None, 0, None, reason="failed", name="b")])
    text = recorder.render(Observed())
    ttft, itl = "pdinfer_time_to_first_token_seconds", "pdinfer_inter_token_latency_seconds"
    assert [value(text, f"{ttft}_bucket", le=le) for le in ("0.001", "0.002", "0.005", "+Inf")] == [0, 1, 1, 1]
    assert [value(text, f"{itl}_bucket", le=le) for le in ("0.05", "0.1", "100.0", "+Inf")] == [0, 1, 1, 2]
    assert value(text, f"{itl}_sum") == pytest.approx(499.998)
    assert value(text, "pdinfer_request_queue_seconds_sum") == 1.0
    assert value(text, "pdinfer_cached_prompt_tokens_total") == 6
    assert value(text, "pdinfer_request_duration_seconds_count") == 1  # nobody told when the other ended
    bounds = [dict(labels)["le"] for name, labels in samples(text) if name == f"{ttft}_bucket"]
    assert [float(bound) for bound in bounds[:-1]] == list(BUCKETS_S)


def test_what_an_ended_request_knew_is_forgotten() -> None:
    recorder = Recorder()
    for _ in range(2):  # an id may be used again
        recorder.read([event(1, 0, 1.0), event(2, 1, 2.0, reason="stop")])
    text = recorder.render(Observed())
    assert value(text, "pdinfer_time_to_first_token_seconds_count") == 2
    assert value(text, "pdinfer_inter_token_latency_seconds_sum") == 2.0
    assert not recorder._token_s


def test_counters_never_fall() -> None:
    """An engine begins anew, a link is forgotten and opened again, an engine leaves, and a new Pairing is made."""
    recorder, name = Recorder(), "pdinfer_kv_received_bytes_total"
    told = []
    for received, num_tokens in ((100, 7), (250, 9), (None, 0), (40, 3), (40, 3)):
        peers = () if received is None else (PeerStats(address=address(b"pppp"), bytes_received=received),)
        load = decode_load(ChannelStats(peers=peers), num_tokens=num_tokens)
        told.append(recorder.render(Observed([Port(load)], num_retries=5)))
    told.append(recorder.render(Observed(num_retries=2)))
    labels = {"engine": b"dddd".hex(), "peer": b"pppp".hex()}
    assert [value(text, name, **labels) for text in told] == [100, 250, 250, 290, 290, 290]
    engine = {"engine": b"dddd".hex(), "role": "decode"}
    assert [value(text, "pdinfer_engine_tokens_total", **engine) for text in told] == [7, 9, 9, 12, 12, 12]
    assert [value(text, "pdinfer_request_retries_total") for text in told] == [5, 5, 5, 5, 5, 7]
    assert "pdinfer_pages{" in told[-2]
    assert "pdinfer_pages{" not in told[-1]  # a gauge of what has left says nothing


def test_the_oldest_counters_make_room() -> None:
    counters, metric = Counters(), METRICS[7]
    for number in range(MAX_SERIES + 2):
        counters.add(metric, 1, str(number))
        counters.add(metric, 1, "0")
    kept = {labels[0]: count for _, labels, count in counters.values()}
    assert len(kept) == MAX_SERIES
    assert kept["0"] == MAX_SERIES + 3
    assert "1" not in kept


def test_labels_of_any_text_are_read_back() -> None:
    nasty = 'a"b\\c\nd\\n{},é'
    recorder = Recorder(labels={"model": nasty})
    recorder.refused(pd.Overloaded("no room"))
    text = recorder.render(Observed([Port(decode_load(ChannelStats(), transport=nasty))]))
    assert value(text, "pdinfer_requests_refused_total", code="OVERLOADED", model=nasty) == 1
    named = {"engine": b"dddd".hex(), "role": "decode", "transport": nasty, "model": nasty}
    assert value(text, "pdinfer_engine_info", **named) == 1
    assert value(text, "pdinfer_time_to_first_token_seconds_bucket", model=nasty, le="+Inf") == 0


@pytest.mark.parametrize("labels", [{"a b": "x"}, {"le": "x"}, {"engine": "x"}, {"__name": "x"}, {"a": 1}, {"é": "x"}])
def test_labels_that_cannot_be_are_refused(labels: dict[str, Any]) -> None:
    with pytest.raises(pd.ConfigError, match="a label is a name of letters"):
        Recorder(labels=labels)


def test_a_scraper_in_another_thread_sees_whole_figures() -> None:
    recorder, seen = Recorder(), []

    def scrape() -> None:
        for _ in range(50):
            text = recorder.render(Observed())
            seen.append(value(text, "pdinfer_output_tokens_total"))

    scraper = started(scrape)
    for number in range(2000):
        recorder.read([event(1, 0, 0.1, name=str(number)), event(2, 1, 0.2, reason="stop", name=str(number))])
    check_ends(scraper)
    assert seen == sorted(seen)
    assert all(count % 2 == 0 for count in seen)
