"""Decode steps that were captured: one launch in place of hundreds.

A captured step reads and writes the memory that it used when it was captured: the slots of `DecodeRows`, the weights
and the pages stay where they are, and what differs from step to step lies there as data. A step takes the next larger
size. Its padding rows go to no expert, write to the scratch page, and their tokens are not read.

On a CPU nothing is launched, but what Python does between kernels takes its time too. There the layers of a step are
recorded when its size comes for the second time, without padding, and run as they were recorded from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.draws import DrawKind
from pdinfer.process.memory import device_memory
from pdinfer.process.recording import Recording
from pdinfer.process.streams import Graph, capture, new_stream

KINDS = (DrawKind.GREEDY, DrawKind.FILTERED)
"""The kinds of draws that are captured. A random draw runs as a filtered one that keeps all."""
MAX_RECORDED_ROWS = 64
"""The largest number of sequences whose steps are recorded on a CPU. Beyond it kernels take nearly all of a step."""
MAX_RECORDED_BYTES = 256 << 20
"""The memory that recorded steps may keep. The one that ran longest ago goes first."""


@attrs.frozen
class Output:
    """What a step leaves on the device. `words` int32 [3, B, Q] is what the op `draw` returns, with padding rows; steps
    that draft have a fourth plane, how many tokens of each row count. `logits_TV` are the raw logits of the tokens."""

    words: Tensor
    logits_TV: Tensor


_Key = tuple[int, int]
"""What a recording is for: so many rows, and the number of threads."""


@attrs.frozen
class _Captured:
    graph: Graph
    output: Output


@attrs.frozen
class _Recorded:
    recording: Recording
    logits_BV: Tensor


@attrs.define(eq=False, repr=False, slots=False)  # benchmarks watch its steps
class DecodeGraphs:
    """The captured steps of one runner, and those recorded on a CPU. `run` runs a step of so many rows, the last of
    which may be padding, and waits for nothing. `forward` is the part of it that is recorded: the model alone, whose
    logits are [B, V]."""

    _device: torch.device
    _run: Callable[[int, DrawKind], Output]
    _forward: Callable[[int], Tensor]
    refusal: str | None = None
    """Why nothing can be captured, or None."""
    num_steps: Counter[str] = attrs.field(factory=Counter)
    """How many steps ran as a graph, under "", and how many did not, by the reason."""
    asked: frozenset[int] | None = None
    """The numbers of rows that a CPU records, or None for all up to MAX_RECORDED_ROWS."""
    _captured: dict[tuple[int, DrawKind], _Captured] = attrs.field(factory=dict)
    _captured_bytes: int = 0
    _recorded: dict[_Key, _Recorded] = attrs.field(factory=dict)
    _seen: dict[_Key, str] = attrs.field(factory=dict)  # why those that came are not recorded; "" where they are
    _pool: object = None
    _stream: torch.Stream | None = None
    _address: int = 0

    @property
    def num_bytes(self) -> int:
        """The memory that the captured steps keep beside weights and pages."""
        return self._captured_bytes + sum(each.recording.num_bytes for each in self._recorded.values())

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that were captured, ascending."""
        return sorted({size for size, *_ in (*self._captured, *self._recorded)})

    def capture(self, size: int, address: int) -> None:
        """Capture steps of `size` rows that lie at `address`. The largest size comes first, so that the others find
        room in its memory."""
        self._address = address
        before = device_memory(self._device).in_use
        self._stream = self._stream or new_stream(self._device)
        assert self._stream is not None  # a CPU records steps, and captures none
        for kind in KINDS:
            self._run(size, kind)  # what a first use allocates, compiles or tunes cannot be captured
            outputs: list[Output] = []
            graph = capture(partial(self._keep, outputs, size, kind), self._stream, self._pool)
            self._pool = self._pool or graph.pool()
            self._captured[size, kind] = _Captured(graph, outputs[0])
        self._captured_bytes += max(0, device_memory(self._device).in_use - before)

    def _keep(self, outputs: list[Output], size: int, kind: DrawKind) -> None:
        outputs.append(self._run(size, kind))

    def step(self, num_rows: int, kind: DrawKind, address: int) -> Output | None:
        """Run a step of the first `num_rows` rows at `address`. Return None, having run nothing, when no captured size
        is as large, or the rows have moved since."""
        if self._captured and address != self._address:
            self.passed("the rows of the batch have moved since they were captured")
            return None
        size = next((size for size in self.sizes if size >= num_rows), None)
        if size is None:
            largest = max(self.sizes, default=0)
            self.passed(f"the largest captured number of sequences is {largest}")
            return None
        self.num_steps[""] += 1
        captured = self._captured[size, min(each for each in KINDS if each >= kind)]
        captured.graph.replay()
        words = captured.output.words
        return Output(words, captured.output.logits_TV[: num_rows * words.shape[2]])

    def forward(self, num_rows: int, address: int) -> Tensor | None:
        """Run the model on the first `num_rows` rows at `address`, on a CPU. Return None, having run nothing, where it
        is not recorded: the first time of a number returns None, and the second is recorded."""
        if address != self._address:  # recordings hold the places where the rows were
            self._recorded.clear()
            self._address = address
        key = num_rows, torch.get_num_threads()
        recorded = self._recorded.pop(key, None)
        if recorded is not None:
            self._recorded[key] = recorded  # now the last to go
            recorded.recording.replay()
            self.num_steps[""] += 1
            return recorded.logits_BV
        reason = self._seen.get(key)
        if reason is None:
            is_recorded = num_rows <= MAX_RECORDED_ROWS and (self.asked is None or num_rows in self.asked)
            self._seen[key] = "" if is_recorded else "steps of as many sequences are not recorded"
            reason = self._seen[key] or "it was the first of its size"
        if reason:
            self.passed(reason)
            return None
        return self._record(key)

    def _record(self, key: _Key) -> Tensor:
        logits: list[Tensor] = []
        recording = Recording.of(lambda: logits.append(self._forward(key[0])))
        if recording.refusal is not None:
            self._seen[key] = recording.refusal
        elif recording.num_bytes > MAX_RECORDED_BYTES:
            self._seen[key] = f"its recording would keep {recording.num_bytes} bytes"
        else:
            self._recorded[key] = _Recorded(recording, logits[0])
        self.passed(self._seen[key] or "it was being recorded")
        while self.num_bytes > MAX_RECORDED_BYTES:
            oldest = next(iter(self._recorded))
            del self._recorded[oldest], self._seen[oldest]  # it must come twice again: many sizes may take turns
        return logits[0]

    def passed(self, reason: str) -> None:
        """Count a step that does not run captured."""
        self.num_steps[reason] += 1

    def __str__(self) -> str:
        """Return sentences on what was captured, its bytes, and why steps ran without a graph."""
        if self.refusal is not None:
            return f"no decode step is captured: {self.refusal}"
        none = (
            "none; a CPU records steps as they come" if self._device.type == "cpu" else "none; `warm_up` captures them"
        )
        sizes = ", ".join(map(str, self.sizes)) or none
        lines = [f"captured numbers of sequences: {sizes}", f"memory of the captured steps: {self.num_bytes} bytes"]
        lines.append(f"steps that ran captured: {self.num_steps['']}")
        lines += [f"steps that did not: {count}, {reason}" for reason, count in self.num_steps.items() if reason]
        return "\n".join(lines)
