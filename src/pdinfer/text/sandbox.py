"""Where chat templates run: jinja2's immutable sandbox, with the names that templates of published models expect.

A template comes with a checkpoint, from strangers. It sees plain values, and reads, writes and calls nothing else. It
may still take any time and memory, by nested loops or long fillers: who renders templates of people they do not trust
does so in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pdinfer.bounds import escaped
from pdinfer.errors import BackendUnavailable, CheckpointError, RequestError

OLDEST_SAFE = (3, 1, 6)
"""Earlier versions of jinja2 have known ways out of the sandbox (CVE-2025-27516)."""


class Refusal(TemplateError):
    """What `raise_exception` of a template raises."""


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


class Template:
    """A compiled chat template. `now` tells the local time."""

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        """Raise CheckpointError for what is not a template, and BackendUnavailable for a jinja2 that is too old."""
        version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
        if version < OLDEST_SAFE:
            raise BackendUnavailable(
                f"chat templates run in the sandbox of jinja2 {'.'.join(map(str, OLDEST_SAFE))} or later, and this is "
                f"{jinja2.__version__}: pip install 'pdinfer[text]'"
            )
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        sandbox.filters["tojson"] = _tojson
        sandbox.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
            "dict": _dict,
            "namespace": _namespace,
        }
        try:
            self._template = sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is broken: line {error.lineno}: {_shown(error)}") from error
        except (RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {_shown(error)}") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text. Raise RequestError when the template refuses the values or cannot take them, and
        CheckpointError when it tries what the sandbox does not allow."""
        try:
            return self._template.render(values)
        except SecurityError as error:
            raise CheckpointError(f"the chat template does what it must not: {_shown(error)}") from error
        except Refusal as error:
            raise RequestError(f"the chat template refuses this chat: {_shown(error)}") from error
        except Exception as error:  # whatever a template does with values that it did not expect
            kind = type(error).__name__
            raise RequestError(f"the chat template cannot render this chat: {kind}: {_shown(error)}") from error


def _shown(error: Exception) -> str:
    return escaped(str(error))[:300]
