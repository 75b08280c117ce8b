"""What vLLM is asked for the next token of a request, and what comes of its answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.adapters.vllm.prompts import Answer, Piece, Prompts, Server, body_of
from tests.forks import FAR_S
from tests.waiting import check_ends, started, wait_until, without_threads


def body(request: pd.Request) -> dict[str, Any]:
    return body_of(request, {"room": "00"})


def test_every_sampling_parameter_is_said() -> None:
    sampling = pd.SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1, min_new_tokens=2, stop_token_ids=(3,))
    said = body(pd.Request(prompt=(1, 2), sampling=sampling, cache_salt=b"\xff"))
    assert (said["prompt"], said["max_tokens"], said["min_tokens"], said["stop_token_ids"]) == ([1, 2], 1, 1, [3])
    assert (said["temperature"], said["top_k"], said["cache_salt"]) == (0.5, 7, "ff")
    assert 0 <= said["seed"] < 2**63
    assert said["kv_transfer_params"] == {"room": "00"}
    plain = body(pd.Request(prompt=(1,)))
    assert {plain[name] for name in ("top_p", "repetition_penalty", "temperature")} == {1.0}
    assert (plain["min_p"], plain["top_k"], plain["logit_bias"], plain["cache_salt"]) == (0.0, 0, {}, None)


def test_the_output_so_far_is_a_part_of_the_prompt_and_penalized_as_before() -> None:
    sampling = pd.SamplingParams(
        presence_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias=((4, 2.0), (5, 90.0), (6, -99.5)),
        min_new_tokens=2,
        seed=1,
    )
    said = body(pd.Request(prompt=(1, 2), output=(4, 6, 4), sampling=sampling))
    assert said["prompt"] == [1, 2, 4, 6, 4]
    assert said["logit_bias"] == {"4": 2.0 - 2.5, "5": 90.0, "6": -100.0}
    assert (said["min_tokens"], said["seed"]) == (0, 4)


@attrs.frozen(kw_only=True)
class LaterParams(pd.SamplingParams):
    """Sampling parameters as a later release has them."""

    typical_p: float = 1.0


@attrs.frozen(kw_only=True)
class LaterRequest(pd.Request):
    """A request as a later release has it."""

    adapter: str | None = None


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pd.Request(prompt=(1,), sampling=pd.SamplingParams(logits_processor="json")), "logits_processor='json'"),
        (pd.Request(prompt=(1,), sampling=pd.SamplingParams(logprobs=3)), "logprobs=3"),
        (pd.Request(prompt=(1,), sampling=LaterParams(typical_p=0.0)), "typical_p=0.0"),
        (LaterRequest(prompt=(1,), adapter="mine"), "adapter='mine'"),
    ],
    ids=["processor", "logprobs", "sampling", "request"],
)
def test_what_vllm_is_not_told_is_refused_by_name(request_: pd.Request, says: str) -> None:
    with pytest.raises(pd.RequestError, match=f"^{says} cannot be sent to vLLM.*leave it out"):
        body(request_)


def test_what_vllm_need_not_be_told_is_no_reason_to_refuse() -> None:
    settled = {"request_id": "r", "priority": 3, "deadline_s": 1.0, "stop": ((5,),), "alone": True}
    body(LaterRequest(prompt=(1,), sampling=LaterParams(logprobs=0), **settled))


class Backend(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.may_answer.wait(FAR_S)
        said = self.server.said  # the next prompt may be given another answer before this one is away
        self.answer(self.server.status, said)
        if not said:  # as vLLM does while it computes
            self.wfile.flush()
            self.server.left.append(self.rfile.read(1) == b"")

    def do_GET(self) -> None:
        self.answer(200, self.server.models)

    def answer(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def backend() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    server.asked, server.status, server.models, server.said = [], 200, b"{}", b"data: [DONE]\n\n"
    server.left, server.may_answer = [], threading.Event()
    server.may_answer.set()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_and_its_refusals_are_told_apart(backend: Any) -> None:
    server = Server(f"{backend.url}/")
    server({"prompt": [1]})
    assert backend.asked[0].items() >= {"prompt": [1], "stream": True}.items()
    backend.status, backend.said = 400, b'{"error": "too\nlong"}'
    with pytest.raises(pd.RequestError, match=r'answered 400: {"error": "too\\nlong"}'):
        server({})
    for status in (429, 500):
        backend.status = status
        with pytest.raises(pd.TransferError, match=f"answered {status}"):
            server({})
    with pytest.raises(pd.TransferError, match="did not answer"):
        Server("http://127.0.0.1:9")({})


def test_a_server_streams_tokens_until_it_is_done_or_says_something_else(backend: Any) -> None:
    chunk = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.5, -2]}, "finish_reason": "length"}
    lines = [json.dumps({"choices": [{"token_ids": [4]}]}), json.dumps({"choices": [chunk]}), "[DONE]"]
    backend.said = "".join(f"data: {line}\n\n" for line in lines).encode()
    said = list(Server(backend.url).stream({"prompt": [1]}))
    assert said == [Piece((4,)), Piece((5, 6), (-1.5, -2), "length")]
    assert backend.asked[-1]["stream"] is backend.asked[-1]["return_token_ids"] is True
    dead = '{"error": {"message": "the engine is dead", "code": 500}}'
    for wrong in (
        '{"error": "the engine is dead"}',
        dead,
        "no json",
        "[" * 100_000,
        '{"choices": [{"token_ids": ["4"]}]}',
    ):
        backend.said = f"data: {wrong}\n\n".encode()
        with pytest.raises(pd.TransferError, match="something else than tokens"):
            list(Server(backend.url).stream({}))
    backend.said = b'data: {"error": {"message": "token 9999\\nis not mine", "code": 400}}\n\n'
    with pytest.raises(pd.RequestError, match=r"answered 400: token 9999\\nis not mine"):
        Server(backend.url)({})
    backend.said = b"data: " + lines[0].encode()
    with pytest.raises(pd.TransferError, match="broke off its answer"):
        Server(backend.url)({})


class Answers:
    """What Prompts says, in order."""

    def __init__(self) -> None:
        self.said: list[Answer] = []
        self.done = threading.Semaphore(0)

    def __call__(self, answer: Answer) -> None:
        self.said.append(answer)
        self.done.release()

    def next(self) -> Answer:
        assert self.done.acquire(timeout=FAR_S)
        return self.said[-1]


@pytest.mark.parametrize("early", [True, False], ids=["before it answers", "while it computes"])
def test_a_server_is_left_when_its_prompt_is_dropped(backend: Any, early: bool) -> None:
    backend.said = b""
    if early:
        backend.may_answer.clear()
    answers = Answers()
    prompts = Prompts(Server(backend.url), 2, answers)
    prompts.ask(b"a", {"prompt": [1]})
    wait_until(lambda: backend.asked)
    if not early:
        wait_until(lambda: prompts._calls[b"a"]._connection is not None)
    prompts.drop(b"a")
    backend.may_answer.set()
    assert "cancelled" in str(answers.next().error)
    wait_until(lambda: backend.left == [True])
    assert not prompts._calls
    backend.said = b"data: [DONE]\n\n"
    prompts.ask(b"b", {"prompt": [1]})
    assert answers.next() == Answer(b"b", None)
    backend.said = b""
    prompts.ask(b"c", {"prompt": [1]})
    wait_until(lambda: b"c" in prompts._calls and prompts._calls[b"c"]._connection is not None)
    prompts.close()
    assert answers.next().error is not None
    wait_until(lambda: backend.left == [True, True])


@pytest.mark.parametrize(
    ("models", "length"),
    [
        (b'{"data": [{"max_model_len": 512}]}', 512),
        (b'{"data": [{}]}', None),
        (b'{"data": []}', None),
        (b"no", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_server_tells_how_long_a_prompt_may_be(backend: Any, models: bytes, length: int | None) -> None:
    backend.models = models
    assert Server(backend.url).max_model_len() == length


def test_what_is_no_server_of_http_is_told_with_its_words_spelled_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def greet() -> None:
            for _ in range(2):
                with listener.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        greeting = started(greet)
        with pytest.raises(pd.TransferError, match=r"did not say which models it has: SSH-2\.0-OpenSSH\\r\\n$"):
            server.max_model_len()
        with pytest.raises(pd.TransferError, match=r"did not answer: SSH-2\.0-OpenSSH\\r\\n$"):
            server({"prompt": [1]})
        check_ends(greeting)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8100", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://[::1", "http://a b"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(pd.ConfigError, match=r'a server of vLLM has a URL such as "http://127\.0\.0\.1:8100", got'):
        Server(url)


def test_at_most_so_many_prompts_are_asked_at_a_time_and_dropped_ones_not_at_all() -> None:
    now: list[int] = []
    most, go, answers = [0], threading.Event(), Answers()

    def complete(body: Any) -> None:
        now.append(body["at"])
        most[0] = max(most[0], len(now))
        go.wait(FAR_S)
        now.remove(body["at"])

    prompts = Prompts(complete, 2, answers)
    for at in range(6):
        prompts.ask(bytes([at]), {"at": at})
    prompts.drop(bytes([5]))
    wait_until(lambda: len(now) == 2)
    go.set()
    for _ in range(6):
        answers.next()
    prompts.close()
    failed = [answer for answer in answers.said if answer.error is not None]
    assert most == [2]
    assert [answer.room for answer in failed] == [bytes([5])]
    assert "cancelled" in str(failed[0].error)


def test_a_prompt_without_a_thread_is_answered_or_waits_for_another_thread() -> None:
    goes_on, answers = threading.Event(), list[Answer]()

    def complete(_: dict[str, Any]) -> dict[str, Any]:
        assert goes_on.wait(FAR_S)
        return {"choices": [{}]}

    prompts = Prompts(complete, 2, answers.append)
    with without_threads("pdinfer-vllm-prompt"):
        prompts.ask(b"none", {})
    assert isinstance(answers.pop().error, pd.Overloaded)
    prompts.ask(b"first", {})
    with without_threads("pdinfer-vllm-prompt"):
        prompts.ask(b"second", {})
    goes_on.set()
    wait_until(lambda: len(answers) == 2)
    assert [answer.room for answer in answers] == [b"first", b"second"]
    prompts.close()
