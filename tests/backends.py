"""Which optional backends work on this machine, each tried once, with the library itself, by every test that needs it;
and what else tests start or load: children, and scripts that are in no package."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forks import apart

ROOT = Path(__file__).parents[1]


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment for a Python that must find the library and the tests of this checkout first,
    and then whatever this process was told to find besides."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def script(path: str) -> Any:
    """Return the module of a script at this path of the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def why_no_mooncake() -> str | None:
    """Return why a Mooncake engine cannot be made here, or None where it can. Another process tries it: the package may
    be there while a library that it loads is not, and the resulting crash must not hit this process."""
    try:
        why: str | None = apart(_try_mooncake)
    except EOFError:
        why = "the process that tried it died"
    return why


def _try_mooncake() -> str | None:
    import pdinfer as pd

    with open(os.devnull, "wb") as nowhere:  # where its library says so much
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        pd.kv.MooncakeEngine().close()
    except (pd.PDInferError, ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def need_mooncake() -> None:
    """Skip the test where no Mooncake engine can be made; pytest's last lines name it."""
    if why := why_no_mooncake():
        pytest.skip(f"could not import 'mooncake': {why}")
