"""What the doctor found, as plain values: facts, and problems with the command that mends each."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator

import attrs
import msgspec

SCHEMA = "pdinfer.doctor/1"
WIDTH = 110


class Level(enum.Enum):
    """FAILURE: something will fail. WARNING: it works, but slowly or not as it was meant."""

    FAILURE = "failure"
    WARNING = "warning"


@attrs.frozen(kw_only=True)
class Fact:
    """Something that is so: a name, its value (None: there is none), and remarks in sentences."""

    name: str
    value: str | int | float | None
    remarks: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Problem:
    """Something that is wrong: a sentence, and a shell command that mends it ("" where nobody knows one)."""

    level: Level
    sentence: str
    mend: str = ""


Found = Iterator[Fact | Problem]
"""What the probe of a section yields."""


def failure(sentence: str, mend: str = "") -> Problem:
    """Make a problem of the level FAILURE."""
    return Problem(level=Level.FAILURE, sentence=sentence, mend=mend)


def warning(sentence: str, mend: str = "") -> Problem:
    """Make a problem of the level WARNING."""
    return Problem(level=Level.WARNING, sentence=sentence, mend=mend)


@attrs.frozen(kw_only=True)
class Section:
    """The facts of one subject, and the problems that follow from them."""

    name: str
    facts: tuple[Fact, ...] = ()
    problems: tuple[Problem, ...] = ()


@attrs.frozen(kw_only=True)
class Diagnosis:
    """What the doctor found on a machine."""

    sections: tuple[Section, ...]

    @property
    def failures(self) -> tuple[Problem, ...]:
        """What will fail."""
        return tuple(problem for _, problem in self._problems() if problem.level is Level.FAILURE)

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What works, but slowly or not as it was meant."""
        return tuple(problem for _, problem in self._problems() if problem.level is Level.WARNING)

    @property
    def exit_code(self) -> int:
        """1 if anything will fail, else 0."""
        return int(bool(self.failures))

    def to_json(self) -> bytes:
        """Return it as JSON, with the `schema`, the `exit_code` and all sections."""
        return msgspec.json.encode({"schema": SCHEMA, "exit_code": self.exit_code, "sections": self.sections})

    def __str__(self) -> str:
        """Return a report for people, with problems first."""
        return "\n".join(self._lines())

    def _problems(self) -> Iterator[tuple[Section, Problem]]:
        return ((section, problem) for section in self.sections for problem in section.problems)

    def _lines(self) -> Iterator[str]:
        yield f"pdinfer doctor: {_count(len(self.failures), 'failure')}, {_count(len(self.warnings), 'warning')}"
        for section, problem in sorted(self._problems(), key=lambda found: found[1].level is Level.WARNING):
            word = problem.level.value.upper()
            yield from ("", *_wrapped(f"{word:8} {section.name}: {problem.sentence}", " " * 9))
            if problem.mend:
                yield f"{'':9}$ {problem.mend}"
        for section in self.sections:
            yield from ("", section.name)
            width = max((len(fact.name) for fact in section.facts), default=0)
            for fact in section.facts:
                yield f"  {fact.name:<{width}}  {'-' if fact.value is None else fact.value}"
                for remark in fact.remarks:
                    yield from _wrapped(f"{'':{width + 4}}{remark}", " " * (width + 6))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
