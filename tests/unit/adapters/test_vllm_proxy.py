"""The proxy of the how-to: both engines get the request with one room, and the answer is decode's, as it comes."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.backends import ROOT, script
from tests.forks import FAR_S


class Backend(BaseHTTPRequestHandler):
    """Keeps what it is asked, and answers with its name."""

    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(self.server.name)

    def log_message(self, *_: object) -> None: ...


def served(handler: type[BaseHTTPRequestHandler], name: bytes = b"", status: int = 200) -> Any:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.name, server.status, server.asked = name, status, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def proxy() -> Iterator[tuple[Any, Any, Any]]:
    """Return a proxy, and the prefill and decode behind it."""
    module = script("examples/vllm_proxy.py")
    prefill, decode = served(Backend, b"prefill"), served(Backend, b"decode")
    kind = type("Quiet", (module.Proxy,), {"log_message": lambda *_: None})
    kind.prefill, kind.decode, kind.kv = url(prefill), url(decode), "tcp://127.0.0.1:7100"  # type: ignore[attr-defined]
    servers = served(kind), prefill, decode
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: Any, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(f"{url(server)}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=FAR_S) as answer:
        return bytes(answer.read())


def test_both_engines_get_the_request_and_decode_answers(proxy: tuple[Any, Any, Any]) -> None:
    front, prefill, decode = proxy
    assert ask(front, {"prompt": [1, 2], "max_tokens": 9, "stream": True}) == b"decode"
    while not prefill.asked:
        threading.Event().wait(0.01)
    ((path, first),), ((_, second),) = prefill.asked, decode.asked
    room = first["kv_transfer_params"]["room"]
    assert path == "/v1/completions"
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "room": room}
    assert (second["max_tokens"], second["stream"]) == (9, True)
    assert second["kv_transfer_params"] == {"do_remote_prefill": True, "room": room, "prefill": "tcp://127.0.0.1:7100"}
    assert len(bytes.fromhex(room)) == 16


def test_a_room_that_a_client_gives_is_not_used(proxy: tuple[Any, Any, Any]) -> None:
    front, _, decode = proxy
    ask(front, {"prompt": [1], "kv_transfer_params": {"do_remote_prefill": True, "prefill": "tcp://10.0.0.1:22"}})
    assert decode.asked[0][1]["kv_transfer_params"]["prefill"] == "tcp://127.0.0.1:7100"


def test_a_refusal_is_passed_on(proxy: tuple[Any, Any, Any]) -> None:
    front, _, decode = proxy
    decode.status = 400
    with pytest.raises(urllib.error.HTTPError) as info:
        ask(front, {"prompt": [1]})
    assert info.value.code == 400
    info.value.close()


def test_it_is_as_short_as_the_page_says() -> None:
    assert len((ROOT / "examples" / "vllm_proxy.py").read_text("utf-8").splitlines()) <= 60
