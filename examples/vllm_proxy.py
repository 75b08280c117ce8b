"""Give each request to a prefill and to a decode of vLLM at once, and answer with what decode says:
    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --kv tcp://127.0.0.1:7100
`--kv` is the `listen` of the prefill's connector. See docs/howto/inside-vllm.md."""

import argparse
import contextlib
import json
import os
import threading
import urllib.error
import urllib.request
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def post(url: str, body: dict[str, Any]) -> HTTPResponse | urllib.error.HTTPError:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, kind)  # noqa: S310 - whoever starts this names the hosts
    try:
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=600)  # noqa: S310
    except urllib.error.HTTPError as refused:
        return refused
    return answer


def compute(url: str, body: dict[str, Any]) -> None:
    """Have a prefill compute a prompt. If it does not, decode's connector says so."""
    with contextlib.suppress(OSError):
        post(url, body).read()


class Proxy(BaseHTTPRequestHandler):
    """Answers POSTs; the addresses are those of the command line."""

    prefill = decode = kv = ""

    def do_POST(self) -> None:
        body, room = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), os.urandom(16).hex()
        one = {"stream": False, "stream_options": None, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}
        first = {**body, **one, "kv_transfer_params": {"do_remote_decode": True, "room": room}}
        threading.Thread(target=compute, args=(self.prefill + self.path, first), daemon=True).start()
        loads = {"do_remote_prefill": True, "room": room, "prefill": self.kv}
        with post(self.decode + self.path, {**body, "kv_transfer_params": loads}) as answer:
            self.send_response(answer.status or 502)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.end_headers()
            while data := answer.read1():
                self.wfile.write(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("prefill", "decode", "kv"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    Proxy.prefill, Proxy.decode, Proxy.kv = arguments.prefill, arguments.decode, arguments.kv
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Proxy).serve_forever()
