"""Run a soak: requests under every known fault, for as long as there is time.

    python -m tests.soak --minutes 10 --seed 1 --out FILE      every transport in turn, and no ranks
    python -m tests.soak --minutes 4 --seed 1 --transports tcp,shm --ranks
    python -m tests.soak --minutes 10 --seed 1 --transports tcp,shm --restarts      any engine dies or freezes

Prints a JSON line each half minute and one with the result; the exit status is 1 when a promise did not hold. The seed
determines every request and every fault, with its target and its time in a round; the results depend on the machine
too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path

import torch

from tests.backends import why_no_mooncake
from tests.e2e.worker import TRANSPORTS
from tests.soak.ranks import soak_ranks
from tests.soak.run import Run, soak_transport


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--ranks", action="store_true", help="worlds of 2 + 2 ranks too, for as long")
    parser.add_argument("--restarts", action="store_true", help="kills and freezes of any engine, and no other faults")
    parser.add_argument("--out", type=Path, help="a file for the lines that are printed")
    options = parser.parse_args()
    parts = options.transports.split(",") if options.transports else []
    if unknown := set(parts) - set(TRANSPORTS):
        parser.error(f"no transport {', '.join(unknown)}: there are {', '.join(TRANSPORTS)}")
    if "mooncake" in parts and (why := why_no_mooncake()):
        parser.error(f"no Mooncake engine can be made here: {why}")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing else would thaw the frozen processes
    folder = own_folder()
    run = Run(options.seed, folder, options.out, restarts=options.restarts)
    end = time.monotonic() + 60.0 * options.minutes
    shares = len(parts) + options.ranks
    for number, part in enumerate(parts):
        soak_transport(run, part, time.monotonic() + (end - time.monotonic()) / (shares - number))
    if options.ranks:
        soak_ranks(run, end)
    return run.finish()


def own_folder() -> Path:
    """Make a folder for the temporary files of all processes, so that leftovers are seen. The folder goes after
    multiprocessing's own, which is inside it."""
    folder = tempfile.mkdtemp(prefix="pdsoak")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-1000)
    return Path(folder)


if __name__ == "__main__":
    raise SystemExit(main())
