"""Where experts live and how tokens reach them."""

from __future__ import annotations

from pdinfer.moe.dispatch import Dispatched, LocalDispatcher, TokenDispatcher

__all__ = ["Dispatched", "LocalDispatcher", "TokenDispatcher"]
