"""What `--selftest` does: it starts the server, asks it, kills its prefill while it answers, and makes it drain."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class Client:
    """Asks a server over HTTP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, data, headers), timeout=TIMEOUT_S) as answer:  # noqa: S310 - our own server
            return str(answer.read().decode())

    def complete(self, prompt: str) -> str:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 60, "stop": ";"}
        return str(json.loads(self.ask("/v1/completions", body))["choices"][0]["text"])

    def engines(self) -> dict[str, int]:
        """Return the processes of the engines by role, and nothing before the server is there."""
        try:
            return dict(json.loads(self.ask("/health"))["engines"])
        except URLError:
            return {}


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("it took too long")
        time.sleep(0.1)


def check(what: str, is_so: bool) -> None:
    print(f"{'ok  ' if is_so else 'FAIL'}  {what}", flush=True)
    if not is_so:
        raise SystemExit(1)


def ask_everything(client: Client) -> None:
    check("a completion with a stop string: calc 47+38=85", client.complete("calc 47+38=") == "85")
    question = [{"role": "user", "content": "set kqz=48213; get kqz="}]
    chat = {"messages": question, "temperature": 0, "max_tokens": 5, "stream": True}
    shown = [json.loads(line[6:]) for line in client.ask("/v1/chat/completions", chat).split("\n\n") if "{" in line]
    check("a chat that streams: 48213", "".join(one["choices"][0]["delta"]["content"] for one in shown) == "48213")
    try:
        client.ask("/v1/completions", {"prompt": "a", "temperature": -1})
    except HTTPError as error:
        said = json.loads(error.read())["error"]["message"]
        check(f"a bad parameter: {error.code}, {said}", error.code == 400)
    else:
        check("a bad parameter is refused", False)
    check("metrics", "pdinfer_requests_ended_total" in client.ask("/metrics"))


def kill_the_prefill(client: Client) -> None:
    questions = [f"calc {a}+{b}=" for a in (11, 23, 47) for b in (12, 31, 38)]
    quiet = list(map(client.complete, questions))
    killed = client.engines()["prefill"]
    with ThreadPoolExecutor(len(questions)) as threads:
        busy = threads.map(client.complete, questions)
        os.kill(killed, signal.SIGKILL)
        check("nine completions while the prefill is killed: the same answers", list(busy) == quiet)
    until(lambda: client.engines().get("prefill", killed) != killed)
    check(f"prefill {killed} was replaced by {client.engines()['prefill']}", True)
    check("a completion by the new prefill", client.complete("calc 9*7=") == "63")


def selftest() -> int:
    port = free_port()
    server = subprocess.Popen([sys.executable, str(Path(__file__).parent), "--port", str(port)], stdout=sys.stderr)
    try:
        client = Client(port)
        until(lambda: client.engines() or server.poll() is not None)
        ask_everything(client)
        kill_the_prefill(client)
        pids = client.engines().values()
        server.terminate()
        check("SIGTERM: it drains and exits with status 0", server.wait(TIMEOUT_S) == 0)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        check("no process is left", True)
    finally:
        server.kill()
        server.wait()
    return 0
