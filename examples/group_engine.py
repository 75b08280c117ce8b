"""Serve one engine of a group, as ranks that torchrun starts; each of its ports announces itself, or is found by DNS.

    torchrun --nproc-per-node 8 ... examples/group_engine.py --role decode --key-file KEY --folder FOLDER CHECKPOINT

A SIGTERM drains it: the front end sends it nothing new, lets its requests end, and lets go. Without `--folder` each
rank of a node listens on the port of `--listen` or one of the next, where a service of Kubernetes leads.
`examples/slurm` and `examples/kubernetes` start it.
"""

import argparse
import os
import signal
import threading
from pathlib import Path

import torch

import pdinfer as pd
from pdinfer.remote.directory import Directory, Door, Folder


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--key-file", type=Path, required=True, help="at least 16 random bytes in hex")
    parser.add_argument("--folder", type=Path, help="the directory of the group, on a file system that all hosts see")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", help="HOST:PORT of the first rank here, which the front end reaches"
    )
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--num-pages", type=int, help="the default takes what memory leaves")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--ready-file", type=Path, help="is made when the engine is ready, for a probe")
    parser.add_argument("--return-s", type=float, default=600.0, help="how long it waits without a front end")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    drain = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: drain.set())
    key = bytes.fromhex(options.key_file.read_text().strip())
    host, _, first = options.listen.rpartition(":")
    port = int(first) and int(first) + int(os.environ.get("LOCAL_RANK", "0"))
    topology = pd.Topology.from_env(tp_size=options.tp_size)
    device = f"cuda:{topology.rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    model = pd.load_model(options.checkpoint, device=device, topology=topology)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=options.page_size, num_pages=options.num_pages))
    channel = pd.KVChannel(pool, pd.kv.SocketTransport(host=host), key=key)
    with (pd.PrefillEngine if options.role == "prefill" else pd.DecodeEngine)(model, channel) as engine:
        engine.warm_up()
        if options.ready_file is not None:
            options.ready_file.touch()
        config = pd.remote.RemoteConfig(return_s=options.return_s)
        if not topology.is_leader:
            pd.remote.serve(engine, None)
        else:
            # a client of NFS may show a refresh a minute late
            directory = None if options.folder is None else Directory(Folder(options.folder), key=key, ttl_s=120.0)
            with Door(host, port, key=key) as door:
                pd.remote.serve(engine, door, config=config, directory=directory, drain=drain)
    model.groups.close()


if __name__ == "__main__":
    main()
