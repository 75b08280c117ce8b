"""The prefill engine: prompts in, latents pushed layer by layer, one hand-off for each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from pdinfer.bounds import cause
from pdinfer.checks import typed
from pdinfer.config import EngineConfig
from pdinfer.engine.engine import Engine, brief_fields, full_fields
from pdinfer.engine.page_tables import PromptTables
from pdinfer.engine.ranks.leader import empty_prefill
from pdinfer.engine.sequence import Cancel, Prompt, SubmitPrefill
from pdinfer.engine.shown import PrefillSnapshot, PromptSnapshot, show_prompt, show_sent
from pdinfer.errors import PDInferError, RankLost, RequestError, TransferError
from pdinfer.execution.sampling import Draw, Drawn, make_processor
from pdinfer.execution.warm_up import WarmUpRun
from pdinfer.kv.pool import Held
from pdinfer.log import log
from pdinfer.model.batch import Row
from pdinfer.model.model import Model
from pdinfer.scheduling.admission import check_request
from pdinfer.scheduling.prefill import PrefillScheduler
from pdinfer.scheduling.rules import largest_prefill_step
from pdinfer.stats import PrefillCost, PrefillLoad, QueuedSizes
from pdinfer.trace import mark
from pdinfer.types import Handoff, HandoffStatus, NamedState, PageGrant, Request


def _check_steps(model: Model, config: EngineConfig) -> None:
    largest = largest_prefill_step(config, model.config.max_position_embeddings)
    model.experts.check_step(*largest, tp_size=model.topology.tp_size)


class PrefillEngine(Engine[SubmitPrefill]):
    """Runs prompts in chunks over the pages of its `pool`, and pushes each layer as soon as it is finished.

    It ends no request. A prompt that fails or is cancelled here becomes an ABORTED hand-off, and decode decides. A
    `PrefillScheduler` decides what runs; the engine obeys with pages, a channel and a runner."""

    role = "prefill"
    _check_steps = staticmethod(_check_steps)
    _run_empty = staticmethod(empty_prefill)
    _warm_up = staticmethod(WarmUpRun.prefill)

    def _prepare(self) -> None:
        self.channel.window_bytes = self.config.send_window_bytes
        self._tables = PromptTables(self.pool, self._channel, num_withheld=self._num_withheld)
        self._scheduler: PrefillScheduler[Prompt] = PrefillScheduler(self._tables, self.config, self._clock)
        self._sending: list[Prompt] = []
        self._decoding_s: Callable[[], float | None] | None = None

    @property
    def num_unfinished(self) -> int:
        """How many prompts have no hand-off yet or have bytes that have not left."""
        return len(self._scheduler.unfinished) + len(self._sending) + len(self._inbox.peek())

    @property
    def request_ids(self) -> list[str]:
        """The ids of the prompts without a hand-off."""
        return [prompt.request.request_id or "" for prompt in self._scheduler.unfinished]

    @typed
    def submit(self, request: Request, grant: PageGrant) -> None:
        """Queue a prompt for which decode has granted pages."""
        self._put(SubmitPrefill(request, grant))

    @typed
    def take_turns(self, decoding_s: Callable[[], float | None] | None) -> None:
        """Say what the thread that steps this engine decodes between its steps: `decoding_s` returns how many seconds
        that will take, or None when nothing is to decode, and is asked before each chunk. Then chunks keep to
        `EngineConfig.target_itl_s`. A Pairing says this of the engines in its process. None takes it back."""
        self._decoding_s = decoding_s

    def _step(self) -> None:
        """Take what came, run one chunk, and hand off what it finished. No events come of it (see `DecodeEngine`)."""
        if self.closed:
            self._inbox.take()  # decode has taken the rooms back with the link
            return
        self._take_inbox()
        for room, error in self._channel.poll_stops():
            self._abort([prompt for prompt in self._scheduler.unfinished if prompt.grant.room == room], error)
        self._return_pages()
        self._admit()
        if chunk := self._scheduler.plan(self._decoding_s() if self._decoding_s and self._scheduler.active else None):
            self._run(*zip(*chunk, strict=True))
        else:
            self._runner.idle()

    def load(self) -> PrefillLoad:
        """Return what this engine has to do. That includes requests that no step has seen yet."""
        return attrs.evolve(self._make_brief_load(), **full_fields(self.model, self.channel, self._rebalancing))

    def _make_brief_load(self) -> PrefillLoad:
        unseen = [command.request for command in self._inbox.peek() if isinstance(command, SubmitPrefill)]
        new = [len(request.prompt) + len(request.output) for request in unseen]
        queued, active = list(self._scheduler.queue), list(self._scheduler.active)
        remaining = [prompt.num_remaining for prompt in (*queued, *active)]
        missing = [prompt.num_tokens - prompt.num_found for prompt in queued]
        (step_s, token_s), chunk = self._scheduler.costs.weights, max(0, self.config.chunked_prefill_size)
        return PrefillLoad(
            **brief_fields(self.address, self.pool, self._tables, self._scheduler.costs),
            num_queued_requests=len(remaining) + len(new),
            num_queued_tokens=sum(remaining) + sum(new),
            unsent_bytes=self.channel.sender.pushes.unsent_bytes,
            queued=QueuedSizes.of([*new, *missing, *remaining[len(queued) :]]),
            cost=PrefillCost(step_s=step_s, token_s=token_s, chunk_tokens=chunk or self.config.max_prefill_tokens),
        )

    def snapshot(self) -> PrefillSnapshot:
        """Return what this engine holds at this moment, for finding faults."""
        lines = self._scheduler.queue, self._scheduler.active, self._sending
        queued, active, sending = (tuple(map(PromptSnapshot.of, line)) for line in lines)
        return PrefillSnapshot(queued=queued, active=active, sending=sending)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        if self.closed:
            return False
        return bool(self._scheduler.active) or self._scheduler.next() is not None or self._sleep(timeout_s)

    def _close(self) -> None:
        """Abort what is unfinished and close the channel."""
        self._take_inbox()
        self._abort(self._scheduler.unfinished, TransferError("the prefill engine was closed"))
        self._channel.drain(1.0)
        self._channel.close()
        self._return_pages()

    def _held(self) -> Held:
        return [page for prompt in (*self._scheduler.active, *self._sending) for page in prompt.held], []

    def _drop(self, error: PDInferError) -> None:
        self._sending = []
        self._scheduler.clear()

    def _take_inbox(self) -> None:
        for command in self._arrivals_in_order():
            match command:
                case SubmitPrefill(request, grant):
                    self._receive(request, grant)
                case Cancel(request_id):
                    cancelled = [
                        prompt for prompt in self._scheduler.unfinished if prompt.request.request_id == request_id
                    ]
                    # decode ends requests: this one goes on there when a front end has only lost sight of prefill
                    self._abort(cancelled, TransferError("the prefill engine was told to let go of the request"))

    def _receive(self, request: Request, grant: PageGrant) -> None:
        prompt = Prompt.of(request, grant, self._arrivals, self._clock())
        self._arrivals += 1
        try:
            self._channel.accept(grant)
        except TransferError as error:
            log.info("prefill dropped a request: %s", error)
            return
        try:
            check_request(request, [self.limits])
            prompt.processor = make_processor(self._factories, request.sampling)
            if not 0 <= grant.tokens.start < grant.tokens.stop == prompt.num_tokens:
                raise RequestError(
                    f"the grant is for tokens {grant.tokens.start} to {grant.tokens.stop} and the request has "
                    f"{prompt.num_tokens}"
                )
        except RequestError as error:
            self._finish(prompt, error=error)
            return
        self._tables.look_up(prompt)
        self._scheduler.wait(prompt)

    def _abort(self, prompts: Sequence[Prompt], error: PDInferError) -> None:
        for prompt in prompts:
            self._finish(prompt, error=error)

    def _admit(self) -> None:
        while (prompt := self._scheduler.start()) is not None:
            prompt.started_at = self._clock()
            try:
                self._tables.lay_out(prompt)
            except TransferError as error:
                self._finish(prompt, error=error)

    def _run(self, prompts: Sequence[Prompt], counts: Sequence[int]) -> None:
        """Run one chunk through the model. An exception ends the prompts in it and nothing else."""
        started = self._clock()
        try:
            self._begin(prompt.request.request_id for prompt in prompts)
            self._compute(prompts, counts)
        except (MemoryError, RankLost):  # what it had is not to blame for a lost rank, and goes on elsewhere
            raise
        except Exception as error:  # noqa: BLE001 - a failing chunk must not stop the engine
            log.exception("a prefill step failed")
            failed = [prompt for prompt in prompts if prompt in self._scheduler.active]  # the others were handed off
            self._fail(failed, PDInferError(f"the prefill step failed: {cause(error)}"))
        self._scheduler.ran(sum(counts), self._clock() - started)

    def _compute(self, prompts: Sequence[Prompt], counts: Sequence[int]) -> None:
        rows, spans = [], []
        for prompt, count in zip(prompts, counts, strict=True):
            start, stop = prompt.num_computed, prompt.num_computed + count
            tokens = prompt.request.tokens
            rows.append(Row(tokens[start:stop], start, prompt.pages, tokens[stop] if stop < len(tokens) else None))
            # with the tokens that we had and decode lacks; empty when decode has more of them than we
            spans.append(range(prompt.num_pushed, max(prompt.num_pushed, stop)))
        self._runner.announce(rows, [prompt.grant for prompt in prompts], spans)
        for layer, ready in self._runner.prefill(rows):
            mark(self._trace, "push", layer=layer)
            for prompt, span in zip(prompts, spans, strict=True):
                if span:
                    prompt.pushed_at = prompt.pushed_at or self._clock()
                    self._channel.push(
                        prompt.grant, layers=range(layer, layer + 1), tokens=span, pages=prompt.pages, ready=ready
                    )
        mark(self._trace, "emit")
        whole = []
        for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            prompt.num_computed += count
            prompt.num_pushed = max(prompt.num_pushed, prompt.num_computed)
            if not prompt.num_remaining:
                whole.append(index)
        if whole:
            self._hand_off(whole, [prompts[index] for index in whole])

    def _hand_off(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Draw the first token of each finished prompt. It travels in the hand-off."""
        eos = self.model.config.eos_token_ids
        draws = [
            Draw.of(one.request, one.request.output, eos_token_ids=eos, processor=one.processor) for one in prompts
        ]
        drawn = self._runner.first_tokens(rows, draws)
        mark(self._trace, "emit")
        for prompt, first, state in zip(prompts, drawn, self._runner.states(rows), strict=True):
            if first.error is None:
                self._finish(prompt, first, state)
            elif isinstance(first.error, RequestError):
                self._finish(prompt, error=first.error)  # the request caused it: what was computed is good
            else:
                self._fail([prompt], first.error)

    def _fail(self, prompts: Sequence[Prompt], error: PDInferError) -> None:
        """Abort prompts whose computation failed. No other request may use what they leave behind."""
        for prompt in prompts:
            self.pool.forget(prompt.pages)
        self._abort(prompts, error)

    def _finish(
        self,
        prompt: Prompt,
        first: Drawn | None = None,
        state: tuple[NamedState, ...] = (),
        *,
        error: PDInferError | None = None,
    ) -> None:
        """Hand the prompt off. Its pages return when nothing reads them any more."""
        now = self._clock()
        started = prompt.started_at or now
        handoff = Handoff(
            room=prompt.grant.room,
            writer=self.address,
            status=HandoffStatus.LANDED if error is None else HandoffStatus.ABORTED,
            error=error,
            token=first.token if first else None,
            logprob=first.logprob if first else None,
            top_logprobs=first.top_logprobs if first else (),
            state=state,
            num_cached_tokens=prompt.num_cached,
            queue_s=started - prompt.submitted_at,
            compute_s=now - started,
        )
        prompt.landed = error is None
        self.computing -= {prompt.request.request_id or ""}
        if self._trace is not None:
            show_prompt(self._trace, prompt, now)
        prompt.sent = self._channel.finish(prompt.grant, handoff)
        self._scheduler.leave(prompt)
        self._sending.append(prompt)
        self._return_pages()

    def _return_pages(self) -> None:
        for prompt in [prompt for prompt in self._sending if prompt.sent is not None and prompt.sent.done]:
            self._sending.remove(prompt)
            if self._trace is not None:
                show_sent(self._trace, prompt, self._clock())
            self._tables.release(prompt)
