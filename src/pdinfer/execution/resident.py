"""Decode steps, whose batch stays on the device.

Rows go in only as far as they changed (`DecodeRows`); drafting, model, draw, acceptance and advance queue work and wait
for nothing; then the drawn tokens are read with one wait. The work in between is one launch where it was captured, and
on a CPU the model is the kernels that were recorded (`graphs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdinfer.execution.drafting import Draft, Drafter, HostDraws, Sampler, accepted
from pdinfer.execution.graphs import DecodeGraphs, Output
from pdinfer.execution.sampling import CONTROLS, Draw, Drawn, change_logits, control_values, kind_of, read_drawn, sample
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Batch, Row
from pdinfer.model.decode_rows import MAX_NEWEST, DecodeRows, Drafting
from pdinfer.model.model import Model
from pdinfer.process.memory import pinned_empty
from pdinfer.process.streams import record_event
from pdinfer.trace import Trace, mark, span
from pdinfer.types import SamplingParams

DRAWN_ELSEWHERE = SamplingParams(temperature=0.0)
"""The parameters of rows whose tokens another rank draws."""


class ResidentDecode:
    """The decode steps of one runner. `end_step` is called when the model has run."""

    def __init__(
        self, model: Model, memory: PageMemory, end_step: Callable[[], None], trace: Trace | None = None
    ) -> None:
        self._model = model
        self._draw = model.resolved.ops.draw
        self._view = KVView.of(memory)
        self._end_step = end_step
        self._trace = trace
        self._rows = DecodeRows(
            CONTROLS,
            control_values,
            page_size=memory.layout.page_size,
            device=model.device,
            scratch_page=memory.scratch_page,
        )
        self._drafter = None if model.mtp is None else Drafter(model, model.mtp, memory, self._rows, trace)
        self._num_drafts = 0
        self._width = -(-(model.config.max_position_embeddings + MAX_NEWEST) // memory.layout.page_size)
        self._results = torch.empty(0, dtype=torch.int32, device="cpu")
        self.while_waiting: Callable[[], None] | None = None
        """See `ModelRunner.do_while_waiting`."""
        self.graphs = DecodeGraphs(model.device, self._run_captured, self._logits, why_not_captured(model, trace))

    def order(self, rows: Sequence[Row]) -> list[int]:
        """Return the order in which a step runs these rows, so that other ranks can run them alike."""
        slots = self._rows.seat(rows)
        return sorted(range(len(rows)), key=slots.__getitem__)

    def decode(
        self,
        rows: Sequence[Row],
        draws: Sequence[Draw],
        drafts: Sequence[Draft],
        sampler: Sampler | None = None,
        *,
        num_passes: int = 0,
        on_host: bool = False,
    ) -> list[list[Drawn]]:
        """Run a step as `ModelRunner.decode` says. The host draws, and the step waits for it, where rows change their
        logits, here or `on_host` of another rank, and where a step is not captured and there is a `sampler`. The layer
        that drafts runs at least `num_passes` times."""
        mark(self._trace, "batch")
        slots = self._place(rows, draws, drafts)
        in_order = sorted(range(len(rows)), key=slots.__getitem__)
        draws = [draws[index] for index in in_order]
        drafts = [drafts[index] for index in in_order]
        on_host = on_host or change_logits(draws)
        if sampler is None and on_host:
            sampler = partial(sample, draw=self._draw)
        if self._drafter is None:
            drawn = self._decode(draws, sampler)
        else:
            drawn = self._decode_drafts(self._drafter, draws, drafts, sampler, num_passes, on_host=on_host)
        mark(self._trace, "emit")
        return [drawn[slot] for slot in slots]

    def _place(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[int]:
        owners = [draw.sampling for draw in draws]
        if self._drafter is None:
            return self._rows.place(rows, owners)
        if self._rows.is_broken_off:
            self._drafter.forget()
        self._drafter.seat(self._rows.seat(rows), drafts)
        drafting = []
        for draw, draft in zip(draws, drafts, strict=True):
            if not draft.num_newest:
                draft.num_tokens = 0
            drafting.append(Drafting(draft.newest(draw.output), draft.num_tokens))
        return self._rows.place(rows, owners, drafting)

    def _decode(self, draws: Sequence[Draw], sampler: Sampler | None) -> list[list[Drawn]]:
        kind = kind_of(draws)
        output = self._captured(len(draws), kind) or self._run(len(draws), kind)
        self._end_step()
        mark(self._trace, "sample")
        if sampler is not None:
            return [[new] for new in sampler(output.logits_TV, draws)]
        words = self._read(output.words, len(draws))[:, :, 0]
        drawn = [[new] for new in read_drawn(words, output.logits_TV, draws, {})]
        self._rows.advanced([[new.token] for (new,) in drawn])
        return drawn

    def _decode_drafts(
        self,
        drafter: Drafter,
        draws: Sequence[Draw],
        drafts: Sequence[Draft],
        sampler: Sampler | None,
        num_passes: int,
        *,
        on_host: bool,
    ) -> list[list[Drawn]]:
        """Run a step that drafts tokens and checks them."""
        kind, num_drafts = kind_of(draws), max((draft.num_tokens for draft in drafts), default=0)
        num_newest = max((draft.num_newest for draft in drafts), default=0)
        output = host = None
        if self.graphs.sizes and on_host:
            self.graphs.passed("the host draws, and drafts follow what it has drawn")
        elif self.graphs.sizes and (num_drafts > self._num_drafts or num_passes > self.captured_passes):
            self.graphs.passed(f"the largest captured number of drafts is {self._num_drafts}")
        else:
            output = self._captured(len(draws), kind)
        if output is None:
            if sampler is not None:
                host = HostDraws(sampler, draws, [draft.num_tokens for draft in drafts])
            output = self._run_drafts(
                drafter,
                len(draws),
                kind,
                num_newest=num_newest,
                num_drafts=num_drafts,
                num_passes=num_passes,
                host=host,
            )
        self._end_step()
        mark(self._trace, "sample")
        kept = self._read_drafts(output, draws) if host is None else host.kept
        for draft, new in zip(drafts, kept, strict=True):
            draft.num_newest = len(new) if draft.num_newest else 0
        self._rows.advanced([[new.token for new in row] for row in kept])
        return kept

    def follow(self, rows: Sequence[Row]) -> bool:
        """Run a captured step that drafts nothing, as the rank that leads does, in its order of rows. Its draws mean
        nothing here, and nobody waits for it. Return False, having run nothing, where none is captured for them."""
        if not self.graphs.sizes or not self.captures:
            return False
        self._rows.place(rows, [DRAWN_ELSEWHERE] * len(rows))
        return self.graphs.step(len(rows), DrawKind.GREEDY, self._rows.address) is not None

    @property
    def captured_passes(self) -> int:
        """How often the layer that drafts runs in a captured step, whatever its rows draft; 0 where none is captured.
        Ranks whose steps have fewer run it as often, so that all make the same exchanges."""
        return max(1, self._num_drafts) if self._drafter is not None and self.graphs.sizes else 0

    def _captured(self, num_rows: int, kind: DrawKind) -> Output | None:
        if self.graphs.refusal is not None:
            return None
        if self._model.device.type != "cpu":
            return self.graphs.step(num_rows, kind, self._rows.address)
        logits_BV = self.graphs.forward(num_rows, self._rows.address)
        return None if logits_BV is None else self._end(logits_BV, kind)

    def _run_captured(self, num_rows: int, kind: DrawKind) -> Output:
        if self._drafter is None:
            return self._run(num_rows, kind, padded=True)
        num_drafts = self._num_drafts
        return self._run_drafts(
            self._drafter, num_rows, kind, num_newest=1 + num_drafts, num_drafts=num_drafts, padded=True
        )

    def _run(self, num_rows: int, kind: DrawKind, *, padded: bool = False) -> Output:
        """Run one token of each of the first rows on the device, and draw the next. Waits for nothing."""
        _, logits_BV = self._forward(self._rows.batch(num_rows, padded=padded))
        return self._end(logits_BV, kind)

    def _logits(self, num_rows: int) -> Tensor:
        return self._forward(self._rows.batch(num_rows, padded=False))[1]

    def _end(self, logits_BV: Tensor, kind: DrawKind) -> Output:
        """Draw the next tokens of the first rows, and make them the newest."""
        num_rows = logits_BV.shape[0]
        controls = self._controls(num_rows, self._rows.column("context_len", num_rows))
        words = self._draw(logits_BV, logits_BV, controls, kind)
        self._rows.advance(words[0])
        return Output(words[:, :, None], logits_BV)

    def _run_drafts(
        self,
        drafter: Drafter,
        num_rows: int,
        kind: DrawKind,
        *,
        num_newest: int,
        num_drafts: int,
        num_passes: int = 0,
        padded: bool = False,
        host: HostDraws | None = None,
    ) -> Output:
        """Draft tokens after the first rows on the device, run them, and keep what is right. Waits for nothing, unless
        the `host` draws; then what it keeps is there alone. Ranks that share the rows take what the first one draws."""
        rows, num_queries = self._rows, 1 + num_drafts
        controls = self._controls(num_rows, rows.column("position", num_rows) + 1)
        share = self._model.groups.attention.broadcast

        def draw(logits_BV: Tensor, step: int) -> Tensor:
            if host is not None:
                return host.draft(logits_BV, step)
            return share(self._draw(logits_BV, logits_BV, controls.later(step), kind))[0].long()

        with span(self._trace, "draft"):
            drafted_BK = drafter.propose(num_rows, num_newest, num_drafts, draw, num_passes=num_passes, padded=padded)
        mark(self._trace, "batch")
        num_drafts_B = rows.column("num_drafts", num_rows)
        tokens_BQ = torch.cat((rows.column("token", num_rows)[:, None], drafted_BK), 1)
        batch = rows.batch(num_rows, tokens_BQ, num_live_B=num_drafts_B + 1, padded=padded)
        state_TD, logits_TV = self._forward(batch)
        drafter.keep(state_TD, num_queries)
        if host is not None:
            drawn_BQ, count_B = host.draw(logits_TV, num_queries)
            rows.advance_by(drawn_BQ, count_B)
            return Output(drawn_BQ.new_empty(0), logits_TV)
        drawn = share(self._draw(logits_TV, logits_TV, controls.repeated(num_queries), kind))
        words = drawn.view(3, num_rows, num_queries)
        is_right_BQ = words[2].view(torch.float32).isfinite()
        count_B = accepted(words[0], is_right_BQ, drafted_BK, num_drafts_B)
        rows.advance_by(words[0], count_B)
        return Output(torch.cat((words, count_B.int()[None, :, None].expand(1, -1, num_queries))), logits_TV)

    def _controls(self, num_rows: int, position_B: Tensor) -> Controls:
        columns = {f"{name}_B": self._rows.column(name, num_rows) for name in CONTROLS}
        return Controls(position_B=position_B, **columns)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states of all tokens, after the final norm, and their logits."""
        state_TD = self._model.norm(self._model.forward(batch, self._view, self._trace))
        mark(self._trace, "head")
        logits_TV = self._model.head(state_TD)
        mark(self._trace, "sample")
        return state_TD, logits_TV

    def _read_drafts(self, output: Output, draws: Sequence[Draw]) -> list[list[Drawn]]:
        words = self._read(output.words, len(draws))
        num_queries = words.shape[2]
        each = [draw for draw in draws for _ in range(num_queries)]
        drawn = read_drawn(words[:3].reshape(3, -1), output.logits_TV, each, {})
        counts = words[3, :, 0].tolist()
        return [drawn[row * num_queries : row * num_queries + count] for row, count in enumerate(counts)]

    def _read(self, words: Tensor, num_rows: int) -> npt.NDArray[np.int32]:
        """Return the result of the first rows on the host: the one wait of a step. NumPy slices it in a tenth of the
        time that torch takes."""
        if self._model.device.type == "cpu":
            return words.numpy()[:, :num_rows]
        if self._results.numel() < words.numel():
            self._results = pinned_empty(8 * words.nbytes, self._model.device).view(torch.int32)
        host = self._results[: words.numel()].view(words.shape)
        host.copy_(words, non_blocking=True)
        event = record_event(self._model.device)
        if self.while_waiting is not None:
            mark(self._trace, "schedule")
            self.while_waiting()
            mark(self._trace, "sample")
        if event is not None:
            event.synchronize()
        return host.numpy()[:, :num_rows]

    @property
    def captures(self) -> bool:
        """Whether steps can be captured before they come; a CPU records them when they do."""
        return self.graphs.refusal is None and self._model.device.type != "cpu"

    def capture(self, sizes: Sequence[int], most_rows: int, *, num_drafts: int = 0) -> Iterator[int]:
        """Capture decode steps of these numbers of rows, the largest first, and yield each once that is done. Steps
        will have at most `most_rows`, and draft at most `num_drafts` tokens. Yields nothing where steps cannot be
        captured, see `captures`."""
        if not self.captures:
            return
        mark(self._trace, "capture")
        self._num_drafts = num_drafts
        most_rows = max(most_rows, *sizes, 1)
        self._rows.reserve(most_rows, self._width)
        if self._drafter is not None:
            self._drafter.reserve(most_rows)
        self._rows.place([], [])
        for size in sorted(sizes, reverse=True):
            self.graphs.capture(size, self._rows.address)
            yield size


def why_not_captured(model: Model, trace: Trace | None = None) -> str | None:
    """Return why steps of the model cannot be captured, or None. Ranks that share experts but no batch replay each its
    own size: their dispatcher takes part in every step, with whatever rows there are."""
    if model.device.type == "cpu":
        if ("mla_decode", "native") not in ((choice.op, choice.provider) for choice in model.resolved.choices):
            return "a CPU launches nothing, and records the steps of the kernels in C alone"
        if model.mtp is not None:
            return "steps that draft are not recorded on a CPU"
        if trace is not None:
            return "the parts of each step are in a timeline (`EngineConfig.trace`)"
    if not model.groups.attention.graph_safe(model.device):
        return "ranks that share a batch meet on the host (gloo): only collectives of NCCL can be captured"
    if not model.experts.dispatcher.graph_safe:
        return f"the dispatcher {type(model.experts.dispatcher).__name__} waits for the device"
    return None
