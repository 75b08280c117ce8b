"""A Pairing of one slot in virtual time, which serves while its host does something else."""

from __future__ import annotations

import attrs

import pdinfer as pd
from pdinfer.testing import VirtualClock
from pdinfer.types import Timeline, Usage


@attrs.define(eq=False)
class OneSlot:
    """Serves one request at a time: its first token after `prefill_s`, then one each `step_s`. Events wait until the
    host steps; `wait` moves the clock, and by `sleep_s` more at the times in `sleeps_at`."""

    clock: VirtualClock
    prefill_s: float = 0.1
    step_s: float = 0.1
    sleep_s: float = 0.0
    sleeps_at: list[float] = attrs.field(factory=list)
    dies_at: float = float("inf")
    ports: tuple[object, ...] = ()
    free_at: float = 0.0
    events: list[tuple[float, pd.TokenEvent]] = attrs.field(factory=list)
    prompts: list[tuple[int, ...]] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)

    def submit(self, request: pd.Request) -> str:
        now, name, count = self.clock(), str(request.request_id), request.sampling.max_new_tokens
        self.prompts.append(request.prompt)
        began = max(now, self.free_at)
        made = [began + self.prefill_s + at * self.step_s for at in range(count)]
        if made[-1] > self.dies_at:
            error = pd.TransferError("the engine died")
            end = pd.TokenEvent(request_id=name, token=None, index=0, finish_reason=pd.FinishReason.FAILED, error=error)
            self.events.append((max(now, self.dies_at), end))
            return name
        self.free_at = made[-1]
        timeline = Timeline(
            queued_s=began - now, granted_s=began - now, prefill_began_s=began - now, prefill_ended_s=made[0] - now
        )
        for index, at in enumerate(made):
            is_last = index == count - 1
            usage = Usage(
                prompt_tokens=len(request.prompt),
                output_tokens=count,
                cached_tokens=0,
                queue_s=0.0,
                ttft_s=made[0] - now,
                timeline=timeline,
            )
            event = pd.TokenEvent(
                request_id=name,
                token=1,
                index=index,
                at_s=at - now,
                finish_reason=pd.FinishReason.LENGTH if is_last else None,
                usage=usage if is_last else None,
            )
            self.events.append((at, event))
        return name

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def step(self) -> list[pd.TokenEvent]:
        now = self.clock()
        due = [event for at, event in sorted(self.events, key=lambda pair: pair[0]) if at <= now + 1e-9]
        self.events = [(at, event) for at, event in self.events if at > now + 1e-9]
        return due

    def wait(self, timeout_s: float) -> bool:
        soonest = min((at for at, _ in self.events), default=float("inf"))
        self.clock.now_s = max(self.clock.now_s, min(soonest, self.clock.now_s + max(timeout_s, 1e-6)))
        if self.sleeps_at and self.clock.now_s >= self.sleeps_at[0]:
            self.sleeps_at.pop(0)
            self.clock.advance(self.sleep_s)
        return bool(self.events)
