"""How a tensor becomes a tensor: ops, their providers, and the choice between them."""

from __future__ import annotations

from pdinfer.kernels.ops import Ops
from pdinfer.kernels.resolve import OpChoice, ResolvedOps, explain_backends, resolve_ops

__all__ = ["OpChoice", "Ops", "ResolvedOps", "explain_backends", "resolve_ops"]
