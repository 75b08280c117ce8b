"""Bugs in the examination of a machine."""

from __future__ import annotations

from tests.planted.mutant import Mutant

DOCTOR, VARIABLES = "test_doctor.py::", "test_variables.py::"
FAULTS, HEALTHY = (
    DOCTOR + "test_a_fault_is_found_and_only_that",
    DOCTOR + "test_nothing_is_wrong_with_a_machine_as_it_should_be",
)
CONTRADICTIONS = VARIABLES + "test_a_contradiction_is_found_and_only_that"

MUTANTS = [
    Mutant(
        "a probe that raises ends the doctor",
        "    except Exception as error:  # noqa: BLE001 - whatever is wrong",
        "    except OSError as error:  # whatever is wrong",
        DOCTOR + "test_the_doctor_survives_whatever_is_broken",
    ),
    Mutant(
        "a laptop is ill because RDMA would lock more memory",
        "not is_free and has_rdma(machine):",
        "not is_free:",
        HEALTHY,
    ),
    Mutant(
        "who may lock any memory is told to raise the limit",
        "is_free = locked is None or bool(held and int(held[1], 16) & CAP_IPC_LOCK)",
        "is_free = locked is None",
        DOCTOR + "test_who_may_lock_any_memory_is_not_limited",
    ),
    Mutant(
        "what will fail does not change the exit status",
        "        return int(bool(self.failures))\n",
        "        return 0\n",
        FAULTS,
    ),
    Mutant(
        "Gloo is believed to take NCCL's patterns",
        "if names and name not in here]:",
        "if names and not _matching(name, here)]:",
        CONTRADICTIONS,
    ),
    Mutant(
        "an address of zeros is one",
        'not (gid or "").strip("0:"):',
        'not (gid or "").strip():',
        CONTRADICTIONS,
    ),
    Mutant(
        "every card is near every GPU",
        "if ours == theirs]",
        "if theirs]",
        DOCTOR + "test_every_gpu_is_told_its_nearest_card",
    ),
    Mutant(
        "no library is tried",
        '    command = [sys.executable, "-c", f"import {module}"]\n',
        '    command = [sys.executable, "-c", ""]\n',
        DOCTOR + "test_imports_are_tried_in_another_process",
    ),
]
