"""Bugs with the processes of spawned engines."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_TESTS = "test_spawning.py::"

MUTANTS = [
    Mutant(
        "what a process wrote before it died is not in the error",
        "        self._read_stderr()\n        return f",
        "        self._wrote = b''\n        return f",
        _TESTS + "test_a_child_that_dies_while_it_loads_leaves_its_last_lines",
    ),
    Mutant(
        "an error keeps all that a process ever wrote",
        "(self._wrote + data)[-LAST_BYTES:]",
        "(self._wrote + data)",
        _TESTS + "test_a_child_that_dies_while_it_loads_leaves_its_last_lines",
    ),
    Mutant(
        "an interrupt while an engine loads leaves its process",
        "            except BaseException:\n                child.kill()\n",
        "            except Exception:\n                child.kill()\n",
        _TESTS + "test_an_interrupt_while_it_loads_leaves_no_process",
    ),
    Mutant(
        "a function that only this process has is handed over",
        '        if module == "__main__" or found != function:',
        "        if False:",
        _TESTS + "test_what_cannot_be_handed_over_is_refused_before_a_process_starts",
    ),
    Mutant(
        "a key is in the list of processes",
        'str(stderr), f"pdinfer-{role}", *sys.path],',
        'str(stderr), f"pdinfer-{role}", *sys.path, "a secret of a channel"],',
        _TESTS + "test_a_child_is_told_everything_over_the_pipe",
    ),
    Mutant(
        "a function that counts bytes is told steps of a warm-up",
        'telling(progress is True, f"warming up {cls.role}", "steps")',
        'telling(progress, f"warming up {cls.role}", "steps")',
        _TESTS + "test_progress_is_drawn_unless_it_is_not_wanted",
    ),
    Mutant(
        "the list of processes does not tell a prefill from a decode",
        'str(stderr), f"pdinfer-{role}", *sys.path],',
        'str(stderr), "pdinfer", *sys.path],',
        _TESTS + "test_progress_is_drawn_unless_it_is_not_wanted",
    ),
    Mutant(
        "a process that loads does not notice that its parent is gone",
        "            if parent.poll(LOOK_S):",
        "            if ended.wait(LOOK_S):",
        _TESTS + "test_a_child_that_loads_ends_with_its_parent",
    ),
    Mutant(
        "an error of making an engine is not told",
        "        _say(parent, Failed(error.code, str(error)))\n",
        "",
        _TESTS + "test_a_child_tells_why_there_is_no_engine",
    ),
    Mutant(
        "the socket folder of a process that was killed stays",
        "        remove_abandoned(Path(tempfile.gettempdir()))  # the folder of one that was killed\n",
        "",
        "test_spawn.py::test_engines_in_processes_of_their_own_serve_and_end",
    ),
]
