"""Readers of traces: what they read, and what they say of a trace that is wrong."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer import bench
from pdinfer.bench import traces


def line(at: float = 0, prompt: int = 600, output: int = 5, hashes: object = (0, 1)) -> str:
    row = {"timestamp": at, "input_length": prompt, "output_length": output, "hash_ids": hashes}
    return json.dumps(row) + "\n"


def written(folder: Path, text: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319601,31,8\n"
)
SPLITWISE = (
    "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,0,0,0.5,1,100,20\n1,0,0,1.75,1,50,1\n"
)
PLAIN = "at_s,prompt_tokens,output_tokens\n0,5,6\n2.5,7,8\n"
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 9}]},
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    ]
)


@pytest.mark.parametrize(
    ("text", "format_", "expected"),
    [
        (line() + line(1500, 512, 9, [7]), "mooncake", [(0.0, 600, 5), (1.5, 512, 9)]),
        (AZURE, "azure", [(0.0, 4808, 10), (0.0520001, 31, 8)]),
        (SPLITWISE, "splitwise", [(0.5, 100, 20), (1.75, 50, 1)]),
        (PLAIN, "csv", [(0.0, 5, 6), (2.5, 7, 8)]),
        (SHAREGPT, "sharegpt", [(0.0, 10, 3)]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_is_recognized_and_read(
    tmp_path: Path, text: str, format_: str, expected: list[tuple[float, int, int]], packed: bool
) -> None:
    data = gzip.compress(text.encode()) if packed else text.encode()
    trace = bench.read_trace(written(tmp_path, data))
    assert trace.format == format_
    found = [(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) for arrival in trace.arrivals]
    assert [row[1:] for row in found] == [row[1:] for row in expected]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=1e-6)
    assert len(trace.sha256) == 64
    assert bench.read_trace(tmp_path / "trace.jsonl", format=format_) == trace


def test_bins_are_spread_by_seed_or_kept_and_the_trace_says_which(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(line(3000 * (at // 4)) for at in range(40)))
    spread = bench.read_trace(path, seed=1)
    times = [arrival.at_s for arrival in spread.arrivals]
    assert times == sorted(times)
    assert len(set(times)) == 40
    assert [int(at // 3) for at in times] == [at // 4 for at in range(40)]
    assert "spread" in spread.notes[0]
    assert bench.read_trace(path, seed=1) == spread
    assert bench.read_trace(path, seed=2) != spread
    kept = bench.read_trace(path, bins="keep")
    assert {arrival.at_s for arrival in kept.arrivals} == {3.0 * at for at in range(10)}
    assert "kept" in kept.notes[0]
    load = bench.replay(kept, speed=2.0, num_requests=8)
    assert [arrival.at_s for arrival in load.arrivals] == [0.0] * 4 + [1.5] * 4
    assert load.notes == kept.notes
    assert dict(load.environment)["trace_sha256"] == kept.sha256


def test_a_name_that_is_no_text_goes_into_a_summary(tmp_path: Path) -> None:
    trace = bench.read_trace(written(tmp_path, GOOD, os.fsdecode(b"\xff.jsonl")))
    assert (trace.name, bench.Summary(name=trace.name).to_json()[:1]) == (r"\udcff.jsonl", b"{")


def test_tokens_of_text_are_counted_by_the_host(tmp_path: Path) -> None:
    trace = bench.read_trace(written(tmp_path, SHAREGPT), count_tokens=len)
    assert (trace.arrivals[0].prompt_tokens, trace.arrivals[0].output_tokens) == (40, 9)
    assert any("left out" in note for note in trace.notes)
    assert not any("characters" in note for note in trace.notes)
    with pytest.raises(pd.ConfigError, match="what count_tokens returns must be an int of at least 0, got None"):
        bench.read_trace(written(tmp_path, SHAREGPT), count_tokens=lambda text: None)  # type: ignore[arg-type, return-value]
    load = bench.open_loop(2.0, 3, prompt_tokens=trace, output_tokens=trace)
    assert [arrival.prompt_tokens for arrival in load.arrivals] == [40] * 3


@pytest.mark.parametrize("text", [line() + line(5), AZURE, SPLITWISE, PLAIN, SHAREGPT])
def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path, text: str) -> None:
    marked, plain = (bench.read_trace(written(tmp_path, mark + text.encode())) for mark in (b"\xef\xbb\xbf", b""))
    assert marked.arrivals == plain.arrivals


GOOD = line()
WRONG = {
    "no JSON": (GOOD + "{oops\n", 2, "the line"),
    "a key is there twice": (GOOD + line(5)[:-2] + ', "timestamp": 6}\n', 2, "the line"),
    "a key is there twice in text": ('[{"conversations": [], "conversations": []}]', 1, "conversations"),
    "a key is missing": (GOOD + '{"timestamp": 1, "input_length": 5, "hash_ids": [1]}\n', 2, "output_length"),
    "a negative time": (line(-1), 1, "timestamp"),
    "a time that is no number": ('{"timestamp": NaN, "input_length": 5}\n', 1, "the line"),
    "an endless time": (line(1e300), 1, "timestamp"),
    "time goes back": (line(5) + line(4), 2, "the time"),
    "no prompt": (line(prompt=0, hashes=[]), 1, "input_length"),
    "a prompt that is too long": (line(prompt=2**31 + 1), 1, "input_length"),
    "no output": (line(output=0), 1, "output_length"),
    "too few hashes": (line(hashes=[1]), 1, "hash_ids"),
    "hashes of another kind": (line(hashes=["a", "b"]), 1, "hash_ids"),
    "a negative hash": (line(hashes=[-1, 2]), 1, "hash_ids"),
    "a date that is none": (AZURE + "2023-99-16 18:17:03,1,1\n", 4, "TIMESTAMP"),
    "a date before the others": (AZURE + "2023-11-16 18:17:01,1,1\n", 4, "TIMESTAMP"),
    "a length with a sign": (PLAIN + "3,-7,8\n", 4, "prompt_tokens"),
    "a length of zero": (PLAIN + "3,7,0\n", 4, "output_tokens"),
    "a cell is missing": (PLAIN + "3,7\n", 4, "output_tokens"),
    "nan as a time": (PLAIN + "nan,7,8\n", 4, "at_s"),
    "a conversation of another kind": ('[{"conversations": 5}]', 1, "conversations"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_with_file_line_and_field(tmp_path: Path, what: str) -> None:
    text, number, field = WRONG[what]
    path = written(tmp_path, text)
    with pytest.raises(pd.ConfigError) as raised:
        bench.read_trace(path)
    assert str(raised.value).startswith(f"{path}, line {number}: {field} "), raised.value


@pytest.mark.parametrize("text", ["", "\n", "hello\n", "{}", "[]", PLAIN[:33]])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(pd.ConfigError):
        bench.read_trace(written(tmp_path, text))
    with pytest.raises(pd.ConfigError):
        bench.read_trace(tmp_path / "none.jsonl")
    with pytest.raises(pd.ConfigError):
        bench.read_trace(tmp_path)


def test_a_long_line_and_a_gzip_bomb_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = written(tmp_path, gzip.compress(GOOD.encode() * 40_000))
    assert bomb.stat().st_size < 20_000
    monkeypatch.setattr(traces, "MAX_TRACE_BYTES", 1 << 20)
    with pytest.raises(pd.ConfigError, match="GiB of text"):
        bench.read_trace(bomb)
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 1 << 10)
    with pytest.raises(pd.ConfigError, match="line 2: the line is longer"):
        bench.read_trace(written(tmp_path, GOOD + " " * 2000))
    with pytest.raises(pd.ConfigError, match="cannot be read on"):
        bench.read_trace(written(tmp_path, gzip.compress(GOOD.encode())[:-9]))


PIECES = st.sampled_from(
    [GOOD, AZURE, PLAIN, SPLITWISE, SHAREGPT, "{", "}", "[", "]", ",", "\n", '"', "-1", "1e999", "NaN", "\x00", "é"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(PIECES.map(str.encode), st.binary(max_size=40)), max_size=8), st.sampled_from([0, 1]))
def test_a_hostile_trace_gives_typed_errors_only(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], packed: int
) -> None:
    data = b"".join(pieces)
    path = written(tmp_path_factory.getbasetemp(), gzip.compress(data) if packed else data, "hostile")
    try:
        trace = bench.read_trace(path)
    except pd.ConfigError:
        return
    assert all(arrival.prompt_tokens >= 1 and arrival.at_s >= 0 for arrival in trace.arrivals)
