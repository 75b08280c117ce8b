"""The place where chat templates run: jinja2's immutable sandbox, with the names that templates of published models
expect.

A template comes with a checkpoint, from strangers. It sees plain values, and reads, writes and calls nothing else.

Its length is bounded, and nothing is computed while it is compiled. While it renders, bounds hold for the thread's CPU
time, at which each turn of a loop, operator, call and filter looks; for the characters and items that these make; and
for how wide a text is filled. What one call does before it returns is not bounded: long texts that are joined by or
replaced with long texts take any time and memory. Who renders templates of people they do not trust does so in a
process of its own.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from pdinfer.bounds import escaped
from pdinfer.errors import BackendUnavailable, CheckpointError, RequestError

OLDEST_SAFE = (3, 1, 6)
"""Earlier versions of jinja2 have known ways out of the sandbox (CVE-2025-27516)."""
MAX_SOURCE = 1 << 17
"""Characters of a template, which take a few seconds to compile at most. Published ones have up to some 20,000."""
MAX_MADE = 1 << 28
"""Characters and items that a template makes of a chat, also those that it drops again."""
MAX_WIDTH = 1 << 20
MAX_BITS = 1 << 16

_WIDENING = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"})
"""Filters that fill up to a width."""
_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{7})|\{[^{}]*(\{|\d{7})")
"""Such a width in a text that `%` or `format` fills in, or one that is filled in itself."""
_EACH, _JOINED = "each item", "texts joined"
"""Names of filters that no template can write."""


class Limit(TemplateError):
    """Ends a template that asks for too much."""


class Refusal(TemplateError):
    """Raised by `raise_exception` of a template."""


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks what training learns from, and leaves its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class GuardedNamespace(Namespace):
    """A namespace without names that begin with an underscore, which Python looks up itself."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_checked_name(name), value)


def _checked_name(name: str) -> str:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore: {name}")
    return name


def _namespace(*args: Any, **fields: Any) -> GuardedNamespace:
    named = dict(*args, **fields)
    return GuardedNamespace({_checked_name(str(name)): value for name, value in named.items()})


def _dict(*args: Any, **items: Any) -> dict[Any, Any]:
    return dict(*args, **items)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that, unlike jinja2's own, leaves the characters of HTML as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment that compiles templates without running them, and runs them within bounds, which count from
    `begin` on."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            optimized=False,  # which would compute what is constant while it compiles
            finalize=pass_context(lambda _, value: value),  # and so would output, if this did not ask for a context
        )
        self._left = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["from_json"] = json.loads
        self.filters = {name: self._bounded(name, filter_) for name, filter_ in self.filters.items()}
        self.filters |= {_EACH: self._each, _JOINED: lambda parts: self.concat(map(str, parts))}
        # it makes text of any length at one call
        del self.globals["lipsum"]

    def begin(self, max_cpu_s: float) -> None:
        """Start a rendering, in this thread."""
        self._left.max_cpu_s = max_cpu_s
        self._left.ends_at = time.thread_time() + max_cpu_s
        self._left.made = 0

    def spend(self, size: int = 1) -> None:
        """Count what is made. Raise Limit when it is too much, or has taken too long."""
        self._left.made += size
        if self._left.made > MAX_MADE:
            raise Limit(f"it makes more than {MAX_MADE} characters and items")
        if time.thread_time() >= self._left.ends_at:
            raise Limit(f"it takes more than {self._left.max_cpu_s:g} s")

    def concat(self, parts: Iterable[str]) -> str:
        kept = []
        for part in parts:
            self.spend(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        bits = size = 0
        match operator, left, right:
            # bounded before it is computed: one operation could take all memory
            case "**", int(), int():
                bits = left.bit_length() * right
            case "*", int(), int():
                bits = left.bit_length() + right.bit_length()
            case "*", int(), Sized():
                size = left * len(right)
            case "*", Sized(), int():
                size = len(left) * right
            case "+", Sized(), Sized():
                size = len(left) + len(right)
            case "%", str(), _:
                _check_template(left)
        if bits > MAX_BITS:
            raise Limit(f"it computes a number of more than {MAX_BITS} bits")
        self.spend(max(size, 1))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str) and function.__name__ in ("format", "format_map"):
            _check_template(text)
        elif isinstance(text, str):
            _check_widths(*args, *kwargs.values())
        return self._counted(super().call, context, function, *args, **kwargs)

    def _counted(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        self.spend(len(made) if isinstance(made, Sized) and not isinstance(made, range) else 0)
        return made

    def _bounded(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter_)  # with the marks of what jinja2 passes
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name in _WIDENING:
                _check_widths(*args[1:], *kwargs.values())
            elif name == "format":
                _check_template(str(args[0]))
            return self._counted(filter_, *args, **kwargs)

        return bounded

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
            yield item

    def _parse(self, *args: Any) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(*args))
        tree.set_environment(self)
        return tree


class _Bounds(NodeTransformer):
    """Has a template pass what it loops over, and what it joins, through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as jinja2 calls it
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _EACH, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _check_widths(*values: object) -> None:
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise Limit(f"it fills a text up to more than {MAX_WIDTH} characters")


def _check_template(text: str) -> None:
    if _WIDE.search(text):
        raise Limit(f"it fills in a text at a width that it computes, or at one of more than {MAX_WIDTH} characters")


class Template:
    """A compiled chat template. `now` returns the local time, and `max_cpu_s` is how long it may render a chat."""

    def __init__(self, source: str, now: Callable[[], datetime], max_cpu_s: float) -> None:
        """Raise CheckpointError for what is not a template, and BackendUnavailable for a jinja2 that is too old."""
        version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
        if version < OLDEST_SAFE:
            raise BackendUnavailable(
                f"chat templates run in the sandbox of jinja2 {'.'.join(map(str, OLDEST_SAFE))} or later, and this is "
                f"{jinja2.__version__}: pip install 'pdinfer[text]'"
            )
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE}")
        self._max_cpu_s = max_cpu_s
        self._sandbox = Sandbox()
        self._sandbox.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
            "dict": _dict,
            "namespace": _namespace,
        }
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is broken: line {error.lineno}: {_shown(error)}") from error
        except Exception as error:  # nested deeper than Python's own code may be, for example
            raise CheckpointError(f"the chat template cannot be compiled: {_shown(error)}") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text. Raise RequestError when the template refuses the values, cannot take them or makes too much
        of them, and CheckpointError when it tries what the sandbox does not allow."""
        try:
            self._sandbox.begin(self._max_cpu_s)
            return self._template.render(values)
        except SecurityError as error:
            raise CheckpointError(f"the chat template does what it must not: {_shown(error)}") from error
        except Refusal as error:
            raise RequestError(f"the chat template refuses this chat: {_shown(error)}") from error
        except Limit as error:
            raise RequestError(f"the chat template asks for too much with this chat: {_shown(error)}") from error
        except Exception as error:  # whatever a template does with values that it did not expect
            kind = type(error).__name__
            raise RequestError(f"the chat template cannot render this chat: {kind}: {_shown(error)}") from error


def _shown(error: Exception) -> str:
    return escaped(str(error))[:300]
