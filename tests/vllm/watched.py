"""PDInferConnector for engines with several workers: each tells a file what has left or landed, as children tell it."""

from __future__ import annotations

import json
import os
from typing import Any

from pdinfer.adapters.vllm.loading import connector_class
from tests.vllm.watching import watch


class WatchedConnector(connector_class()):  # type: ignore[misc]
    """Appends to the file that WATCHED names."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        if hasattr(self._worker, "channel"):
            watch(self._worker, self._say)

    def _say(self, **what: Any) -> None:
        with open(os.environ["WATCHED"], "a", encoding="utf-8") as out:
            out.write(json.dumps(what) + "\n")
