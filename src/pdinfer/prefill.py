"""The prefill engine: prompts in, latents pushed layer by layer, one hand-off each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import attrs
import torch

from pdinfer.batch import Batch, Row
from pdinfer.config import EngineConfig
from pdinfer.engine import Engine
from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.kv.channel import KVChannel
from pdinfer.kv.transport import Transfer
from pdinfer.model import Model
from pdinfer.sampling import sample
from pdinfer.schedule import check_request, plan_chunk
from pdinfer.types import Event, Handoff, HandoffStatus, PageGrant, PrefillLoad, Request

_log = logging.getLogger("pdinfer")


@attrs.define(eq=False)
class _Prompt:
    """One accepted grant. `pages` are the grant's own when both ends share a pool, else ours until all is sent."""

    request: Request
    grant: PageGrant
    arrival: int
    submitted_at: float
    pages: tuple[int, ...] = ()
    owns_pages: bool = False
    started_at: float = 0.0
    num_computed: int = 0
    sent: Transfer | None = None

    @property
    def num_remaining(self) -> int:
        return len(self.request.prompt) + len(self.request.output) - self.num_computed


class PrefillEngine(Engine[tuple[Request, PageGrant]]):
    """Runs prompts in chunks over the pages of `channel.pool` and pushes each layer as it is finished.

    It ends no request: a prompt that fails or is cancelled here is an ABORTED hand-off, and decode decides.
    """

    role = "prefill"

    def __init__(
        self,
        model: Model,
        channel: KVChannel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(model, channel, config, clock=clock)
        self._queue: list[_Prompt] = []
        self._active: list[_Prompt] = []
        self._sending: list[_Prompt] = []
        self._arrivals = 0

    @property
    def num_unfinished(self) -> int:
        """Prompts without a hand-off, and hand-offs whose bytes have not all left."""
        return len(self._queue) + len(self._active) + len(self._sending) + len(self._inbox.peek())

    def submit(self, request: Request, grant: PageGrant) -> None:
        """Queues a prompt whose pages decode has granted."""
        self._inbox.put((request, grant))

    def step(self) -> list[Event]:
        """Takes what came, runs one chunk, hands off what it finished. Always returns [] (see `DecodeEngine`)."""
        if self._closed:
            return []
        self._take_inbox()
        for room, error in self.channel.poll_stops():
            self._abort([prompt for prompt in self._unfinished if prompt.grant.room == room], error)
        self._return_pages()
        self._admit()
        remaining = [prompt.num_remaining for prompt in self._active]
        counts = plan_chunk(
            remaining, chunk_size=self.config.chunked_prefill_size, max_tokens=self.config.max_prefill_tokens
        )
        if counts:
            self._run(self._active[: len(counts)], counts)
        return []

    def load(self) -> PrefillLoad:
        """What this engine has to do, counting what was submitted and not yet seen by a step."""
        unseen = [item[0] for item in self._inbox.peek() if isinstance(item, tuple)]
        known = self._unfinished
        tokens = sum(len(request.prompt) + len(request.output) for request in unseen)
        return PrefillLoad(
            **self._common_load(),
            num_queued_requests=len(known) + len(unseen),
            num_queued_tokens=sum(prompt.num_remaining for prompt in known) + tokens,
            unsent_bytes=self.channel.unsent_bytes,
        )

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until a step would do something, at most `timeout_s`; tells whether it would."""
        if self._closed:
            return False
        return self._can_run() or self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Aborts what is unfinished and closes the channel. A second call does nothing."""
        if self._closed:
            return
        self._take_inbox()
        self._abort(self._unfinished, TransferError("the prefill engine was closed"))
        self.channel.drain(1.0)
        self._closed = True
        self.channel.close()
        self._return_pages()
        self._inbox.wake()

    def _take_inbox(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, str):
                cancelled = [prompt for prompt in self._unfinished if prompt.request.request_id == item]
                self._abort(cancelled, RequestError("the request was cancelled at the prefill engine"))
                continue
            request, grant = item
            prompt = _Prompt(request, grant, self._arrivals, self._clock())
            self._arrivals += 1
            try:
                self.channel.accept(grant)
            except TransferError as error:
                _log.info("prefill dropped a request: %s", error)
                continue
            try:
                check_request(request, [self.limits])
                if grant.tokens.stop != prompt.num_remaining:
                    raise RequestError(
                        f"the grant is for {grant.tokens.stop} tokens and the request has {prompt.num_remaining}"
                    )
            except RequestError as error:
                self._finish(prompt, error=error)
                continue
            self._queue.append(prompt)
        self._queue.sort(key=lambda prompt: (-prompt.request.priority, prompt.arrival))

    @property
    def _unfinished(self) -> list[_Prompt]:
        return [*self._queue, *self._active]

    def _abort(self, prompts: Sequence[_Prompt], error: PDInferError) -> None:
        for prompt in prompts:
            self._finish(prompt, error=error)

    def _can_run(self) -> bool:
        return bool(self._active) or bool(self._queue and self._admissible(self._queue[0]))

    def _admissible(self, prompt: _Prompt) -> bool:
        pool = self.channel.pool
        if len(self._active) >= self.config.max_running_requests:
            return False
        if self.channel.unsent_bytes > self.config.send_window_bytes:
            return False
        return self.channel.shares_pool(prompt.grant) or pool.layout.num_pages(prompt.num_remaining) <= pool.num_free

    def _admit(self) -> None:
        pool = self.channel.pool
        while self._queue and self._admissible(self._queue[0]):
            prompt = self._queue.pop(0)
            prompt.started_at = self._clock()
            prompt.owns_pages = not self.channel.shares_pool(prompt.grant)
            if prompt.owns_pages:
                prompt.pages = pool.own(pool.layout.num_pages(prompt.num_remaining))
            else:
                prompt.pages = prompt.grant.pages
            self._active.append(prompt)

    def _run(self, prompts: Sequence[_Prompt], counts: Sequence[int]) -> None:
        """One chunk through the model; an exception ends the prompts in it and nothing else."""
        started = self._clock()
        try:
            self._compute(prompts, counts)
        except Exception as error:  # noqa: BLE001 - a failing chunk must not stop the engine
            _log.exception("a prefill step failed")
            failed = [prompt for prompt in prompts if prompt in self._active]  # the others have had their last word
            self._abort(failed, PDInferError(f"the prefill step failed: {type(error).__name__}"))
        self._worked(sum(counts), started)

    def _compute(self, prompts: Sequence[_Prompt], counts: Sequence[int]) -> None:
        rows, spans = [], []
        for prompt, count in zip(prompts, counts, strict=True):
            start, stop = prompt.num_computed, prompt.num_computed + count
            rows.append(Row(prompt.request.tokens[start:stop], start, prompt.pages))
            spans.append(range(max(start, prompt.grant.tokens.start), stop))
        page_size = self.channel.pool.layout.page_size
        batch = Batch.build(rows, page_size=page_size, device=self.model.device, absorbed=False)
        hidden_TD = None
        for layer, hidden_TD in self.model.stream_layers(batch, self._view):  # noqa: B007 - the last one is used below
            ready = _event(self.model.device)
            for prompt, span in zip(prompts, spans, strict=True):
                if span:
                    self.channel.push(
                        prompt.grant, layers=range(layer, layer + 1), tokens=span, pages=prompt.pages, ready=ready
                    )
        whole = []
        for prompt, count, last in zip(prompts, counts, batch.last_rows, strict=True):
            prompt.num_computed += count
            if not prompt.num_remaining:
                whole.append((prompt, last))
        if whole and hidden_TD is not None:
            self._hand_off([prompt for prompt, _ in whole], self.model.head(hidden_TD, [row for _, row in whole]))

    def _hand_off(self, prompts: Sequence[_Prompt], logits_BV: torch.Tensor) -> None:
        """Draws the first token of each finished prompt: it travels in the hand-off."""
        positions = [prompt.num_computed for prompt in prompts]
        sampled = sample(logits_BV, [prompt.request.sampling for prompt in prompts], positions)
        for prompt, token, logprob in zip(prompts, sampled.tokens, sampled.logprobs, strict=True):
            if logprob != logprob:
                self._finish(prompt, error=PDInferError("the model's logits are not finite"))
            else:
                self._finish(prompt, token=token, logprob=logprob)

    def _finish(
        self,
        prompt: _Prompt,
        *,
        token: int | None = None,
        logprob: float | None = None,
        error: PDInferError | None = None,
    ) -> None:
        """This prompt's last word; its pages return when nothing reads them any more."""
        now = self._clock()
        started = prompt.started_at or now
        handoff = Handoff(
            room=prompt.grant.room,
            writer=self.address,
            status=HandoffStatus.LANDED if error is None else HandoffStatus.ABORTED,
            error=error,
            token=token,
            logprob=logprob,
            queue_s=started - prompt.submitted_at,
            compute_s=now - started,
        )
        prompt.sent = self.channel.finish(prompt.grant, handoff)
        for line in (self._queue, self._active):
            if prompt in line:
                line.remove(prompt)
        self._sending.append(prompt)
        self._return_pages()

    def _return_pages(self) -> None:
        for prompt in [prompt for prompt in self._sending if prompt.sent is not None and prompt.sent.done]:
            self._sending.remove(prompt)
            if prompt.owns_pages:
                self.channel.pool.release(prompt.pages)


def _event(device: torch.device) -> Callable[[], None] | None:
    """What to call before reading what was computed so far; None when the device is never behind the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
