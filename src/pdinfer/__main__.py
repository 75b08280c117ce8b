"""`python -m pdinfer doctor [--json]`: what will fail on this machine, what is slow, and how to mend it.
`python -m pdinfer build-kernels [--for CPU,...] [--into FOLDER]`: kernels for machines without a C compiler."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pdinfer.diagnosis.doctor import doctor
from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native.build import EXTENSIONS, families
from pdinfer.kv.fused import SOURCES
from pdinfer.process.ahead import Built, build_ahead


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the status to exit with: that of the doctor is 1 when something will fail, that of
    build-kernels when something was not built."""
    parser = argparse.ArgumentParser(prog="python -m pdinfer", description="Tools of pdinfer.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "say what will fail on this machine (exit status 1), what is slow, and the commands that mend it"
    commands.add_parser("doctor", help=about, description=about).add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    about = "compile the kernels for CPUs now, for machines without a C compiler; each takes the best that it can run"
    ahead = commands.add_parser("build-kernels", help=about, description=about)
    ahead.add_argument(
        "--for", dest="cpus", default="", metavar="CPU,...", help="as -march has them; default: this CPU"
    )
    ahead.add_argument("--into", type=Path, metavar="FOLDER", help="default: next to the package, where they are found")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build-kernels":
            return _build_kernels([name for name in options.cpus.split(",") if name], options.into)
        diagnosis = doctor()
        _tell(diagnosis.to_json().decode() if options.json else str(diagnosis), sys.stdout)
    except (BackendUnavailable, OSError) as error:
        _tell(f"{options.command}: {error}", sys.stderr)
        return 1
    return diagnosis.exit_code


def _build_kernels(cpus: Sequence[str], into: Path | None) -> int:
    status = 0
    for built in build_ahead((*families(), SOURCES), cpus, into):
        _tell(_line_of(built), sys.stdout)
        for failure in built.failures:
            _tell(f"for {built.cpu}: {failure}", sys.stderr)
            status = 1
    return status


def _tell(line: str, stream: TextIO | None) -> None:
    """Write a line, unless whoever started this has closed the stream, or reads no more: the status says the most. What
    the stream cannot encode, such as the name of a file, is spelled out."""
    if stream is not None:
        encoding = stream.encoding or "utf-8"
        try:
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
        except OSError as error:
            with open(os.devnull, "w") as nowhere:  # for what is left, which Python would write at its end, and fail
                os.dup2(nowhere.fileno(), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise


def _line_of(built: Built) -> str:
    sets = " ".join(name for name in EXTENSIONS if name in built.sets) or "no vectors"
    names = ", ".join(path.name.partition("-")[0] for path in built.files) or "nothing"
    folders = " and ".join(str(folder) for folder in dict.fromkeys(path.parent for path in built.files))
    how = "" if built.known else ", which the compiler does not know, by its instruction sets"
    return f"{built.cpu}{how}: {names} for CPUs with {sets}, in {folders}"


if __name__ == "__main__":
    sys.exit(main())
