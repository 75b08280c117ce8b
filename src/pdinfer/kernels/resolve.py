"""Which provider serves each op: one table, preference first, asked once at load and explained on demand."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import attrs
import torch

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.ops import OP_NAMES, Ops

PROVIDERS: tuple[tuple[str, str], ...] = (
    ("native", "pdinfer.kernels.native"),
    ("torch", "pdinfer.kernels.torch_ops"),
    ("reference", "pdinfer.kernels.reference"),
)
"""(name, module) in order of preference. A module is imported only when its turn comes; it has a function
`unavailable(device, dtype) -> str | None` (a sentence, or None when it can run) and the ops it offers under their names."""


@attrs.frozen
class OpChoice:
    """Why an op runs where it runs: the provider taken and, for each one passed over, a sentence."""

    op: str
    provider: str
    refusals: tuple[str, ...] = ()


@attrs.frozen
class ResolvedOps:
    """The ops of one model and the reasons for them."""

    ops: Ops
    choices: tuple[OpChoice, ...]


def resolve_ops(
    device: torch.device, dtype: torch.dtype, *, forced: str | Mapping[str, str] | None = None
) -> ResolvedOps:
    """Ops for models that run in `dtype` on `device`. `forced` names one provider for all ops, or one per op; BackendUnavailable when a forced
    provider cannot run here or lacks the op."""
    unknown = [] if forced is None or isinstance(forced, str) else sorted(set(forced) - set(OP_NAMES))
    if unknown:
        raise BackendUnavailable(f"no op is called {', '.join(map(repr, unknown))}; there are {', '.join(OP_NAMES)}")
    functions: dict[str, object] = {}
    choices = []
    for op in OP_NAMES:
        wanted = forced if isinstance(forced, str) or forced is None else forced.get(op)
        function, choice = _choose(op, device, dtype, wanted)
        functions[op] = function
        choices.append(choice)
    return ResolvedOps(Ops(**functions), tuple(choices))  # type: ignore[arg-type]


def _choose(op: str, device: torch.device, dtype: torch.dtype, wanted: str | None) -> tuple[object, OpChoice]:
    names = [name for name, _ in PROVIDERS]
    if wanted is not None and wanted not in names:
        raise BackendUnavailable(f"op {op}: no provider is called {wanted!r}; there are {', '.join(names)}")
    refusals: list[str] = []
    for name, module_path in PROVIDERS:
        if wanted not in (None, name):
            continue
        module = importlib.import_module(module_path)
        reason = module.unavailable(device, dtype)
        if reason is None and not hasattr(module, op):
            reason = f"has no {op}"
        if reason is None:
            return getattr(module, op), OpChoice(op, name, tuple(refusals))
        refusals.append(f"{name}: {reason}")
    raise BackendUnavailable(f"op {op} cannot run on {device}: " + "; ".join(refusals))


def explain_backends(device: str | torch.device = "cpu", dtype: torch.dtype = torch.bfloat16) -> str:
    """A table: op, the provider it would get on `device` in a model of `dtype`, and a sentence for each provider passed over."""
    choices = resolve_ops(torch.device(device), dtype).choices
    width = max(len(choice.op) for choice in choices)
    lines = [f"{'op':<{width}}  provider"]
    for choice in choices:
        lines.append(f"{choice.op:<{width}}  {choice.provider}")
        lines.extend(f"{'':<{width}}  not {refusal}" for refusal in choice.refusals)
    return "\n".join(lines)
