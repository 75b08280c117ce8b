"""From the load of experts to their placement: DeepSeek's EPLB under its own names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pdinfer.checks import check_int, clip, is_int, typed
from pdinfer.errors import ConfigError
from pdinfer.moe.placement.placement import MAX_EXPERTS, Floats, Ints, table_of

FLOAT32_EXPONENT = 110
"""A sum of MAX_EXPERTS = 2^16 loads below 2^110 fits float32, whose exponents end at 128. A lower exponent would leave
less room below."""
LEAST_LOAD = 2.0**-900
"""The least load that is kept. Any part of it is a float64 of full precision."""


def check_load(load: Any) -> Floats:
    """Return the load of experts as float64 [layers, experts].

    `load` is nested lists, an array, or a tensor on the host. It holds counts or any other measure, as only the
    proportions within a layer matter. Raises ConfigError for another shape, and for a load that is NaN, negative, or
    infinite as a float64; the text names layer and expert."""
    table = table_of("load", load, "iufO", "experts")
    huge = table.dtype.kind == "O"  # ints beyond 64 bits
    if huge and not all(map(is_int, table.flat)):
        raise ConfigError(f"load must be a table of numbers, got {clip(load)}")
    floats = np.vectorize(_as_float, otypes=[np.float64])(table) if huge else table.astype(np.float64)
    if (bad := np.argwhere(~(np.isfinite(floats) & (floats >= 0)))).size:
        layer, expert = bad[0]
        load_there = clip(table.item(layer, expert))
        raise ConfigError(f"layer {layer}, expert {expert} has load {load_there}; loads are finite and not negative")
    return floats


def _as_float(value: int) -> float:
    """Return an int of any size as a float, infinite beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def scaled(load_LE: Floats, exponent: int) -> Floats:
    """Return each layer's loads times the power of two that brings the highest into [2^(exponent - 1), 2^exponent).

    What is then below LEAST_LOAD is too far from the highest to change anything, and becomes 0."""
    _, highest = np.frexp(load_LE.max(1, keepdims=True))
    scaled_LE = np.ldexp(load_LE, exponent - highest)
    return np.where(scaled_LE < LEAST_LOAD, 0.0, scaled_LE)


def check_divides(what: str, total: int, over: str, size: int) -> None:
    """Raise ConfigError, with both values, where `total` cannot be divided evenly."""
    if total % size:
        raise ConfigError(f"{what} {total} cannot be divided evenly over {over} {size}")


@typed
def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Ints, Ints, Ints]:
    """Run DeepSeek's expert-parallelism load balancer: its arguments, its policies, its results.

    `weight` [layers, experts] is the load of each expert, as `check_load` takes it. Arithmetic is in float32, on loads
    times a power of two, so that no sum overflows; results are the same as without it. Where `num_groups` divides
    evenly over `num_nodes`, groups are packed onto nodes and experts are replicated within their node (hierarchical).
    Otherwise nodes and groups are ignored (global). Returns phy2log [L, num_replicas], log2phy [L, E, most copies]
    padded with -1, and logcnt [L, E], all int64. Two copies may land on one GPU, which `solve_placement` avoids. Raises
    ConfigError for sizes that do not divide and loads that `check_load` refuses.

    Source: https://github.com/deepseek-ai/EPLB, whose example is among our tests."""
    load_LE = scaled(check_load(weight), FLOAT32_EXPONENT).astype(np.float32)
    num_layers, num_experts = load_LE.shape
    sizes = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    for name, value in sizes.items():
        check_int(name, value, 1, MAX_EXPERTS)
    check_divides("num_replicas", num_replicas, "num_gpus", num_gpus)
    check_divides("num_gpus", num_gpus, "num_nodes", num_nodes)
    check_divides("experts", num_experts, "num_groups", num_groups)
    if num_replicas < num_experts:
        raise ConfigError(
            f"num_replicas {num_replicas} is less than the {num_experts} experts, which need one slot each"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = num_experts // num_groups
    groups = _pack_greedily(load_LE.reshape(num_layers, num_groups, size).sum(2), num_nodes)
    of_node = (groups[:, :, None] * size + np.arange(size)).reshape(num_layers, num_nodes, -1)
    node_load = np.take_along_axis(load_LE[:, None], of_node, 2).reshape(num_layers * num_nodes, -1)
    experts, nth, counts = _replicas(node_load, num_replicas // num_nodes)
    per_copy = np.take_along_axis(node_load / counts, experts, 1)
    copies = _pack_greedily(per_copy, num_gpus // num_nodes)
    inside, nth = (np.take_along_axis(of_copy, copies, 1) for of_copy in (experts, nth))
    phy2log = np.take_along_axis(of_node, inside.reshape(num_layers, num_nodes, -1), 2).reshape(num_layers, -1)
    logcnt = np.empty((num_layers, num_experts), np.int64)
    np.put_along_axis(logcnt, of_node.reshape(num_layers, -1), counts.reshape(num_layers, -1), 1)
    log2phy = np.full((num_layers, num_experts, int(logcnt.max())), -1, np.int64)
    log2phy[np.arange(num_layers)[:, None], phy2log, nth.reshape(phy2log.shape)] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt


def _replicas(load_LE: Any, num_slots: int) -> tuple[Ints, Ints, Ints]:
    """Return every expert once, in order, then repeatedly the one with the highest load per copy.

    The results are the expert of each copy and the number of this copy, both [L, num_slots], and how many copies each
    expert has, [L, E]."""
    num_layers, num_experts = load_LE.shape
    rows = np.arange(num_layers)
    experts = np.tile(np.arange(num_slots), (num_layers, 1))
    nth = np.zeros_like(experts)
    counts = np.ones(load_LE.shape, np.int64)
    per_copy = load_LE.copy()
    for copy in range(num_experts, num_slots):
        expert = per_copy.argmax(1)
        experts[:, copy], nth[:, copy] = expert, counts[rows, expert]
        counts[rows, expert] += 1
        per_copy[rows, expert] = load_LE[rows, expert] / counts[rows, expert].astype(load_LE.dtype)
    return experts, nth, counts


def _pack_greedily(weight: Any, num_packs: int) -> Ints:
    """Deal items to packs of one size, heaviest first, each to the lightest pack with room.

    Returns the items pack by pack, in the order in which they were dealt: [L, items]."""
    num_layers, num_items = weight.shape
    size = num_items // num_packs
    if size == 1:
        return np.tile(np.arange(num_items), (num_layers, 1))
    rows = np.arange(num_layers)
    packs = np.empty((num_layers, num_packs, size), np.int64)
    load, used = np.zeros((num_layers, num_packs), weight.dtype), np.zeros((num_layers, num_packs), np.int64)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        chosen = np.where(used < size, load, np.inf).argmin(1)
        packs[rows, chosen, used[rows, chosen]] = item
        load[rows, chosen] += weight[rows, item]
        used[rows, chosen] += 1
    return packs.reshape(num_layers, num_items)
