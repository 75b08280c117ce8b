"""The example of a server, asked by OpenAI's own client: what it answers, and what becomes of streams when clients
leave and engines die."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import pdinfer as pd
from pdinfer.pairing.health import Health, HealthState
from tests.backends import ROOT, child_environment
from tests.e2e.test_spawn import is_there
from tests.forks import FAR_S
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

EXAMPLE = ROOT / "examples" / "serve_openai"
TINY = ROOT / "examples" / "tiny"
MAX_LINES = 150
STORY = "One morning Tom found an old key by the river. He "
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bb"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}


@pytest.fixture(autouse=True, scope="module")
def needed() -> None:
    """Not at the top: each process that collects tests would take a second to import them."""
    for name in ("tokenizers", "jinja2", "fastapi", "uvicorn"):
        pytest.importorskip(name, reason=f"the example needs the package {name}")
    pytest.importorskip("openai", reason="the example is tried with the package openai")


def load(name: str) -> Any:
    """A module of the example, made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)


def free_port() -> int:
    return int(load("selftest").free_port())


@contextlib.contextmanager
def served_here(config: pd.PairingConfig) -> Iterator[tuple[Any, pd.Pairing, Any]]:
    """A client of the example, whose engines are in this process, its Pairing, and its Engines."""
    import openai
    import uvicorn

    server, pairings, engines_of = load("server"), [], []
    local = pd.Pairing.local(
        TINY, cache=pd.CacheConfig(page_size=16, num_pages=512), logits_processors=pd.text.schema_processors(TINY)
    )
    engines = {port.role: port for port in local.ports}
    for engine in engines.values():
        local.remove(engine, drain_s=0.0)

    async def start(self: Any, role: str) -> Any:
        engines_of.append(self)
        engines[role].process = SimpleNamespace(pid=0)  # type: ignore[attr-defined]
        self.ports.append(engines[role])
        return engines[role]

    def pair(*sides: Any, **more: Any) -> pd.Pairing:
        pairings.append(pd.Pairing(*sides, **more))
        return pairings[0]

    server.Engines.start = start
    server.pd = SimpleNamespace(**{name: getattr(pd, name) for name in dir(pd)} | {"Pairing": pair})
    app, port = server.make_app(TINY, 1, 1, config), free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none", http="h11", loop="asyncio"))
    thread = started(running.run)
    try:
        wait_until(lambda: running.started or not thread.is_alive())
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            yield client, pairings[0], engines_of[0]
    finally:
        running.should_exit = True
        check_ends(thread)


def refused(call: Callable[[], object]) -> Any:
    import openai

    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.body["message"]
    return caught.value


def test_the_client_of_openai_is_answered() -> None:
    with served_here(pd.PairingConfig(max_queued_requests=8)) as (client, pairing, _):
        ask = client.completions.create
        done = ask(model="tiny", prompt="calc 47+38=", temperature=0, max_tokens=20, stop=[";", "\n"], logprobs=2)
        assert (done.choices[0].text, done.choices[0].finish_reason) == ("85", "stop")
        assert [len(best) for best in done.choices[0].logprobs.top_logprobs] == [2, 2, 2]
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (12, 3)
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "set kqz=48213; get kqz="}],
            "temperature": 0,
        }
        whole = client.chat.completions.create(**chat, max_tokens=5, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "48213"
        assert [told.token for told in whole.choices[0].logprobs.content] == list("48213")
        parts = list(
            client.chat.completions.create(**chat, max_tokens=5, stream=True, stream_options={"include_usage": True})
        )
        assert "".join(part.choices[0].delta.content for part in parts if part.choices) == "48213"
        assert (parts[-1].usage.completion_tokens, parts[0].usage) == (5, None)
        assert parts[-1].usage.pdinfer[0]["timeline"]["first_token_s"] > 0
        several = ask(model="tiny", prompt=["a ", "b "], n=2, seed=3, max_tokens=8, temperature=1)
        assert len({choice.text for choice in several.choices}) > 2
        assert several == several.model_copy(
            update={"choices": ask(model="tiny", prompt=["a ", "b "], n=2, seed=3, max_tokens=8, temperature=1).choices}
        )
        biased = ask(model="tiny", prompt="calc 47+38=", temperature=0, max_tokens=2, logit_bias={str(ord("7")): 100})
        assert biased.choices[0].text == "77"
        assert refused(lambda: ask(model="tiny", prompt="a", temperature=-1)).status_code == 400
        assert refused(lambda: ask(model="tiny", prompt="a", n=9999)).status_code == 400
        assert refused(lambda: ask(model="tiny", prompt="a", extra_body={"colour": 1})).status_code == 400
        assert refused(lambda: ask(model="another", prompt="a")).status_code == 404
        assert refused(lambda: client.chat.completions.create(model="tiny", messages=[])).status_code == 400
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairing, "step", list)  # no request leaves the queue meanwhile, however fast engines are
            busy = refused(lambda: ask(model="tiny", prompt="a", n=40, max_tokens=200, stream=True))
        assert busy.status_code == 429
        assert int(busy.response.headers["retry-after"]) >= 1
        wait_until(lambda: pairing.num_unfinished == 0)  # the refused call's other requests have left the queue
        long = {"model": "tiny", "prompt": STORY, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        with ask(**long, stream=True) as stream:
            assert [part.choices[0].index for part in islice(stream, 5)] == [0] * 5  # and then the client goes away
        wait_until(lambda: pairing.num_unfinished == 0)
        ended = dict(pairing.stats.ended)
        assert ended[pd.FinishReason.CANCELLED] >= 1
        with urlopen(str(client.base_url).removesuffix("v1/") + "metrics") as answer:
            shown = answer.read().decode()
        assert f'pdinfer_requests_ended_total{{reason="cancelled"}} {ended[pd.FinishReason.CANCELLED]}' in shown
        assert "pdinfer_requests_refused_total" in shown


def test_probes_and_models_and_what_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai

    with served_here(pd.PairingConfig()) as (client, pairing, engines):
        root = str(client.base_url).removesuffix("v1/")

        def status(path: str, method: str = "GET") -> int:
            try:
                with urlopen(Request(root + path, method=method)) as answer:
                    return int(answer.status)
            except HTTPError as error:
                return error.code

        (listed,) = client.models.list()
        assert listed == client.models.retrieve("tiny")
        assert (listed.id, listed.created > 0, listed.max_model_len) == ("tiny", True, 4096)
        for call in (lambda: client.responses.create(model="tiny", input="a"), lambda: client.models.retrieve("b")):
            with pytest.raises(openai.NotFoundError, match="is not served here; POST /v1/chat/completions"):
                call()
        assert (status("v1/completions"), status("health", "HEAD"), status("ready", "HEAD")) == (405, 200, 200)

        told = {}
        for state in HealthState:
            monkeypatch.setattr(pairing, "health", lambda state=state: Health(state, ("why",)))
            told[state.value] = status("health"), status("ready")
        assert told == {"ready": (200, 200), "degraded": (200, 200), "draining": (200, 503), "down": (503, 503)}

        async def leave(*_: Any) -> None:
            """Replace nothing."""

        type(engines).replace = leave
        engines.ports.append(SimpleNamespace(role="prefill", process=SimpleNamespace(pid=1)))
        assert (status("health"), status("ready")) == (200, 503)  # down, and another engine is on its way
        monkeypatch.undo()
        with urlopen(root + "ready") as answer:
            shown = json.loads(answer.read())
        assert (shown["state"], shown["reasons"]) == ("degraded", ["another prefill is started"])
        engines.ports.pop()
        monkeypatch.setattr(type(pairing), "max_tokens", property(lambda _: 0))  # as while an engine is replaced
        with pytest.raises(openai.BadRequestError, match="4096 are all that fit"):
            client.completions.create(model="tiny", prompt="a" * 70_000)
        monkeypatch.setattr(pairing, "health", lambda: Health(HealthState.DRAINING))
        with pytest.raises(openai.InternalServerError, match="ask another one"):
            client.completions.create(model="tiny", prompt="a")


def test_headers_must_come_in_time_those_of_later_requests_too() -> None:
    import uvicorn
    from uvicorn.server import ServerState

    guards = load("guards")

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def served() -> None:
        closed = asyncio.Event()
        unused = {name: lambda *_: None for name in ("get_extra_info", "write", "pause_reading", "resume_reading")}
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        protocol = guards.Protocol(config, ServerState(), {}, _loop=asyncio.get_running_loop())
        protocol.connection_made(SimpleNamespace(close=closed.set, is_closing=closed.is_set, **unused))
        guards.READ_S, first = 0.0, protocol.deadline
        assert first is not None
        for request in (b"GET / HTTP/1.1\r\n", b"Host: a\r\n"):
            protocol.data_received(request)
            assert protocol.deadline is first  # however they drip
        protocol.data_received(b"\r\n")
        assert first.cancelled()
        await asyncio.gather(*protocol.tasks)
        protocol.data_received(b"GET / ")
        assert protocol.deadline is not None
        await asyncio.wait_for(closed.wait(), FAR_S)

    asyncio.run(served())


def test_streams_end_before_uvicorn_hears_that_it_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guards, order, handlers = load("guards"), [], {}
    asked = SimpleNamespace(
        SIGTERM=signal.SIGTERM,
        getsignal=lambda _: lambda *_: order.append("uvicorn"),
        signal=handlers.__setitem__,
    )
    monkeypatch.setattr(guards, "signal", asked)
    monkeypatch.setattr(guards, "threading", SimpleNamespace(current_thread=lambda: 0, main_thread=lambda: 0))

    async def end() -> None:
        await asyncio.sleep(0)
        order.append("streams")

    async def told() -> None:
        guards.before_uvicorn(end)
        handlers[signal.SIGTERM]()
        handlers[signal.SIGTERM]()  # a second one is for uvicorn
        assert order == ["uvicorn"]
        while len(order) < 3:  # noqa: ASYNC110 - turns of the loop
            await asyncio.sleep(0)

    asyncio.run(told())
    assert order == ["uvicorn", "streams", "uvicorn"]


def test_a_port_that_is_taken_is_told_before_engines_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="in use"):
        load("guards").must_be_free(*taken.getsockname())


def test_the_example_is_short() -> None:
    written = [(EXAMPLE / name).read_text("utf-8") for name in ("server.py", "__main__.py")]
    assert sum(bool(line.strip()) for text in written for line in text.splitlines()) <= MAX_LINES


# -- whole processes, and what kills them ------------------------------------------------------------------------------

PROMPTS = [f"calc {n}+{n + 7}=" if n % 2 else STORY + f"{n} " for n in range(10, 26)]


class Whole:
    """The example as a process of its own, whose sockets are in `scratch`."""

    def __init__(self, scratch: Path, *options: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--port", str(self.port), *options],
            env=child_environment(TMPDIR=str(scratch)),
            stdout=subprocess.DEVNULL,
        )
        wait_until(lambda: self.engines() or self.process.poll() is not None)

    def read(self, path: str) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def engines(self) -> dict[str, int]:
        try:
            return dict(json.loads(self.read("health"))["engines"])
        except OSError:
            return {}

    def gauges(self, name: str) -> list[float]:
        return [float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.read("metrics"), re.MULTILINE)]

    def is_idle(self) -> bool:
        """Whether no request, no place in a queue and no page is taken."""
        taken = [*self.gauges("pdinfer_requests_queued"), *self.gauges("pdinfer_requests_unfinished")]
        used = re.findall(r'^pdinfer_pages{.*state="used".*} (\S+)$', self.read("metrics"), re.MULTILINE)
        taken += [*self.gauges("pdinfer_engine_requests"), *map(float, used)]
        return len(taken) >= 8 and not any(taken) and json.loads(self.read("health"))["unfinished"] == 0


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder of a short name, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="pd") as folder:
        yield Path(folder)


@pytest.fixture
def whole(scratch: Path) -> Iterator[Whole]:
    running = Whole(scratch)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


async def text_of(client: Any, prompt: str, came: list[int], most: int | None) -> str:
    """The text of a stream, which is left after `most` chunks."""
    text = ""
    stream = await client.completions.create(
        model="tiny",
        prompt=prompt,
        temperature=0.8,
        seed=11,
        max_tokens=120,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async with stream:
        num = 0
        async for part in stream:
            text += part.choices[0].text
            num += 1
            came.append(num)
            if num == most:
                break
    return text


async def all_at_once(port: int, most: list[int | None], came: list[int]) -> list[str]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        streams = [text_of(client, prompt, came, n) for prompt, n in zip(PROMPTS, most, strict=True)]
        return list(await asyncio.gather(*streams))


FAULTS = [("prefill", signal.SIGKILL), ("prefill", signal.SIGSTOP), ("decode", signal.SIGKILL)]


@pytest.mark.full
@pytest.mark.parametrize(("role", "sign"), FAULTS, ids=[f"{role}-{sign.name}" for role, sign in FAULTS])
def test_streams_end_as_on_a_quiet_day(role: str, sign: signal.Signals, whole: Whole, scratch: Path) -> None:
    quiet = asyncio.run(all_at_once(whole.port, [None] * 16, []))
    wait_until(whole.is_idle)
    before, came = whole.engines(), []
    most = [5 if number % 4 == 3 else None for number in range(16)]

    async def under_load() -> tuple[list[str], list[str]]:
        first = asyncio.create_task(all_at_once(whole.port, most, came))
        while len(came) < 16:  # noqa: ASYNC110 - chunks of real streams
            await asyncio.sleep(0.005)
        second = asyncio.create_task(all_at_once(whole.port, most, []))
        await asyncio.sleep(0.02)
        os.kill(before[role], sign)
        return await first, await second

    for texts in asyncio.run(under_load()):
        for text, expected, left in zip(texts, quiet, most, strict=True):
            assert text == expected if left is None else expected.startswith(text)
    wait_until(lambda: len(whole.engines()) == 2 and whole.engines()[role] != before[role])
    wait_until(whole.is_idle)
    assert asyncio.run(all_at_once(whole.port, [None] * 16, [])) == quiet
    pids = {*before.values(), *whole.engines().values()}
    whole.process.terminate()
    assert whole.process.wait(TIMEOUT_S) == 0
    wait_until(lambda: not any(map(is_there, pids)))
    wait_until(lambda: not list(scratch.iterdir()))


@pytest.mark.full
def test_a_server_that_is_told_to_end_finishes_its_streams_first(whole: Whole, scratch: Path) -> None:
    quiet = asyncio.run(all_at_once(whole.port, [None] * 16, []))

    async def drained() -> list[str]:
        came: list[int] = []
        reading = asyncio.create_task(all_at_once(whole.port, [None] * 16, came))
        while len(came) < 16:  # noqa: ASYNC110 - chunks of real streams
            await asyncio.sleep(0.005)
        whole.process.terminate()
        return await reading

    assert asyncio.run(drained()) == quiet
    assert whole.process.wait(TIMEOUT_S) == 0
    wait_until(lambda: not list(scratch.iterdir()))


@pytest.mark.full
def test_curl_gets_the_answer_that_the_start_page_shows() -> None:
    page = (ROOT / "docs" / "start.md").read_text("utf-8")
    ((path, body),) = re.findall(r"curl http://127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'", page, re.DOTALL)
    (shown,) = re.findall(r"^```json\n(.*?)\n```", page, re.MULTILINE | re.DOTALL)
    with served_here(pd.PairingConfig()) as (client, *_):
        url = str(client.base_url).removesuffix("/v1/") + path
        with urlopen(Request(url, body.encode(), {"Content-Type": "application/json"}), timeout=TIMEOUT_S) as answer:
            got = json.load(answer)
    (said,), (choice,) = json.loads(shown)["choices"], got["choices"]
    assert said["message"].items() <= choice["message"].items()
    assert (json.loads(shown)["model"], said["finish_reason"]) == (got["model"], choice["finish_reason"])


@pytest.mark.full
def test_the_selftest_passes() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--selftest"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "FAIL" not in done.stdout
    assert "was replaced by" in done.stdout
