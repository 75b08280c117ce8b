"""Every hook of vLLM's connector that does something here, and which half it goes to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from pdinfer.adapters.vllm.messages import Arrivals, Orders, TransferCounts
from pdinfer.adapters.vllm.scheduler import SchedulerHalf
from pdinfer.adapters.vllm.settings import Settings, check_setup
from pdinfer.adapters.vllm.worker import WorkerHalf


class Hooks:
    """The hooks, to be joined with vLLM's base class (`loading`). vLLM makes one object per role, and calls on each the
    hooks of its role only. What is not here is as the base class has it. `vllm_version` is that of the base class."""

    vllm_version = ""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]  # vLLM's base is the next one
        check_setup(vllm_config, kv_cache_config)
        rank = getattr(vllm_config.parallel_config, "data_parallel_index", 0)  # vLLM resets data_parallel_rank
        settings = Settings.of(vllm_config.kv_transfer_config).of_rank(rank)
        if role.name == "WORKER":
            self._worker = WorkerHalf(vllm_config, settings, self.vllm_version)
        else:
            self._scheduler = SchedulerHalf(int(vllm_config.cache_config.block_size), settings)
        self._is_worker = role.name == "WORKER"
        workers = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
        self._num_reports = 1 if settings.sends else workers

    # -- in the scheduler -------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        arrivals = connector_output.kv_connector_worker_meta
        self._scheduler.arrived(arrivals, connector_output.finished_recving)

    def get_finished_count(self) -> int:
        """Return how many workers say that a request is done: of a prefill the first one, which alone sends, and of a
        decode all, each for its own cache."""
        return self._num_reports

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._scheduler.finished(request), None

    # -- in the worker ----------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        return self._worker.cache_context()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Orders) -> None:
        self._worker.orders = connector_metadata
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        self._worker.orders = kv_connector_metadata  # which vLLM binds later in the step
        self._worker.preempted()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        self._worker.layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.step_done()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.bad_blocks()

    def build_connector_worker_meta(self) -> Arrivals | None:
        return self._worker.arrivals()

    def get_kv_connector_stats(self) -> TransferCounts | None:
        return self._worker.counts() if self._is_worker else None

    def shutdown(self) -> None:
        if self._is_worker:
            self._worker.close()

    # -- in both, or in none ----------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Return True: the connector keeps no tokens of its own."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Return True: in a whole captured graph no layer would be sent before the last one."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferCounts:
        return TransferCounts(dict(data or {}))
