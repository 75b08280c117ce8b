"""`python -m pdinfer doctor [--json]`: what will fail on this machine, what is slow, and how to mend it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdinfer.diagnosis.doctor import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the status to exit with: that of the doctor is 1 when something will fail."""
    parser = argparse.ArgumentParser(prog="python -m pdinfer", description="Tools of pdinfer.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "say what will fail on this machine (exit status 1), what is slow, and the commands that mend it"
    commands.add_parser("doctor", help=about, description=about).add_argument(
        "--json", action="store_true", help="print the findings as JSON"
    )
    options = parser.parse_args(arguments)
    diagnosis = doctor()
    sys.stdout.write((diagnosis.to_json().decode() if options.json else str(diagnosis)) + "\n")
    return diagnosis.exit_code


if __name__ == "__main__":
    sys.exit(main())
