"""Everything that the docs name exists, and the numbers they give are those of the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

import pdinfer as pd
from pdinfer.config import RemoteConfig
from pdinfer.config.options import HUNG_FACTOR, HUNG_S
from pdinfer.kv.channel.wire import Message
from pdinfer.kv.pool import PageState
from pdinfer.metrics import names

ROOT = Path(__file__).parent.parent
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text("utf-8")
READING = (ROOT / "docs" / "reading.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED_TESTS = sorted(
    {name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", page.read_text("utf-8"))}
)
NUMBERS = re.findall(r"^\| `((?:kv|process)(?:\.[a-z_]+)+)\.([\w.]+)` \| ([\d.]+) \|", PROTOCOL, re.MULTILINE)


@pytest.mark.parametrize("name", NAMED_TESTS)
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize(("module", "name", "value"), NUMBERS)
def test_a_number_is_that_of_the_code(module: str, name: str, value: str) -> None:
    found = importlib.import_module(f"pdinfer.{module}")
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)  # for a class, the default
    assert found == float(value)


def test_the_times_of_a_connection_are_those_of_the_code() -> None:
    table = dict(re.findall(r"^\| `(\w+_s)` \| (.+?) \|", PROTOCOL, re.MULTILINE))
    values = attrs.asdict(RemoteConfig())
    assert values.pop("hung_s") is None
    assert table.pop("hung_s") == f"max({HUNG_S:g}, {HUNG_FACTOR:g} × warm-up)"
    assert {name: float(value) for name, value in table.items()} == values


def test_the_protocol_names_every_frame_every_page_state_and_every_promise() -> None:
    frames = set(re.findall(r"^\| `(\w+)` \| (?:both|the|a writer|decode)", PROTOCOL, re.MULTILINE))
    assert frames == {kind.__struct_config__.tag for kind in Message.__args__}
    pages = PROTOCOL[PROTOCOL.index("### A page") : PROTOCOL.index("## A link")]
    assert set(re.findall(r"^\| ([A-Z]+) \|", pages, re.MULTILINE)) == {state.name for state in PageState}
    promised = {int(number) for number in re.findall(r"^\| C(\d+) \|", PROTOCOL, re.MULTILINE)}
    assert promised == {*range(1, 6), *range(7, 14), 15, 18, 19, 20}
    assert len(NUMBERS) == len(re.findall(r"^\| `(?:kv|process)\.", PROTOCOL, re.MULTILINE)) > 0
    assert NAMED_TESTS


OWNERS = (
    *(pd.CacheConfig, pd.EngineConfig, pd.ExpertConfig, pd.PairingConfig, pd.RemoteConfig, pd.Topology),
    *(pd.kv.SocketTransport, pd.kv.MooncakeTransport, pd.SamplingParams, pd.load_model),
)


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_an_argument_that_a_page_names_exists(owner: Callable[..., object]) -> None:
    known, found = inspect.signature(owner).parameters, 0
    for page in PAGES:
        for arguments in re.findall(rf"\b{owner.__name__}\(([^()]*)\)", page.read_text("utf-8")):
            given = re.findall(r"(\w+)=", arguments)
            assert set(given) <= set(known), f"{page}: {owner.__name__}({arguments})"
            found += len(given)
    assert found


def test_a_metric_that_is_ours_instead_of_theirs_exists() -> None:
    page = (ROOT / "docs/howto/coming-from-other-servers.md").read_text("utf-8")
    ours = set(re.findall(r"\bpdinfer_\w+", page))
    assert len(ours) > 20
    assert ours <= {metric.name for metric in vars(names).values() if isinstance(metric, names.Metric)}


def test_the_reading_path_is_short() -> None:
    named = re.findall(r"^\d\. \[`([\w/.]+)`\]\(\.\./src/pdinfer/([\w/.]+)\)", READING, re.MULTILINE)
    assert len(named) == 6
    assert all(name == path for name, path in named)
    lines = sum(len((ROOT / "src/pdinfer" / path).read_text("utf-8").splitlines()) for _, path in named)
    assert lines <= 1650


def test_files_that_the_reading_path_names_exist() -> None:
    table = re.findall(r"\| `([\w/]+\.py)` \|$", READING, re.MULTILINE)
    assert len(table) == 5
    assert all((ROOT / "src/pdinfer" / path).is_file() for path in table)
