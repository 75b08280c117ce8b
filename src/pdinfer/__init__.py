"""Disaggregated LLM inference to embed: prefill and decode as two objects that hand paged KV to each other.

Start with `pairing/pairing.py`, and follow one request down. Modules import downwards only, from the top:

    __init__      The names that hosts use.
    testing/      Tests get tiny models, virtual time and a network that fails on demand.
    planning/     A plan of many engines is checked, and a load is run through simulated ones, without a device.
    diagnosis/    A machine is examined before anything runs on it.
    metrics/      A service shows what it does: metrics for Prometheus, and spans for OpenTelemetry.
    bench/        A load is sent, every request is recorded, and the figures are checked.
    aio           Coroutines read the events of a Pairing that a thread steps.
    pairing/      A Pairing chooses a prefill and a decode for each request, and copes when one of them is lost.
    text/         Tokens come from text and from chats, text comes from tokens, and stop strings end it.
    remote/       An engine in another process takes part in a Pairing like one that is here.
    engine/       An engine decides which requests enter, what runs in this step, and which one gives way.
    execution/    One step runs on one rank: rows go in, tokens come out.
    model/        The network turns tokens into hidden states, and reads and writes pages through a view.
    moe/          Experts are placed on ranks, tokens are routed to them, and they move while engines run.
    checkpoint/   The files of a model folder are read without trust, and written shard by shard.
    layers        Linear maps, norms, the gated MLP and rotary angles are the smallest parts of a model.
    scheduling/   What engines decide stands here once: real engines obey it, and simulated ones too.
    kv/           Pages of the cache have a layout, an owner, and channels that carry them between engines.
    config/       The host's choices and the model's architecture are checked and frozen.
    parallel/     Ranks are divided into groups, which act together.
    kernels/      Ops compute on tensors, and for each of them the best provider here is chosen.
    files         Files are read as if nobody vouched for them.
    trace         A profile on demand shows what the steps of an engine spend their time on.
    inbox         Any thread puts items into a box, and the one that steps takes them out.
    stats         Engines, channels and Pairings tell their loads and counts by value.
    identity      Weights are compared by digests, and the tensors that differ are found.
    progress      Long work tells how far it is: to a function, or in a line on stderr.
    types         Requests, grants, hand-offs and events are the values that travel.
    process/      Forks, locks, memory and temporary folders belong to the process around an engine.
    stop          A matcher says where a request has to stop, and an automaton finds sequences in a stream.
    checks        Public names share these checks of ranges, sizes, token ids and kinds of arguments.
    bounds        Each value that a peer sends has a bound, which stands in its type.
    values        A value is shown in one short line or a table, or becomes plain data.
    errors        Every error that is raised on purpose has a class and a stable code.

`kv` moves bytes and `kernels` computes; neither knows of the other."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path


def _homes() -> dict[str, str]:
    """Return the module of each public name, from the stub. A module is imported when a name of it is first used, so
    that `import pdinfer` costs nothing and a program pays only for the parts that it uses."""
    homes: dict[str, str] = {}
    home = ""
    for line in Path(__file__).with_suffix(".pyi").read_text("utf-8").splitlines():
        home = line.split()[1] if line.startswith("from ") else home
        homes |= dict.fromkeys(re.findall(r"(\w+) as \1\b", line), home)
    return homes


_HOMES = _homes()
__all__ = sorted(_HOMES)  # noqa: PLE0605 - type checkers read the stub


def _version() -> str:
    """Return the version of what is installed; "0+checkout" for sources that were not installed."""
    from importlib import metadata

    try:
        return metadata.version("pdinfer")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def __getattr__(name: str) -> object:
    if name in _HOMES:
        home = vars(importlib.import_module(_HOMES[name]))
        value = home[name] if name in home else importlib.import_module(f"{_HOMES[name]}.{name}")
    elif name == "__version__":
        value = _version()
    elif not name.startswith("_") and importlib.util.find_spec(f"pdinfer.{name}") is not None:
        return importlib.import_module(f"pdinfer.{name}")
    else:
        raise AttributeError(f"module 'pdinfer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


logging.getLogger("pdinfer").addHandler(logging.NullHandler())
