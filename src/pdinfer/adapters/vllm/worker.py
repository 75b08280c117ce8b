"""The half of the connector in vLLM's worker: the pages, the channel over them, and its two sides."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from pdinfer.adapters.vllm.memory import cache_context, engine_pages, form_of, layer_of
from pdinfer.adapters.vllm.messages import Arrivals, Orders, TransferCounts
from pdinfer.adapters.vllm.overrides import overrides
from pdinfer.adapters.vllm.receiving import Doors, Receiving
from pdinfer.adapters.vllm.sending import VLLMSending
from pdinfer.adapters.vllm.settings import Settings
from pdinfer.checkpoint.reader import SAMPLE_BYTES
from pdinfer.errors import ConfigError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.transports.shm.transport import SCHEME
from pdinfer.stats import ChannelStats

_log = logging.getLogger("vllm.pdinfer")

LEAST_IDLE_S, MOST_IDLE_S = 0.01, 0.05
"""Seconds that a step that computes nothing sleeps for news while something waits: more from step to step. vLLM steps
on all the time then, a step costs it a millisecond, and new requests wait for the end of such a step."""
IN_STEP_S = 0.001
"""The same where data-parallel ranks share experts: all of them wait for the end of such a step."""


class WorkerHalf:
    """The connector's half in vLLM's worker. Everything is called from its one thread. Of a prefill's several workers
    only the first one opens a channel: each has all latents of an MLA model, and nothing is to be done at the others.
    Of a decode's workers each does, for the cache that it has."""

    channel: KVChannel
    orders: Orders
    """Those of the step."""

    def __init__(self, config: Any, settings: Settings, version: str = "") -> None:
        self._config, self._version = config, version
        self._model = str(config.model_config.model)
        self._overrides = overrides(config)
        self._block_size = int(config.cache_config.block_size)
        self._rank = getattr(config.parallel_config, "rank", 0)
        self._num_workers = getattr(config.parallel_config, "tensor_parallel_size", 1)
        self._settings = settings.of_worker(self._rank)
        self._key = settings.key()
        self._takes_part = self._rank == 0 or not settings.sends
        self._context = cache_context(self._takes_part and settings.listen.startswith(SCHEME))
        self._counts = TransferCounts()
        self._news = threading.Event()
        self.orders = Orders()
        self._moved: ChannelStats | None = None
        self._is_open = False
        in_step = getattr(config.parallel_config, "data_parallel_size", 1) > 1
        self._least_s, self._most_s = (IN_STEP_S, IN_STEP_S) if in_step else (LEAST_IDLE_S, MOST_IDLE_S)
        self._idle_s = self._least_s

    def cache_context(self) -> AbstractContextManager[object] | None:
        """Return what the caches are to be allocated in."""
        return self._context

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the channel over these caches. Raises ConfigError for caches that are not served."""
        if self._is_open:
            raise ConfigError("PDInferConnector was given KV caches twice")
        if not self._takes_part:
            return
        settings = self._settings
        form = form_of(self._config, next(iter(kv_caches), ""), self._version)
        pages = engine_pages(self._model, kv_caches, self._block_size, self._context, form, self._overrides)
        if self._overrides:
            _log.info("a part of the model's id, since no file says it: %s", self._overrides)
        _log.info(
            "vLLM reads the weights itself, so peers compare the first %d bytes of each tensor in %s: weights that "
            "differ after these are not distinguished",
            SAMPLE_BYTES,
            self._model,
        )
        self.channel = KVChannel(pages, settings.transport(), key=self._key, takes_offers=settings.sends)
        self.channel.notify(self._news.set)
        doors = Doors(self.channel, self._news.set)
        self._receiving = Receiving(
            self.channel,
            pages,
            doors,
            self._counts,
            lease_s=settings.lease_s,
            rank=self._rank,
            num_workers=self._num_workers,
        )
        self._sending = VLLMSending(self.channel, self._counts, hold_s=settings.hold_s, lease_s=settings.lease_s)
        self._is_open = True

    # -- a step, in the order in which vLLM calls -------------------------------------------------------------------

    def preempted(self) -> None:
        """Before anything of the step is computed: let nothing read the blocks that others get now."""
        if self._is_open:
            self._sending.drawn(self.orders.drawn)
            self._sending.preempted(self.orders.preempted)

    def load(self) -> None:
        """Begin the loads of the step."""
        if self._is_open:
            for load in self.orders.loads:
                self._receiving.begin(load)
            for req_id in self.orders.cancelled:
                self._receiving.cancel(req_id)

    def layer(self, name: str) -> None:
        """A layer of the step is computed."""
        if self.orders.saves and self._is_open:
            self._sending.layer(self.orders.saves, layer_of(name))

    def step_done(self) -> None:
        """Everything of the step is computed."""
        if self._is_open:
            self._sending.step_done(self.orders.saves)
            self._sending.ended(self.orders.ended)
            self._sending.unwanted(self.orders.unwanted)
            if self.orders.lacks_blocks:
                self._sending.make_way()

    def finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks have left, and those whose loads have ended."""
        if not self._is_open:
            return set(), set()
        self._look()
        sent, received = self._sending.take_finished(), self._receiving.take_finished()
        waits = self.orders.waits or len(self._receiving) or len(self._sending)
        if self.orders.is_idle and waits and not (sent or received) and not self._sending.has_news:
            if self._news.wait(self._idle_s):
                self._look()
            # longer from step to step: new requests wait for the end of this one
            self._idle_s = min(2 * self._idle_s, self._most_s)
            sent, received = self._sending.take_finished(), self._receiving.take_finished()
        else:
            self._idle_s = self._least_s
        return sent, received

    def bad_blocks(self) -> set[int]:
        """Return the blocks that did not land."""
        return self._receiving.take_bad_blocks() if self._is_open else set()

    def arrivals(self) -> Arrivals | None:
        """Return the grants that have come, for the scheduler."""
        rooms = self._sending.take_news() if self._is_open else frozenset()
        return Arrivals(rooms) if rooms else None

    def counts(self) -> TransferCounts | None:
        """Return what was counted since the last call."""
        if self._is_open:
            now = self.channel.stats
            for name in ("bytes_received", "bytes_sent", "receive_s"):
                self._counts.add(name, getattr(now, name) - getattr(self._moved, name, 0))
            self._moved = now
        return self._counts.take()

    def close(self) -> None:
        """Close the channel: peers learn at once that this end is gone."""
        if self._is_open:
            self._is_open = False
            self.channel.close()

    def _look(self) -> None:
        self._news.clear()
        self._receiving.step()
        self._sending.step()
