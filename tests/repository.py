"""The text files of this repository, and what none of them may say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

# Folders of one machine. A URL or a relative path that goes through a folder of that name is fine.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp/w)/")


def machine_paths(files: Iterable[tuple[str, str]]) -> list[str]:
    """Text, given as (path, text), that names folders of one particular machine."""
    return [
        f"{path}:{number} names a folder of one machine: {line.strip()[:80]}"
        for path, text in files
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]


def repository_files(root: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every text file that git tracks or would add; without git, of every file but caches."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [root / name for name in names if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        made = re.compile(r"(^|/)(\.git|\.venv|\.\w+_cache|\.hypothesis|__pycache__|build|dist)(/|$)")
        paths = [path for path in sorted(root.rglob("*")) if not made.search(path.relative_to(root).as_posix())]
    for path in paths:
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if b"\0" not in data:
                yield path.relative_to(root).as_posix(), data.decode("utf-8", errors="replace")
