"""Bugs with the processes that `spawn` starts."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_TESTS = "tests/unit/remote/test_spawning.py::"
_PARENT = "src/pdinfer/remote/spawning.py"
_CHILD = "src/pdinfer/remote/child.py"

MUTANTS = [
    Mutant(
        "what a process wrote before it died is not in the error",
        _PARENT,
        "        self._read_stderr()\n        return f",
        "        self._wrote = b''\n        return f",
        _TESTS + "test_a_child_that_dies_while_it_loads_leaves_its_last_lines",
    ),
    Mutant(
        "an error keeps all that a process ever wrote",
        _PARENT,
        "(self._wrote + data)[-LAST_BYTES:]",
        "(self._wrote + data)",
        _TESTS + "test_a_child_that_dies_while_it_loads_leaves_its_last_lines",
    ),
    Mutant(
        "an interrupt while an engine loads leaves its process",
        _PARENT,
        "    except BaseException:\n        child.kill()\n        raise\n",
        "    except Exception:\n        child.kill()\n        raise\n",
        _TESTS + "test_an_interrupt_while_it_loads_leaves_no_process",
    ),
    Mutant(
        "a function that only this process has is handed over",
        "src/pdinfer/remote/orders.py",
        '        if module == "__main__" or found != function:',
        "        if False:",
        _TESTS + "test_what_cannot_be_handed_over_is_refused_before_a_process_starts",
    ),
    Mutant(
        "a key is in the list of processes",
        _PARENT,
        "str(theirs.fileno()), str(stderr), *sys.path],",
        'str(theirs.fileno()), str(stderr), *sys.path, "a secret of a channel"],',
        _TESTS + "test_a_child_is_told_everything_over_the_pipe",
    ),
    Mutant(
        "a process that loads does not notice that its parent is gone",
        _CHILD,
        "            if self._parent.poll(LOOK_S):",
        "            if self._ended.wait(LOOK_S):",
        _TESTS + "test_a_child_that_loads_ends_with_its_parent",
    ),
    Mutant(
        "an error of making an engine is not told",
        _CHILD,
        "        _say(parent, Failed(error.code, str(error)))\n",
        "",
        _TESTS + "test_a_child_tells_why_there_is_no_engine",
    ),
    Mutant(
        "the socket folder of a process that was killed stays",
        _PARENT,
        "    remove_abandoned(Path(tempfile.gettempdir()))  # the folder of one that was killed\n",
        "",
        "tests/e2e/test_spawn.py::test_engines_in_processes_of_their_own_serve_and_end",
    ),
]
