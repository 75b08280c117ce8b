"""Answers that are JSON of a given schema: a logits processor around llguidance or xgrammar, whichever is installed."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pdinfer.bounds import escaped
from pdinfer.checks import clip
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError, RequestError
from pdinfer.files import AnyPath
from pdinfer.text.tokenizer import Tokenizer

LIBRARIES = ("llguidance", "xgrammar")
LogitsProcessor = Callable[[tuple[int, ...], tuple[int, ...], torch.Tensor], torch.Tensor]
MAX_STATES = 16
"""How many places in an answer a processor remembers: the last one, and those of drafts."""

_log = logging.getLogger("pdinfer")


class State(Protocol):
    """A place in an answer. It never changes."""

    def after(self, token: int) -> State:
        """Return the place behind one more token. Raise RequestError for a token that must not come."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come: [at least the tokenizer's vocabulary]."""


def schema_library(library: str = "auto") -> str:
    """Return which library `json_schema` uses: the first that can be imported, or the one that is asked for. Raises
    BackendUnavailable when there is none, and ConfigError for another name."""
    if library not in ("auto", *LIBRARIES):
        raise ConfigError(f"library must be one of auto, {', '.join(LIBRARIES)}, got {clip(library)}")
    for name in LIBRARIES if library == "auto" else (library,):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    wanted = " or ".join(LIBRARIES) if library == "auto" else library
    raise BackendUnavailable(
        f"answers of a JSON schema are made with {wanted}, which cannot be imported: pip install 'pdinfer[structured]'"
    )


def json_schema(argument: str, *, checkpoint: str, library: str = "auto") -> LogitsProcessor:
    """Return a logits processor that allows only JSON of one schema, without optional white space. Give engines
    `partial(json_schema, checkpoint=folder)` as one of their `logits_processors`; `argument` is the schema.

    The answer ends with the eos_token of the checkpoint's tokenizer. Raises RequestError for what is not a schema, or
    one that the library does not know; what `Tokenizer.load` and `schema_library` raise; CheckpointError for a
    tokenizer without an eos_token.
    """
    try:
        schema = json.loads(argument)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema must be an object, got {clip(argument)}")
    return _Processor(_compiler(schema_library(library), checkpoint)(json.dumps(schema)))


def schema_processors(checkpoint: AnyPath, *, library: str = "auto") -> dict[str, Callable[[str], LogitsProcessor]]:
    """Return what engines take as `logits_processors` to know `json_schema` by its name, also those that `spawn`
    starts. Where there is no library for it nothing is returned, and the log says why."""
    try:
        found = schema_library(library)
    except BackendUnavailable as error:
        _log.warning("%s", error)
        return {}
    return {"json_schema": functools.partial(json_schema, checkpoint=os.fspath(checkpoint), library=found)}


class _Processor:
    """Looks up the state behind the output, which is one token behind one that it knows."""

    def __init__(self, begin: State) -> None:
        self._begin = begin
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()

    def __call__(self, prompt: tuple[int, ...], output: tuple[int, ...], logits_V: torch.Tensor) -> torch.Tensor:
        allowed = self._state(tuple(output)).allowed()[: len(logits_V)]
        logits_V[: len(allowed)].masked_fill_(torch.from_numpy(~allowed).to(logits_V.device), -torch.inf)
        logits_V[len(allowed) :] = -torch.inf
        return logits_V

    def _state(self, output: tuple[int, ...]) -> State:
        known = len(output)
        while known and output[:known] not in self._states:
            known -= 1
        state = self._states[output[:known]] if known else self._begin
        for token in output[known:]:
            state = state.after(token)
        if output:
            self._states[output] = state
            while len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        return state


@functools.lru_cache(maxsize=8)
def _compiler(library: str, checkpoint: str) -> Callable[[str], State]:
    """Return what makes the first state of a schema. It is kept, because reading a vocabulary takes long."""
    tokenizer = Tokenizer.load(checkpoint)
    eos = tokenizer.library.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    if eos is None:
        raise CheckpointError(f"the tokenizer of {checkpoint} has no eos_token, with which an answer could end")
    return (_llguidance if library == "llguidance" else _xgrammar)(tokenizer, eos)


def _llguidance(tokenizer: Tokenizer, eos: int) -> Callable[[str], State]:
    import llguidance

    vocabulary = llguidance.LLTokenizer(tokenizer.library.to_str(), eos_token=eos)

    def begin(schema: str) -> State:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        return _Guided(llguidance.LLMatcher(vocabulary, grammar, log_level=0))

    return begin


class _Guided:
    """A place as llguidance knows it."""

    def __init__(self, matcher: Any) -> None:
        if matcher.is_error():
            raise RequestError(f"llguidance does not take the JSON schema: {escaped(matcher.get_error())[:300]}")
        self._matcher = matcher

    def after(self, token: int) -> State:
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise RequestError(f"the JSON schema does not allow token {token} here")
        return _Guided(matcher)

    def allowed(self) -> NDArray[np.bool_]:
        return _bits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8))


def _xgrammar(tokenizer: Tokenizer, eos: int) -> Callable[[str], State]:
    import xgrammar

    ids = tokenizer.library.get_vocab(with_added_tokens=True)
    texts = [""] * (max(ids.values()) + 1)
    for text, index in ids.items():
        texts[index] = text
    kind = xgrammar.VocabType.BYTE_FALLBACK if "<0x00>" in ids else xgrammar.VocabType.BYTE_LEVEL
    info = xgrammar.TokenizerInfo(texts, kind, stop_token_ids=[eos])
    compiler, compiling = xgrammar.GrammarCompiler(info, max_threads=1), threading.Lock()

    def begin(schema: str) -> State:
        try:
            with compiling:
                compiled = compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))
        except RuntimeError as error:
            raise RequestError(f"xgrammar does not take the JSON schema: {escaped(str(error))[:300]}") from error
        return _Matched(xgrammar.GrammarMatcher(compiled), len(texts))

    return begin


class _Matched:
    """A place as xgrammar knows it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def after(self, token: int) -> State:
        matcher = self._matcher.fork()
        if not matcher.accept_token(token):
            raise RequestError(f"the JSON schema does not allow token {token} here")
        return _Matched(matcher, self._vocab_size)

    def allowed(self) -> NDArray[np.bool_]:
        words = torch.full((1, (self._vocab_size + 31) // 32), -1, dtype=torch.int32, device="cpu")
        self._matcher.fill_next_token_bitmask(words)
        return _bits(words.numpy().view(np.uint8).reshape(-1))


def _bits(data: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return np.unpackbits(data, bitorder="little").astype(np.bool_)
