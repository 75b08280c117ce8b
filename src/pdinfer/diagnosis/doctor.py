"""Examines a machine: every section has a probe, and one that raises is a finding like any other."""

from __future__ import annotations

from collections.abc import Callable

from pdinfer.diagnosis import affinity, limits, network, software, variables
from pdinfer.diagnosis.machine import Machine
from pdinfer.diagnosis.report import Diagnosis, Fact, Found, Problem, Section, warning

PROBES: tuple[tuple[str, Callable[[Machine], Found]], ...] = (
    ("versions", software.versions),
    ("devices", software.devices),
    ("libraries", software.libraries),
    ("ops", software.ops),
    ("compiler", software.compilers),
    ("limits", limits.limits),
    ("ports", limits.ports),
    ("network", network.network),
    ("ranks", affinity.ranks),
    ("variables", variables.variables),
)


def doctor(machine: Machine | None = None) -> Diagnosis:
    """Examine this machine: what will fail, what is slow, and the command that mends it.

    `print(pd.doctor())` is the report, and `to_json()` the same for programs; on a command line, `python -m pdinfer
    doctor [--json]`. Changes nothing but the cache of compiled kernels. Imports optional libraries in processes of
    their own, which takes seconds, and starts CUDA in this one where there is a GPU. Raises nothing: a probe that fails
    is reported. `machine` is for tests."""
    machine = machine or Machine()
    return Diagnosis(sections=tuple(_section(name, probe, machine) for name, probe in PROBES))


def _section(name: str, probe: Callable[[Machine], Found], machine: Machine) -> Section:
    facts: list[Fact] = []
    problems: list[Problem] = []
    try:
        for found in probe(machine):
            (problems if isinstance(found, Problem) else facts).append(found)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine, the rest is looked at
        problems.append(warning(f"could not be examined to its end: {type(error).__name__}: {error}"))
    return Section(name=name, facts=tuple(facts), problems=tuple(problems))
