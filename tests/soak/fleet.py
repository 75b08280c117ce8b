"""Two prefills and two decodes in processes of their own, the faults that strike them, and how they are made whole
again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import attrs

import pdinfer as pd
from tests.e2e.worker import Worker
from tests.forks import FAR_S, context
from tests.soak import hostile
from tests.soak.book import not_whole
from tests.soak.timetable import MORTAL, SEATS, Fault

CACHE = pd.CacheConfig(page_size=4, num_pages=64)
"""Pages for three of the longest requests, so that some wait for pages and some are retracted."""
ENGINE = pd.EngineConfig(chunked_prefill_size=16, max_running_requests=4)
REMOTE = pd.remote.RemoteConfig(hung_s=2.0)
PAIRING = pd.PairingConfig(port_wait_s=20.0)
JOIN_S = 90.0
"""The seconds after which a new process takes part, on a machine with other work to do."""


class Broken(Exception):
    """A promise did not hold, and this fleet cannot be used any more."""


@attrs.define(eq=False)
class Seat:
    """A place of the fleet, whichever process takes it. `folder` belongs to its process alone; while the file `hung`
    exists, steps hang. The first process of a role talks to its client over a pipe. The connection of the second one is
    also cut, and made anew."""

    number: int
    role: str
    folder: Path
    worker: Worker
    client: Any = None
    is_taken: bool = False
    is_frozen: bool = False

    @property
    def hung(self) -> Path:
        return self.folder / "hung"


class Fleet:
    """The fleet of one transport. The thread that steps calls `strike` and `undo`; new processes come in threads of
    their own, as in a host."""

    def __init__(self, transport: str, *, family: str, seed: int) -> None:
        self.transport, self.family, self.seed = transport, family, seed
        self.folder = Path(tempfile.mkdtemp(prefix="fleet"))
        self.slow = self.folder / "slow"
        self.struck: Counter[str] = Counter()
        self.errors: list[str] = []
        self._alive_at: dict[pd.PeerAddress, float] = {}
        self._due: list[tuple[float, Any]] = []
        self._joining: list[threading.Thread] = []
        self._pausing: list[subprocess.Popen[bytes]] = []
        self._num_attacks = 0
        self._hostile, theirs = context().Pipe()
        self._stranger = context().Process(target=hostile.work, args=(theirs, family, seed, CACHE), daemon=True)
        self._stranger.start()
        theirs.close()
        self.seats = [self._seat(number) for number in range(len(SEATS))]
        for seat in self.seats:
            self._serve(seat)
        self.pairing = pd.Pairing(
            [seat.client for seat in self.seats if seat.role == "prefill"],
            [seat.client for seat in self.seats if seat.role == "decode"],
            config=PAIRING,
        )
        assert self._hostile.poll(FAR_S), "the hostile process does not start"
        self._hostile.recv()

    def _seat(self, number: int) -> Seat:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return Seat(number, SEATS[number], folder, Worker(folder))

    def _serve(self, seat: Seat) -> None:
        seat.client = seat.worker.serve(
            seat.role,
            family=self.family,
            seed=self.seed,
            page_size=CACHE.page_size,
            num_pages=CACHE.num_pages,
            config=ENGINE,
            transport=self.transport,
            slow_while=self.slow,
            hung_while=seat.hung,
            remote=REMOTE,
            is_cuttable=True,
            listen=None if seat.number in MORTAL else seat.folder / "host",
        )
        seat.is_taken = True

    # -- faults -----------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Begin a fault and schedule its end. A fault for a seat that is empty now strikes nothing."""
        seat = self.seats[fault.seat]
        if fault.kind != "pause" and not seat.is_taken:
            self.struck["missed"] += 1
            return
        self.struck[f"attack/{fault.attack}" if fault.attack else fault.kind] += 1
        if fault.kind == "kill":
            seat.is_taken = False
            self._start(self._replace, fault.seat)
        elif fault.kind in ("freeze", "stall"):
            seat.worker.freeze()
            seat.is_frozen = True
            self._later(fault.seconds, lambda: self._thaw(seat))
        elif fault.kind == "cut":
            os.kill(seat.worker.process.pid, signal.SIGUSR1)
        elif fault.kind == "hang":
            seat.hung.touch()
            self._later(fault.seconds, lambda: seat.hung.unlink(missing_ok=True))
        elif fault.kind == "pause":
            command = f"kill -STOP {os.getpid()}; sleep {fault.seconds}; kill -CONT {os.getpid()}"
            self._pausing.append(subprocess.Popen(["/bin/sh", "-c", command]))
        else:
            self._num_attacks += 1
            self._hostile.send((fault.attack, seat.client.address.endpoints[0], fault.seconds))

    def settled_s(self) -> float:
        """Return for how long there has been a port of each role that lives. Call it all the time."""
        now, ports = time.monotonic(), {port.address for port in self.pairing.ports}
        lives = {
            seat.client.address: seat.role
            for seat in list(self.seats)
            if seat.is_taken and not seat.is_frozen and seat.client.address in ports
        }
        self._alive_at = {address: self._alive_at.get(address, now) for address in lives}
        ages = {role: [now - at for address, at in self._alive_at.items() if lives[address] == role] for role in SEATS}
        return min(max(each, default=0.0) for each in ages.values())

    def advance(self) -> None:
        """End the faults whose time is over."""
        now = time.monotonic()
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()

    def undo(self) -> None:
        """End everything at once except attacks, which are over soon."""
        for _, action in self._due:
            action()
        self._due = []

    def _later(self, seconds: float, action: Any) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _thaw(self, seat: Seat) -> None:
        seat.is_frozen = False
        with contextlib.suppress(ProcessLookupError, AttributeError):
            seat.worker.thaw()

    # -- new processes ----------------------------------------------------------------------------------------------

    def _start(self, work: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException:  # noqa: BLE001 whatever it was is told at the end of the round
                self.errors.append(traceback.format_exc(limit=-4))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._joining.append(thread)

    def _replace(self, number: int) -> None:
        """Kill a process and start another one in its place."""
        old = self.seats[number]
        old.worker.kill()
        old.client.close()
        old.worker.control.close()
        shutil.rmtree(old.folder)  # the sockets of its transport were made where the host said
        new = self._seat(number)
        self._serve(new)
        end = time.monotonic() + JOIN_S
        while True:
            try:
                self.pairing.add(new.client)
                break
            except pd.TransferError:  # all of the other side were frozen
                if time.monotonic() > end:
                    raise
        self.seats[number] = new

    # -- a quiet moment ---------------------------------------------------------------------------------------------

    @property
    def is_restless(self) -> bool:
        """Return whether something that was begun is still under way."""
        self._joining = [thread for thread in self._joining if thread.is_alive()]
        self._pausing = [one for one in self._pausing if one.poll() is None]
        while self._hostile.poll():
            self._hostile.recv()
            self._num_attacks -= 1
        return bool(self._joining or self._pausing or self._num_attacks)

    def disquiet(self) -> str:
        """Why this is no quiet moment; empty when everybody is here, linked, and holds nothing."""
        ports = {port.address for port in self.pairing.ports}
        told = [f"{self.pairing.num_unfinished} requests"] if self.pairing.num_unfinished else []
        for seat in self.seats:
            name = f"seat {seat.number} ({seat.role})"
            if not seat.worker.process.is_alive():
                raise Broken(f"{name}: its process ended with {seat.worker.process.exitcode}")
            if seat.client.address not in ports:
                told.append(f"{name} is not back: {self._reason(seat.client.address)}")
            elif left := not_whole(seat.client.load()):
                told.append(f"{name} has {left}")
        told += [f"no link {self._sides(*pair)}" for pair in self.pairing.stats.links_down]
        return "; ".join(told)

    def _sides(self, prefill: pd.PeerAddress, decode: pd.PeerAddress) -> str:
        """Return what either end says of a link."""
        told = []
        for mine, other in ((prefill, decode), (decode, prefill)):
            for seat in (seat for seat in self.seats if seat.client.address == mine):
                peers = {peer.address.engine_id: peer.connected for peer in seat.client.load().kv.peers}
                said = {True: "a link", False: "no link", None: "nothing"}[peers.get(other.engine_id)]
                told.append(f"seat {seat.number} ({seat.role}, {str(mine)[:15]}) tells of {said}")
        return ", ".join(told)

    def _reason(self, address: pd.PeerAddress) -> str:
        return next((lost.reason for lost in self.pairing.stats.ports_lost[::-1] if lost.address == address), "unknown")

    def close(self) -> list[str]:
        """Close everything; return what engines still held (requests or pages) when they were closed."""
        self.undo()
        self.pairing.close()
        told = []
        for seat in self.seats:
            name = f"seat {seat.number} ({seat.role})"
            with contextlib.suppress(ProcessLookupError):
                seat.worker.thaw()
            try:
                left = seat.worker.stopped()
                if left != (0, 0):
                    told.append(f"{name} was closed with {left} (requests, pages)")
                seat.worker.end()
            except (AssertionError, OSError, EOFError) as error:
                told.append(f"{name} was not closed: {error}")
                seat.worker.kill()
            seat.worker.control.close()
        self._stranger.kill()
        self._stranger.join()
        self._hostile.close()
        shutil.rmtree(self.folder)
        return told
