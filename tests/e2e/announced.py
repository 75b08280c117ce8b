"""An engine that announces itself in a folder, as a platform would start it. Its key comes on stdin, as hex:

    python -m tests.e2e.announced ROLE FOLDER now|waits

A SIGTERM drains it. One that `waits` announces itself after another line on stdin."""

from __future__ import annotations

import signal
import sys
import threading

import torch

import pdinfer as pd
from tests.backends import ROOT


def main(role: str, folder: str, waits: str) -> None:
    key = bytes.fromhex(sys.stdin.readline())
    torch.set_num_threads(1)
    drain = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: drain.set())
    model = pd.load_model(ROOT / "examples" / "tiny", dtype=torch.float32)
    channel = pd.KVChannel(
        pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=128)), pd.kv.SocketTransport(), key=key
    )
    engine = (pd.PrefillEngine if role == "prefill" else pd.DecodeEngine)(model, channel)
    door = pd.remote.directory.Door("127.0.0.1", 0, key=key)
    if waits == "waits":
        sys.stdin.readline()
    place = pd.remote.directory
    directory = place.Directory(place.Folder(folder), key=key, ttl_s=2.0)
    pd.remote.serve(engine, door, directory=directory, drain=drain)


if __name__ == "__main__":
    main(*sys.argv[1:])
