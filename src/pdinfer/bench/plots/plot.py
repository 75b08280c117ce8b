"""The value that every plot is: columns of one length, notes about what they leave out, and a way to draw them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from pdinfer.bench.record import Record
from pdinfer.bench.summary import Summary
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.files import writing
from pdinfer.values import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]
Painter = Callable[[Columns, Sequence["Axes"]], None]
Item = TypeVar("Item")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which people with colour blindness can distinguish, without the yellow that white
swallows."""
LINES = ("-", "--", "-.", ":")
"""Patterns of lines, for when the colours are used up."""
GREY = "#767676"
WIDTH_IN, PANEL_IN = 6.4, 2.8

ALWAYS = {
    "svg.hashsalt": "pdinfer",  # ids in the file are else random
    "svg.fonttype": "none",  # text stays text: small files that can be searched and compared
    "text.parse_math": False,  # a dollar in a name is a dollar
}
LOOKS = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "font.size": 9,
}
UNDATED: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".png": {"Software": None},
}
"""By suffix, what would change from one day, or one version of matplotlib, to the next."""


def _arrays(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(column) for name, column in columns.items()}


@attrs.frozen(kw_only=True, eq=False)
class Plot(Value):
    """The content of a plot. `columns` are arrays of one length, finite, with their unit in the name. `notes` say what
    a reader has to know: requests that did not complete, runs without the figures, checks that failed. They are drawn,
    too. Raises ConfigError for columns of two lengths and for NaN."""

    columns: Columns = attrs.field(converter=_arrays)
    notes: tuple[str, ...] = ()
    num_panels: int = 1
    _paint: Painter

    def __attrs_post_init__(self) -> None:
        """Refuse columns that do not make a table."""
        if len({column.shape for column in self.columns.values()}) > 1:
            raise ConfigError(f"columns must have one length, got { {n: c.shape for n, c in self.columns.items()} }")
        for name, column in self.columns.items():
            if np.issubdtype(column.dtype, np.floating) and not np.isfinite(column).all():
                raise ConfigError(f"column {name} has values that are not finite; leave their rows out")

    def draw(self, path: str | Path | None = None, *, axes: Axes | Sequence[Axes] | None = None) -> Figure:
        """Draw, and return matplotlib's figure. With a `path`, write it there; its suffix says the format (svg, png,
        pdf), and equal columns give equal bytes. With `axes`, draw into those, one per panel, instead of a new figure.

        Raises BackendUnavailable without matplotlib, ConfigError for another number of axes, a suffix that matplotlib
        does not write and a path that cannot be written."""
        matplotlib = _matplotlib()
        with ExitStack() as stack:
            stack.enter_context(matplotlib.style.context(ALWAYS if axes is not None else ["default", LOOKS, ALWAYS]))
            panels = self._panels(matplotlib) if axes is None else list(np.ravel(np.array(axes, dtype=object)))
            if len(panels) != self.num_panels:
                raise ConfigError(f"this plot has {self.num_panels} panels, got {len(panels)} axes")
            self._paint(self.columns, panels)
            if self.notes:
                lines = [line for note in self.notes for line in textwrap.wrap(note, 100)]
                panels[0].set_title("\n".join(lines), loc="left", fontsize="small")
            figure: Figure = panels[0].figure
            if path is not None:
                _write(figure, Path(path))
        return figure

    def _panels(self, matplotlib: Any) -> list[Axes]:
        """Return the panels of a new figure, below each other. No window and no state of pyplot is touched."""
        size = (WIDTH_IN, 0.8 + PANEL_IN * self.num_panels)
        figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        return list(figure.subplots(self.num_panels, sharex=True, squeeze=False).ravel())


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.style
    except ImportError as error:
        raise BackendUnavailable(
            f"plots are drawn by matplotlib, which cannot be imported ({error}): pip install 'pdinfer[plot]'; the "
            "columns of a plot need no library"
        ) from error
    return matplotlib


def _write(figure: Figure, path: Path) -> None:
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ConfigError(f"a plot cannot be written to {path}: its suffix must be one of {', '.join(sorted(formats))}")
    with writing(path):
        figure.savefig(path, metadata=UNDATED.get(path.suffix.lower()))


def table(kinds: Mapping[str, type], rows: Sequence[tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Return columns of the given types. Without rows they are empty."""
    return {name: np.array([row[at] for row in rows], dtype=kind) for at, (name, kind) in enumerate(kinds.items())}


def by_name(runs: Any, kind: type[Item]) -> dict[str, list[Item]]:
    """Return the items of each run; those of a single run have the name "". Raise ConfigError for other things."""
    named = runs if isinstance(runs, Mapping) else {"": runs}
    found = {}
    for name, items in named.items():
        listed = list(items) if isinstance(items, Iterable) else [items]
        for item in listed:
            if not isinstance(item, kind):
                advice = "bench.run(..., on_record=records.append) keeps them"
                raise ConfigError(
                    f"this plot takes {kind.__name__} values, or a mapping from names to them, got a "
                    f"{type(item).__name__}; {advice if kind is Record else 'bench.run and bench.summarize make them'}"
                )
        found[str(name)] = listed
    return found


def are_known(*values: float | None) -> bool:
    """Return whether every value is there and finite."""
    return all(value is not None and math.isfinite(value) for value in values)


def titled(name: str, sentence: str) -> str:
    """Return a note about a run, with its name if it has one."""
    return f"{name}: {sentence}" if name else sentence


def failed_checks(name: str, summaries: Sequence[Summary]) -> list[str]:
    """Return the notes about the checks that some summaries of a run failed."""
    checks = dict.fromkeys(finding.check for summary in summaries for finding in summary.findings)
    return [titled(name, f"failed checks: {', '.join(checks)}")] if checks else []


def groups(columns: Columns, key: str) -> Iterator[tuple[str, Columns]]:
    """Yield each value of a column, in the order of the rows, with its rows."""
    for name in dict.fromkeys(columns[key].tolist()):
        yield name, {column: values[columns[key] == name] for column, values in columns.items()}


def look(at: int) -> dict[str, Any]:
    """Return the colour and the pattern of the line number `at`."""
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": LINES[at // len(COLOURS) % len(LINES)]}


def log_scale(panel: Axes, axes: str, values: np.ndarray) -> None:
    """Make the axes "x", "y" or "xy" of a panel logarithmic, about values above 0, with ticks at 1, 2, 5, 10, ..."""
    from matplotlib.ticker import LogLocator, NullLocator

    positive = values[values > 0]
    low, high = positive.min(initial=np.inf), positive.max(initial=0.0)
    for name in axes if high > 0 else "":
        axis = getattr(panel, f"{name}axis")
        panel.set(**{f"{name}scale": "log", f"{name}lim": (low / 1.6, high * 1.6)})  # wide enough for a tick
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def legend(panel: Axes) -> None:
    """Name what a panel shows, if it has names."""
    if panel.get_legend_handles_labels()[1]:
        panel.legend(fontsize="small")
