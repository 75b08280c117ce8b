"""The committed bytes: one file per protocol and version, which never changes once it exists.

python -m tests.golden        writes the missing files, which are those of a new version
"""

from __future__ import annotations

import json
import operator
from pathlib import Path

import msgspec

from pdinfer.kv.channel import wire
from pdinfer.kv.transports.stream import framing
from pdinfer.remote import messages
from tests.golden import samples, session

FOLDER = Path(__file__).parent
KEY = bytes(range(32))


def current() -> dict[str, dict[str, object]]:
    """Return, by file name, what the sources make of every sample now."""
    files: dict[str, dict[str, object]] = {
        f"{protocol.name}-{protocol.version}.json": dict(protocol.encoded()) for protocol in samples.protocols()
    }
    link = f"link-{wire.MAJOR}.{wire.MINOR}-{framing.VERSION}.json"
    files[link] = {"without a key": session.record(None), "with a key": session.record(KEY)}
    return files


def committed(name: str) -> dict[str, object] | None:
    """Return what the file of that name holds, or None when there is none."""
    path = FOLDER / name
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def problem(name: str, now: dict[str, object]) -> str | None:
    """Return what is wrong with the file of that name, and what to do; None when the sources make the same bytes."""
    golden = committed(name)
    if golden is None:
        return f"tests/golden/{name} is missing: write it with `python -m tests.golden` and commit it"
    same = _says_as_much if name.startswith("session-") else operator.eq
    changed = sorted(what for what in {**golden, **now} if not same(now.get(what), golden.get(what)))
    if not changed:
        return None
    constants = ", ".join(f"{p.constant} for {p.name}" for p in samples.protocols())
    return (
        f"the bytes of {', '.join(changed)} are not those of tests/golden/{name}, and peers of that version are about: "
        f"undo the change, or raise the version ({constants}), run `python -m tests.golden`, which writes a new file "
        f"next to this one, commit it, and say so in changes/"
    )


def _says_as_much(now: object, golden: object) -> bool:
    """Whether a message of a session has all that it had, and perhaps fields that came later. They are at their
    defaults: the golden bytes, which do not have them, are read as the same value."""
    now, golden = (
        msgspec.msgpack.decode(bytes.fromhex(each)[: -messages.DIGEST_BYTES]) if isinstance(each, str) else None
        for each in (now, golden)
    )
    return now is not None and _has_all(now, golden)


def _has_all(now: object, golden: object) -> bool:
    if isinstance(now, dict) and isinstance(golden, dict):
        return all(name in now and _has_all(now[name], field) for name, field in golden.items())
    if isinstance(now, list) and isinstance(golden, list):
        return len(now) == len(golden) and all(map(_has_all, now, golden))
    return now == golden


def write_missing() -> list[str]:
    """Write the files of versions that have none, and say what is wrong with the others."""
    problems = []
    for name, now in current().items():
        if committed(name) is None:
            (FOLDER / name).write_text(json.dumps(now, indent=1) + "\n", "utf-8")
        elif (said := problem(name, now)) is not None:
            problems.append(said)
    return problems
