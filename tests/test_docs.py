"""Everything that the docs name exists, and the numbers they give are those of the code."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import attrs

import pdinfer as pd
from pdinfer.config import RemoteConfig
from pdinfer.config.options import HUNG_FACTOR, HUNG_S
from pdinfer.kv.channel.wire import Message
from pdinfer.kv.pool import PageState
from pdinfer.metrics import names
from tests.places import defined_in

ROOT = Path(__file__).parent.parent
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text("utf-8")
READING = (ROOT / "docs" / "reading.md").read_text("utf-8")
PAGES = {path: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
OWNERS = (
    *(pd.CacheConfig, pd.EngineConfig, pd.moe.ExpertConfig, pd.PairingConfig, pd.remote.RemoteConfig, pd.Topology),
    *(pd.kv.SocketTransport, pd.kv.MooncakeTransport, pd.SamplingParams, pd.load_model),
)


def test_tests_that_pages_name_exist() -> None:
    claims = ROOT / "tests" / "claims.toml"
    named = {
        (name, page.relative_to(ROOT).as_posix())
        for page, text in {**PAGES, claims: claims.read_text("utf-8")}.items()
        for name in re.findall(r"[`\"](tests/[\w/]+\.py::\w+)[`\"]", text)
    }
    assert len(named) > 100
    assert not [
        f"{page} names {name}, which does not exist"
        for name, page in sorted(named)
        if not (ROOT / (file := name.partition("::")[0])).is_file()
        or name.partition("::")[2] not in defined_in(ROOT, file)
    ]


def wrong_in_the_protocol() -> Iterator[str]:
    """Yield what docs/protocol.md says that the code does not."""
    numbers = re.findall(r"^\| `((?:kv|process)(?:\.[a-z_]+)+)\.([\w.]+)` \| ([\d.]+) \|", PROTOCOL, re.MULTILINE)
    for module, name, value in numbers:
        found = importlib.import_module(f"pdinfer.{module}")
        for part in name.split("."):
            found = getattr(found() if isinstance(found, type) else found, part)  # for a class, the default
        if found != float(value):
            yield f"{module}.{name} is {found}, not {value}"
    if not len(numbers) == len(re.findall(r"^\| `(?:kv|process)\.", PROTOCOL, re.MULTILINE)) > 0:
        yield "a row of constants has no number"

    pages = PROTOCOL[PROTOCOL.index("### A page") : PROTOCOL.index("## A link")]
    times = dict(re.findall(r"^\| `(\w+_s)` \| (.+?) \|", PROTOCOL, re.MULTILINE))
    promises = {*range(1, 6), *range(7, 14), 15, 18, 19, 20}
    for what, said, so in (
        ("hung_s", times.pop("hung_s"), f"max({HUNG_S:g}, {HUNG_FACTOR:g} × warm-up)"),
        (
            "times",
            {name: float(value) for name, value in times.items()} | {"hung_s": None},
            attrs.asdict(RemoteConfig()),
        ),
        (
            "frames",
            set(re.findall(r"^\| `(\w+)` \| (?:both|the|a writer|decode)", PROTOCOL, re.MULTILINE)),
            {kind.__struct_config__.tag for kind in Message.__args__},
        ),
        (
            "states of a page",
            set(re.findall(r"^\| ([A-Z]+) \|", pages, re.MULTILINE)),
            {state.name for state in PageState},
        ),
        ("promises", {int(number) for number in re.findall(r"^\| C(\d+) \|", PROTOCOL, re.MULTILINE)}, promises),
    ):
        if said != so:
            yield f"{what}: {said}, where {so} is so"


def test_the_protocol_is_that_of_the_code() -> None:
    found = [*wrong_in_the_protocol()]
    assert not found, "\n".join(found)


def unknown_names() -> Iterator[str]:
    """Yield the arguments and metrics that pages name and the library lacks, and those of which none is named."""
    for owner in OWNERS:
        known, num_given = inspect.signature(owner).parameters, 0
        for page, text in PAGES.items():
            for arguments in re.findall(rf"\b{owner.__name__}\(([^()]*)\)", text):
                given = re.findall(r"(\w+)=", arguments)
                num_given += len(given)
                if not set(given) <= set(known):
                    yield f"{page.relative_to(ROOT)}: {owner.__name__}({arguments})"
        if not num_given:
            yield f"no page gives {owner.__name__} an argument"
    ours = set(re.findall(r"\bpdinfer_\w+", PAGES[ROOT / "docs/howto/coming-from-other-servers.md"]))
    yield from ours - {metric.name for metric in vars(names).values() if isinstance(metric, names.Metric)}
    if len(ours) <= 20:
        yield f"of our metrics the page for other servers names {len(ours)}"


def test_arguments_and_metrics_that_pages_name_exist() -> None:
    found = [*unknown_names()]
    assert not found, "\n".join(found)


def test_the_reading_path_is_short() -> None:
    named = re.findall(r"^\d\. \[`([\w/.]+)`\]\(\.\./src/pdinfer/([\w/.]+)\)", READING, re.MULTILINE)
    table = re.findall(r"\| `([\w/]+\.py)` \|$", READING, re.MULTILINE)
    assert (len(named), len(table)) == (6, 5)
    assert not [f"{name} leads to {path}" for name, path in named if name != path]
    assert not [path for path in table if not (ROOT / "src/pdinfer" / path).is_file()]
    lines = sum(len((ROOT / "src/pdinfer" / path).read_text("utf-8").splitlines()) for _, path in named)
    assert lines < 1450


def test_a_decision_is_read_on_one_screen() -> None:
    records = {page: text.splitlines() for page, text in PAGES.items() if page.parent.name == "decisions"}
    assert len(records) > 50
    assert not [f"{page.name} has {len(lines)} lines" for page, lines in records.items() if len(lines) > 48]
