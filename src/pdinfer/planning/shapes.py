"""The names of clusters, which mean one thing wherever one is named: in profiles, plans and simulations.

4P9D      xPyD: 4 prefill engines and 9 decode engines, each on a node
P4D9      a prefill engine of 4 nodes and a decode engine of 9
P3x3D4    3 prefill engines of 3 nodes each and a decode engine of 4
"""

from __future__ import annotations

import re

from pdinfer.checks import clip
from pdinfer.errors import ConfigError

MAX_ENGINES = 1024
"""The engines of one side."""
_COUNTS = re.compile(r"([1-9]\d{0,3})P([1-9]\d{0,3})D", re.ASCII)
_NODES = re.compile(r"P(?:([1-9]\d{0,3})x)?([1-9]\d?)D(?:([1-9]\d{0,3})x)?([1-9]\d?)", re.ASCII)


def engine_nodes(shape: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the nodes of each prefill engine and of each decode engine of a cluster: ((3, 3, 3), (4,)) for "P3x3D4".
    Raises ConfigError for other text, and for more engines than MAX_ENGINES on one side."""
    text = shape if isinstance(shape, str) else ""
    if counts := _COUNTS.fullmatch(text):
        prefills, decodes, prefill_nodes, decode_nodes = *map(int, counts.groups()), 1, 1
    elif nodes := _NODES.fullmatch(text):
        prefills, prefill_nodes, decodes, decode_nodes = (int(number or 1) for number in nodes.groups())
    else:
        prefills = decodes = 0
    if not 0 < max(prefills, decodes) <= MAX_ENGINES:
        raise ConfigError(
            'a cluster is named like "4P9D" (4 prefills and 9 decodes), "P4D9" (one of 4 nodes and one of 9) or '
            f'"P3x3D4" (3 of 3 nodes and one of 4), with at most {MAX_ENGINES} engines on a side, got {clip(shape)}'
        )
    return (prefill_nodes,) * prefills, (decode_nodes,) * decodes
