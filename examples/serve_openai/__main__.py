"""Serve a checkpoint to OpenAI's clients: python examples/serve_openai [CHECKPOINT] [--port 8000] [--selftest]"""

import argparse
import signal
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("checkpoint", nargs="?", type=Path, default=Path(__file__).resolve().parents[1] / "tiny")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--prefills", type=int, default=1)
parser.add_argument("--decodes", type=int, default=1)
parser.add_argument("--max-queued", type=int, default=1024, help="requests beyond these are refused with 429")
parser.add_argument("--selftest", action="store_true", help="start it, ask it, kill a prefill, and tell what happened")

if __name__ == "__main__":
    args = parser.parse_args()
    try:
        import uvicorn
        from guards import Protocol, must_be_free
        from selftest import selftest
        from server import DRAIN_S, make_app

        import pdinfer as pd
    except ImportError as missing:
        sys.exit(f"the example cannot import all that it needs ({missing}): pip install 'pdinfer[text,serve]'")
    if args.selftest:
        sys.exit(selftest())
    must_be_free(args.host, args.port)
    config = pd.PairingConfig(port_wait_s=60, max_queued_requests=args.max_queued)
    app = make_app(args.checkpoint.absolute(), args.prefills, args.decodes, config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which uvicorn raises again when it has drained
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=int(DRAIN_S), http=Protocol, ws="none")
