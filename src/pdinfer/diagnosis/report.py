"""The doctor's findings as plain values: facts, and problems with the command that mends each."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import msgspec

from pdinfer.values import Value, table

SCHEMA = "pdinfer.doctor/1"
WIDTH = 110


class Level(enum.Enum):
    """FAILURE: something will fail. WARNING: it works, but slowly or not as it was meant."""

    FAILURE = "failure"
    WARNING = "warning"


def _text(value: Any) -> Any:
    """Return a text with what is no Unicode spelled out, such as bytes in the name of a folder: no output takes it.
    Other values stay."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


@attrs.frozen(kw_only=True)
class Fact(Value):
    """A fact: a name, its value (None if it has none), and remarks in sentences."""

    name: str
    value: str | int | float | None = attrs.field(converter=_text)
    remarks: tuple[str, ...] = ()


@attrs.frozen
class Problem(Value):
    """A problem: a sentence, and a shell command that mends it ("" where none is known)."""

    level: Level
    sentence: str = attrs.field(converter=_text)
    mend: str = attrs.field(default="", converter=_text)


Found = Iterator[Fact | Problem]
"""The findings that the probe of a section yields."""


failure, warning = partial(Problem, Level.FAILURE), partial(Problem, Level.WARNING)


@attrs.frozen(kw_only=True)
class Section(Value):
    """The facts of one subject, and the problems that follow from them."""

    name: str
    facts: tuple[Fact, ...] = ()
    problems: tuple[Problem, ...] = ()


@attrs.frozen(kw_only=True)
class Diagnosis:
    """The doctor's findings on a machine."""

    sections: tuple[Section, ...]

    @property
    def failures(self) -> tuple[Problem, ...]:
        """The problems that will make something fail."""
        return tuple(problem for _, problem in self._problems() if problem.level is Level.FAILURE)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems with which things work, but slowly or not as intended."""
        return tuple(problem for _, problem in self._problems() if problem.level is Level.WARNING)

    @property
    def exit_code(self) -> int:
        """1 if anything will fail, else 0."""
        return int(bool(self.failures))

    def to_json(self) -> bytes:
        """Return it as JSON, with the `schema`, the `exit_code` and all sections."""
        return msgspec.json.encode({"schema": SCHEMA, "exit_code": self.exit_code, "sections": self.sections})

    def __repr__(self) -> str:
        return f"Diagnosis({self._counts()}; print it to read the report)"

    def __str__(self) -> str:
        """Return a report for people, with problems first."""
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return the same as a table."""
        facts = ((section.name, *row) for section in self.sections for row in _fact_rows(section))
        return table([("pdinfer doctor", self._counts()), *self._problem_rows(), *facts])

    def _problems(self) -> Iterator[tuple[Section, Problem]]:
        return ((section, problem) for section in self.sections for problem in section.problems)

    def _counts(self) -> str:
        return f"{_count(len(self.failures), 'failure')}, {_count(len(self.warnings), 'warning')}"

    def _lines(self) -> Iterator[str]:
        yield f"pdinfer doctor: {self._counts()}"
        for word, name, sentence, *mends in self._problem_rows():
            yield from ("", *_wrapped(f"{word:8} {name}: {sentence}", " " * 9))
            yield from (f"{'':9}{mend}" for mend in mends)
        for section in self.sections:
            yield from ("", section.name)
            width = max((len(fact.name) for fact in section.facts), default=0)
            for name, value, *remarks in _fact_rows(section):
                yield f"  {name:<{width}}  {value}"
                for remark in remarks:
                    yield from _wrapped(f"{'':{width + 4}}{remark}", " " * (width + 6))

    def _problem_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield what is wrong, failures first: the level, the section, the sentence, and the command that mends it."""
        for section, problem in sorted(self._problems(), key=lambda found: found[1].level is Level.WARNING):
            mend = (f"$ {problem.mend}",) if problem.mend else ()
            yield problem.level.value.upper(), section.name, problem.sentence, *mend


def _fact_rows(section: Section) -> Iterator[tuple[str, ...]]:
    """Yield what is so: the name, the value, and remarks."""
    return ((fact.name, "-" if fact.value is None else str(fact.value), *fact.remarks) for fact in section.facts)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
