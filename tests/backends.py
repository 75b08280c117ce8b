"""Which optional backends work on this machine. Each is tried once, with the library itself, by every test that needs
it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRY_MOONCAKE = "import pdinfer as pd; pd.kv.MooncakeEngine().close()"


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment for a Python that must find the library and the tests of this checkout first,
    and then whatever this process was told to find besides."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


@functools.cache
def why_no_mooncake() -> str | None:
    """Return why a Mooncake engine cannot be made here, or None where it can. Another process tries it: the package may
    be there while a library that it loads is not, and the resulting crash must not hit this process."""
    done = subprocess.run(
        [sys.executable, "-c", TRY_MOONCAKE],
        env=child_environment(),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["no message"])[-1] + f" (exit status {done.returncode})"


def need_mooncake() -> None:
    """Skip the test where no Mooncake engine can be made; pytest's last lines name it."""
    if why := why_no_mooncake():
        pytest.skip(f"could not import 'mooncake': {why}")
