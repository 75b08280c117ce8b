"""Which provider serves each op: one table in order of preference, asked once at load and explained on demand."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import attrs
import torch

from pdinfer.checks import typed
from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import compositions, crossovers, page_parts
from pdinfer.kernels.ops import OP_NAMES, Composed, Declined, Ops, function_of, ops_of
from pdinfer.kernels.spec import OPS_OF_FORMAT, DeviceSpec, OpSpec
from pdinfer.values import Value

COMPOSITION = "composition"


@attrs.frozen
class Provider:
    """A name, a module, and torch's types of the devices that it is for; none stands for all. It is imported only for
    these, or where it is asked for by name."""

    name: str
    module: str
    devices: tuple[str, ...] = ()

    def is_for(self, device: DeviceSpec) -> bool:
        """Return whether it may have ops for such a device."""
        return not self.devices or device.type in self.devices


PROVIDERS: tuple[Provider, ...] = (
    Provider("native", "pdinfer.kernels.native.ops", ("cpu",)),
    Provider("deep_gemm", "pdinfer.kernels.deep_gemm", ("cuda",)),
    Provider("flash_mla", "pdinfer.kernels.flash_mla", ("cuda",)),
    Provider("triton", "pdinfer.kernels.triton.provider", ("cuda",)),
    Provider(COMPOSITION, "pdinfer.kernels.compositions"),
    Provider("torch", "pdinfer.kernels.torch.provider"),
    Provider("reference", "pdinfer.kernels.reference"),
)
"""The providers in order of preference. What the module of one offers is found by `ops.function_of`. One that imports
functions only when they are taken has `PLACES`, whose keys are ops, and `function(op)` instead. It may have functions
of an `OpSpec` that return None or a sentence: `unavailable(spec)` says why nothing of it can run, `refuses(op, spec)`
why it does not serve an op for these sizes and formats, and `slow(op, spec)` why an op on quantized weights is slower
than floats made of them at load.
A spec does not know everything. `DECLINES` has the names of ops that may raise `ops.Declined`. Where `crossovers` knows
which of two providers is faster for how many rows, each call goes to that one first.
The functions of "composition" take the chosen ops as their first argument."""


@attrs.frozen
class OpChoice(Value):
    """Why an op runs where it runs: the provider taken, and a sentence for each one of the op that was passed over.
    `slow` says why the provider is no reason to keep quantized weights as they are stored. Calls that the provider
    declines go to the `others`, in their order. `fastest` says for how many rows another order was measured to be
    faster."""

    op: str
    provider: str
    refusals: tuple[str, ...] = ()
    slow: str | None = None
    others: tuple[str, ...] = ()
    fastest: str | None = None


@attrs.frozen
class ResolvedOps(Value):
    """The ops of one model and the reasons for them. `spec` is what they were chosen for, and `weights` tells in
    sentences what became of its quantized weights."""

    spec: OpSpec
    ops: Ops
    choices: tuple[OpChoice, ...]
    weights: tuple[str, ...] = ()


@typed
def resolve_ops(spec: OpSpec, *, forced: str | Mapping[str, str] | None = None) -> ResolvedOps:
    """Choose the ops for a model of `spec`. `forced` names one provider for all ops, or one per op. What a provider for
    all ops lacks is composed of those it has, where that can be done. Raises BackendUnavailable when a forced provider
    cannot run there, refuses the op or lacks it."""
    unknown = [] if forced is None or isinstance(forced, str) else sorted(set(forced) - set(OP_NAMES))
    if unknown:
        raise BackendUnavailable(f"no op is called {', '.join(map(repr, unknown))}; there are {', '.join(OP_NAMES)}")
    functions: dict[str, object] = {}
    choices = []
    # once for all ops: a provider may look for its library on the disk
    why_not = functools.cache(lambda module: _answer(module, "unavailable", spec))
    for op in OP_NAMES:
        function, choice = _choose(op, spec, _wanted(op, spec.device, forced), why_not)
        functions[op] = function
        choices.append(choice)
    over_parts = page_parts.functions_of(spec, ops_of(functions))
    choices = [_over_parts(each) if each.op in over_parts else each for each in choices]
    return ResolvedOps(spec, ops_of(functions | over_parts), tuple(choices))


def _over_parts(choice: OpChoice) -> OpChoice:
    """Return what there is to say of an op over pages in two parts."""
    if choice.op in page_parts.JOINING:
        return attrs.evolve(choice, slow="joins the two parts of each page that a call reads")
    return OpChoice(choice.op, COMPOSITION)


def _wanted(op: str, device: DeviceSpec, forced: str | Mapping[str, str] | None) -> list[str]:
    """Return the names of the providers that may serve an op."""
    if isinstance(forced, Mapping) and op in forced:
        return [forced[op]]
    composed = [] if function_of(compositions, op) is None else [COMPOSITION]
    if isinstance(forced, str):
        return [forced, *composed]
    return [each.name for each in PROVIDERS if each.name != COMPOSITION and each.is_for(device)] + composed


def _choose(
    op: str, spec: OpSpec, wanted: Sequence[str], why_not: Callable[[ModuleType], str | None]
) -> tuple[object, OpChoice]:
    names = [each.name for each in PROVIDERS]
    if unknown := [name for name in wanted if name not in names]:
        raise BackendUnavailable(f"op {op}: no provider is called {unknown[0]!r}; there are {', '.join(names)}")
    refusals: list[str] = []
    without: list[str] = []
    takers: dict[str, ModuleType] = {}
    known = crossovers.of(op, spec)
    rivals = {*wanted} & (frozenset() if known is None else known.names)
    for provider in PROVIDERS:
        name = provider.name
        if name not in wanted:
            continue
        rivals.discard(name)
        module = importlib.import_module(provider.module)
        offered = _offers(module, op)
        reason = why_not(module)
        if reason is None:
            reason = _answer(module, "refuses", op, spec) if offered else f"has no {op}"
        if reason is not None:
            (refusals if offered else without).append(f"{name}: {reason}")
            continue
        is_served = any(op not in getattr(taker, "DECLINES", ()) for taker in takers.values())
        if not is_served or _answer(module, "slow", op, spec) is None:
            takers[name] = module
        if not rivals and (is_served or op not in getattr(module, "DECLINES", ())):
            break
    if not takers:
        raise BackendUnavailable(f"op {op} cannot run on {spec.device}: " + "; ".join(refusals + without))
    functions = {name: _function(op, name, module) for name, module in takers.items()}
    (taken, first), *others = takers.items()
    if known is not None and len(known.names & takers.keys()) < 2:
        known = None
    choice = OpChoice(
        op,
        taken,
        tuple(refusals),
        _answer(first, "slow", op, spec),
        tuple(name for name, _ in others),
        None if known is None else known.told(takers.keys()),
    )
    if not others and op not in getattr(first, "DECLINES", ()):
        return functions[taken], choice
    return Composed(_InTurn(op, functions, known)), choice


def _answer(module: ModuleType, question: str, *about: object) -> str | None:
    """Return the sentence of a provider, or None where it has none."""
    answer: str | None = getattr(module, question)(*about) if hasattr(module, question) else None
    return answer


def _offers(module: ModuleType, op: str) -> bool:
    return op in module.PLACES if hasattr(module, "PLACES") else function_of(module, op) is not None


def _function(op: str, provider: str, module: ModuleType) -> Any:
    function = module.function(op) if hasattr(module, "PLACES") else function_of(module, op)
    return Composed(function) if provider == COMPOSITION else function


@attrs.frozen
class _InTurn:
    """An op of several providers: each call goes to the first that does not decline it, of those that are known to be
    faster before others. Takes the chosen ops as its first argument, for those of them that call other ops."""

    op: str
    takers: Mapping[str, Callable[..., Any]]
    known: crossovers.Crossovers | None

    def __call__(self, ops: Ops, *arguments: Any, **options: Any) -> Any:
        reason = None
        for name in self.takers if self.known is None else self.known.order(self.takers, arguments):
            function = self.takers[name]
            ours = functools.partial(function.func, ops) if isinstance(function, Composed) else function
            try:
                return ours(*arguments, **options)
            except Declined as declined:
                reason = declined
        raise BackendUnavailable(f"op {self.op}: {reason}")


class Resolved(Protocol):
    """Something that was built with resolved ops: a model."""

    @property
    def resolved(self) -> ResolvedOps:
        """Its ops, and the reasons for them."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What else the host should know, in sentences."""


def slow_op(weight_format: str, resolved: ResolvedOps) -> OpChoice | None:
    """Return the first op on weights of that format that is slower than its float form, or None."""
    slow = (choice for choice in resolved.choices if choice.op in OPS_OF_FORMAT[weight_format] and choice.slow)
    return next(slow, None)


@typed
def explain_backends(where: str | torch.device | OpSpec | Resolved = "cpu", dtype: torch.dtype = torch.bfloat16) -> str:
    """Return a table: each op, the provider it would get, the providers of calls which that one declines, a sentence
    for each provider of the op that was passed over or is slow, and which is the fastest for how many rows, where that
    was measured; then the providers that are for other devices.

    `where` is a device, a card's name ("H200") or a spec, and none of them need be here; `dtype` is that of a model
    there, which a spec says itself. A spec also tells what `weights="auto"` makes of its weight formats. For a `Model`
    the table tells what the model got, what became of its quantized weights, and what is odd about where its experts
    are. Raises BackendUnavailable for an unknown device."""
    remarks: tuple[str, ...] = ()
    if isinstance(where, str | torch.device):
        where = OpSpec(device=where, dtype=dtype)
    if isinstance(where, OpSpec):
        resolved = resolve_ops(where)
        remarks = tuple(_outcome(name, resolved, where.dtype) for name in sorted(where.weight_formats))
    else:
        resolved, remarks = where.resolved, where.remarks
    width = max(len(choice.op) for choice in resolved.choices)
    lines = [f"{'op':<{width}}  provider"]
    for choice in resolved.choices:
        lines.append(f"{choice.op:<{width}}  {', else '.join((choice.provider, *choice.others))}")
        lines.extend(f"{'':<{width}}  not {refusal}" for refusal in choice.refusals)
        lines.extend(f"{'':<{width}}  {told}" for told in _told(choice))
    device = resolved.spec.device
    lines.extend(
        f"{each.name} is for {each.devices[0]}, device is {device}" for each in PROVIDERS if not each.is_for(device)
    )
    return "\n".join([*lines, *resolved.weights, *remarks])


def _told(choice: OpChoice) -> Iterator[str]:
    """Yield what there is to say about the speed of an op."""
    if choice.slow is not None:
        yield f"slow: {choice.slow}"
    if choice.fastest is not None:
        yield choice.fastest


def _outcome(weight_format: str, resolved: ResolvedOps, dtype: torch.dtype) -> str:
    """Tell what `weights="auto"` makes of weights of that format."""
    slow = slow_op(weight_format, resolved)
    if slow is None:
        return f'{weight_format} weights are held as they are stored (weights="auto")'
    into = str(dtype).removeprefix("torch.")
    return f'{weight_format} weights become {into} (weights="auto"): {slow.op} of {slow.provider} {slow.slow}'
