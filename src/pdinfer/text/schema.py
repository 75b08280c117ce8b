"""Answers that are JSON of a given schema: a logits processor around llguidance or xgrammar, whichever is installed.

    prompt … <think> ─► free tokens ─► </think> ─► JSON ─► one of the tokens at which engines end an answer

The library knows one token that ends an answer, and the texts of all others. Here is what it does not know: which
tokens engines end at, which of them only look like text, and where a reasoning ends.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from pdinfer.bounds import escaped
from pdinfer.checks import clip
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError, RequestError
from pdinfer.files import AnyPath
from pdinfer.log import log
from pdinfer.text.dialects.grammar import END_OF_THOUGHT, THINK
from pdinfer.text.tokenizer import Tokenizer

LIBRARIES = ("llguidance", "xgrammar")
LogitsProcessor = Callable[[tuple[int, ...], tuple[int, ...], torch.Tensor], torch.Tensor]
MAX_STATES = 16
"""The number of places in an answer that a processor remembers: the last one, and those of drafts."""

PROMPT_END = 16
"""The number of last tokens of a prompt that show whether it leaves a reasoning open."""


class State(Protocol):
    """A place in an answer. It never changes."""

    def after(self, token: int) -> State:
        """Return the place after one more token. Raise RequestError for a token that must not come."""

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


def json_schema(
    argument: str, *, checkpoint: str, library: str = "auto", trusted_roots: Sequence[str] = ()
) -> LogitsProcessor:
    """Return a logits processor that allows only JSON of one schema, without optional white space. Give engines
    `partial(json_schema, checkpoint=folder)` as one of their `logits_processors`; `argument` is the schema.

    Where the prompt ends in an open <think>, or the answer begins with that token, the JSON begins after </think>. The
    answer ends with a token at which engines end it, by the checkpoint's files, or else the tokenizer's eos_token; no
    other special token comes. Raises RequestError for what is not a schema, or one that the library does not know; what
    `Tokenizer.load` and `schema_library` raise; CheckpointError for a checkpoint without any token that ends answers.
    """
    try:
        schema = json.loads(argument)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema must be an object, got {clip(argument)}")
    vocabulary, compile_schema = _compiler(schema_library(library), checkpoint, tuple(trusted_roots))
    return _Processor(vocabulary, compile_schema(json.dumps(schema)))


def schema_processors(
    checkpoint: AnyPath, *, library: str = "auto", trusted_roots: Sequence[AnyPath] = ()
) -> dict[str, Callable[[str], LogitsProcessor]]:
    """Return what engines take as `logits_processors` to know `json_schema` by its name, also those that `spawn`
    starts. `trusted_roots` is as for `Tokenizer.load`. Without a library for it nothing is returned, and the
    log says why."""
    try:
        found = schema_library(library)
    except BackendUnavailable as error:
        log.warning("%s", error)
        return {}
    roots = tuple(os.fspath(root) for root in trusted_roots)
    made = functools.partial(json_schema, checkpoint=os.fspath(checkpoint), library=found, trusted_roots=roots)
    return {"json_schema": made}


class _Vocabulary:
    """The tokens of a checkpoint by their part in an answer: `ends` end it, `texts` may stand in JSON, and `free` in a
    reasoning. `eos` is the one that the library takes for the end, whichever ends it. Added tokens are markers, even
    where the tokenizer does not call them special: what they look like can be written with others."""

    def __init__(self, tokenizer: Tokenizer, checkpoint: str) -> None:
        self.tokenizer, library = tokenizer, tokenizer.library
        own = library.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
        self.ends = frozenset(tokenizer.model_eos_token_ids or ({own} if own is not None else ()))
        known = [
            token for token in (own, *sorted(self.ends)) if token is not None and library.id_to_token(token) is not None
        ]
        if not known or not self.ends:
            raise CheckpointError(f"the files of {checkpoint} name no token with which an answer could end")
        self.eos: int = known[0]
        ids = list(library.get_vocab(with_added_tokens=True).values())
        self.free = np.zeros(max(*ids, *self.ends) + 1, np.bool_)
        self.free[ids] = True
        self.free[list(self.ends)] = False
        self.texts = self.free.copy()
        self.texts[list(tokenizer.library.get_added_tokens_decoder())] = False
        self.opens = library.token_to_id(THINK)


@attrs.frozen
class _Reasoning:
    """Inside a reasoning, of which `tail` is the end: anything may come but what ends the answer."""

    vocabulary: _Vocabulary
    rest: State
    tail: str = ""

    def after(self, token: int) -> State:
        text = self.tail + self.vocabulary.tokenizer.joined([token])
        # </think> may come in several tokens: so many characters may be its beginning
        return self.rest if END_OF_THOUGHT in text else attrs.evolve(self, tail=text[1 - len(END_OF_THOUGHT) :])

    def allowed(self) -> NDArray[np.bool_]:
        return self.vocabulary.free


@attrs.frozen
class _Json:
    """Inside the JSON. Its first token may open a reasoning instead, where `may_think`."""

    vocabulary: _Vocabulary
    matcher: State
    may_think: bool = False

    def after(self, token: int) -> State:
        known = self.vocabulary
        if self.may_think and token == known.opens:
            return _Reasoning(known, attrs.evolve(self, may_think=False))
        # the library knows one end; each of the engine's ends counts as that
        return _Json(known, self.matcher.after(known.eos if token in known.ends else token))

    def allowed(self) -> NDArray[np.bool_]:
        known, found = self.vocabulary, self.matcher.allowed()[: len(self.vocabulary.texts)]
        allowed = known.texts.copy()
        allowed[: len(found)] &= found
        allowed[list(known.ends)] = found[known.eos]
        if self.may_think and known.opens is not None:
            allowed[known.opens] = True
        return allowed


class _Processor:
    """Looks up the state after the output, which is one token after one that it knows."""

    def __init__(self, vocabulary: _Vocabulary, begin: State) -> None:
        self._vocabulary = vocabulary
        self._begin = begin
        self._prompt_end: tuple[int, ...] | None = None
        self._states: dict[tuple[int, ...], State] = {}

    def __call__(self, prompt: tuple[int, ...], output: tuple[int, ...], logits_V: torch.Tensor) -> torch.Tensor:
        if (end := prompt[-PROMPT_END:]) != self._prompt_end:
            self._prompt_end = end
            self._states = {(): self._first(end)}
        allowed = self._state(tuple(output)).allowed()[: len(logits_V)]
        logits_V[: len(allowed)].masked_fill_(torch.from_numpy(~allowed).to(logits_V.device), -torch.inf)
        # rows that only pad the vocabulary are no tokens
        logits_V[len(allowed) :] = -torch.inf
        return logits_V

    def _first(self, prompt_end: tuple[int, ...]) -> State:
        known, end = self._vocabulary, self._vocabulary.tokenizer.joined(prompt_end).rstrip()
        begin = _Json(known, self._begin, may_think=known.opens is not None and not end.endswith(END_OF_THOUGHT))
        return _Reasoning(known, attrs.evolve(begin, may_think=False)) if end.endswith(THINK) else begin

    def _state(self, output: tuple[int, ...]) -> State:
        # drafts that were rejected leave places that no output continues, so the search goes back
        known = len(output)
        while output[:known] not in self._states:
            known -= 1
        state = self._states[output[:known]]
        for token in output[known:]:
            state = state.after(token)
        self._states[output] = state
        while len(self._states) > MAX_STATES:
            # the first place stays: a request that is prefilled again starts from there
            self._states.pop(next(key for key in self._states if key))
        return state


@functools.lru_cache(maxsize=8)
def _compiler(library: str, checkpoint: str, roots: tuple[str, ...]) -> tuple[_Vocabulary, Callable[[str], State]]:
    """Return the vocabulary, and what makes the first place of a schema. Both are kept, because reading them takes
    long."""
    vocabulary = _Vocabulary(Tokenizer.load(checkpoint, trusted_roots=roots), checkpoint)
    make = _llguidance if library == "llguidance" else _xgrammar
    return vocabulary, make(vocabulary.tokenizer, vocabulary.eos)


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
        self._matcher = matcher
        self._check("does not take")

    def after(self, token: int) -> State:
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise RequestError(f"the JSON schema does not allow token {token} here")
        return _Guided(matcher)

    def allowed(self) -> NDArray[np.bool_]:
        allowed = _bits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8))
        self._check("cannot go on with")  # it would end the answer here, whole or not
        return allowed

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise RequestError(f"llguidance {what} the JSON schema: {escaped(self._matcher.get_error())[:300]}")


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
