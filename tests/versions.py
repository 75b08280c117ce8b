"""The commit at which a result was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def git(*arguments: str) -> str:
    """Return what git prints about this checkout, stripped."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """Return the commit of this checkout, with "+changes" where files differ from it; "unknown" in a tree without one,
    without git, and where git does not trust the tree since somebody else owns it."""
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (subprocess.CalledProcessError, FileNotFoundError):
        return "unknown"
