"""The text that the tiny model learns: a vocabulary of bytes, training rows, and prompts with known answers.

It needs only numpy, so tests and benchmarks can ask the model questions without the training code. Four tasks share one
row of text, each segment followed by a space:

    set kqz=48213;      a fact: a random key and a random value
    get kqz=48213;      recall: the value is the answer, however far back the fact stands
    copy x7f > x7f;     repeat what stands before the arrow
    calc 47+38=85;      sums, differences and products of small numbers
    Tom sang.           plain text: short sentences, and stories that open with "One" and end with "The end." and EOS

A prompt function returns ``(prompt_tokens, answer_tokens)``: greedy decoding of the prompt should give the answer. The
prompt starts with BOS; the same generator state gives the same prompt.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

BOS: Final = 256
EOS: Final = 257
PAD: Final = 258
VOCAB_SIZE: Final = 264  # five spare ids round it up to a multiple of eight

ANSWER_WEIGHT: Final = 1.0
TEXT_WEIGHT: Final = 0.25  # fixed words and plain text
RANDOM_WEIGHT: Final = (
    0.02  # values that cannot be predicted; not 0, so that sampled text keeps the form of a task line
)

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
DIGITS: Final = "0123456789"
SHE: Final = ("Ann", "Eva", "Mia", "Zoe", "Emma", "Lily", "Rosa", "Clara", "Julia")
HE: Final = ("Ben", "Max", "Sam", "Tom", "Jack", "Noah", "Paul", "David", "Henry")
VERBS: Final = ("ran", "sat", "sang", "left", "slept", "waved", "smiled", "jumped", "laughed", "hurried", "listened",
                "returned", "whispered")  # fmt: skip
TIMES: Final = ("day", "morning", "evening", "summer")
COLOURS: Final = ("red", "blue", "green", "small", "old", "heavy", "yellow", "shiny")
THINGS: Final = ("box", "key", "book", "ball", "lamp", "coin", "apple", "stone", "letter", "basket")
PLACES: Final = ("in the garden", "by the river", "under a tree", "on the road", "near the school", "at the market")
HOMES: Final = ("home", "to the house", "to the village", "to the old mill")
SHORTEST_SENTENCE: Final = 9  # tokens in "Tom sat. "; names and verbs of all lengths fill every number from 9 on

Problem = tuple[list[int], list[int]]


class Mix(NamedTuple):
    """How often each kind of segment is drawn; the five shares add up to 1."""

    fact: float
    query: float
    copy: float
    calc: float
    text: float


def encode(text: str) -> list[int]:
    """Return the UTF-8 bytes of `text`, without BOS or EOS."""
    return list(text.encode())


def decode(tokens: list[int] | tuple[int, ...]) -> str:
    """Return the text of `tokens`; special tokens vanish, and bytes that are not UTF-8 become U+FFFD."""
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


# --- pieces of text ----------------------------------------------------------------------------------------------


def _pick(rng: Generator, choices: tuple[str, ...]) -> str:
    return choices[int(rng.integers(len(choices)))]


def _word(rng: Generator, alphabet: str, shortest: int, longest: int) -> str:
    indices = rng.integers(len(alphabet), size=int(rng.integers(shortest, longest + 1)))
    return "".join(alphabet[i] for i in indices)


def _new_key(rng: Generator, taken: dict[str, str], shortest: int = 3, longest: int = 4) -> str:
    key = _word(rng, LETTERS, shortest, longest)
    while key in taken:
        key = _word(rng, LETTERS, shortest, longest)
    return key


def _value(rng: Generator, shortest: int = 4, longest: int = 6) -> str:
    return _word(rng, DIGITS if rng.random() < 0.5 else LETTERS + DIGITS, shortest, longest)


def _fact(key: str, value: str) -> str:
    return f"set {key}={value}; "


def _sentence(rng: Generator) -> str:
    return f"{_pick(rng, SHE + HE)} {_pick(rng, VERBS)}. "


def _story(rng: Generator) -> list[str]:
    """Write five sentences, each followed by a space. The model must remember who 'she' is, and who received the
    thing."""
    giver, taker = (SHE + HE)[int(rng.integers(18))], (SHE + HE)[int(rng.integers(18))]
    while taker == giver:
        taker = _pick(rng, SHE + HE)
    colour, thing = _pick(rng, COLOURS), _pick(rng, THINGS)
    pronoun, them = ("She" if giver in SHE else "He"), ("her" if giver in SHE else "him")
    article = "an" if colour == "old" else "a"
    return [
        f"One {_pick(rng, TIMES)} {giver} found {article} {colour} {thing} {_pick(rng, PLACES)}. ",
        f"{pronoun} {_pick(rng, ('gave', 'showed', 'brought'))} the {thing} to {taker}. ",
        (
            f"{taker} {_pick(rng, ('liked', 'loved', 'wanted'))} the {colour} {thing} and thanked {giver}, "
            f"and {giver} {_pick(rng, ('smiled', 'waved', 'laughed'))}. "
        ),
        f"{_pick(rng, ('Then', 'Soon', 'Later'))} {taker} went {_pick(rng, HOMES)} with {them}. ",
        "The end. ",
    ]


def _problem(rng: Generator, largest: int, held_out: bool) -> tuple[str, str]:
    """Return `("47+38", "85")`. Sums and differences whose operands add up to 3 modulo 10 are held out from
    training."""
    kind = rng.random()
    if kind < 0.2 and not held_out:
        a, b = (int(n) for n in rng.integers(10, size=2))
        return f"{a}*{b}", str(a * b)
    while True:
        a, b = (int(n) for n in rng.integers(largest + 1, size=2))
        if ((a + b) % 10 == 3) == held_out:
            break
    if kind < 0.6:
        return f"{a}+{b}", str(a + b)
    return f"{max(a, b)}-{min(a, b)}", str(abs(a - b))


# --- training rows -----------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """A row under construction: `tokens` and the loss weight of each one, and the facts stated so far."""

    tokens: list[int] = field(default_factory=lambda: [BOS])
    weights: list[float] = field(default_factory=lambda: [0.0])
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, weight: float) -> None:
        self.tokens += encode(text)
        self.weights += [weight] * (len(self.tokens) - len(self.weights))

    def add_fact(self, rng: Generator) -> None:
        key, value = _new_key(rng, self.facts), _value(rng)
        self.facts[key] = value
        self.add("set ", TEXT_WEIGHT)
        self.add(f"{key}={value}", RANDOM_WEIGHT)
        self.add("; ", TEXT_WEIGHT)

    def add_query(self, rng: Generator) -> None:
        """Ask the first fact in 15 % of cases, else any, early ones more often: the far ones are the hard ones."""
        index = 0 if rng.random() < 0.15 else int(len(self.facts) * rng.random() ** 1.5)
        key, value = list(self.facts.items())[index]
        self.add("get ", TEXT_WEIGHT)
        self.add(key, RANDOM_WEIGHT)
        self.add("=", TEXT_WEIGHT)
        self.add(f"{value};", ANSWER_WEIGHT)
        self.add(" ", TEXT_WEIGHT)

    def add_copy(self, rng: Generator) -> None:
        word = _word(rng, LETTERS + DIGITS, 3, 24)
        self.add("copy ", TEXT_WEIGHT)
        self.add(word, RANDOM_WEIGHT)
        self.add(" > ", TEXT_WEIGHT)
        self.add(f"{word};", ANSWER_WEIGHT)
        self.add(" ", TEXT_WEIGHT)

    def add_calc(self, rng: Generator, largest: int) -> None:
        for _ in range(int(rng.integers(1, 5))):
            question, answer = _problem(rng, largest, held_out=False)
            self.add("calc ", TEXT_WEIGHT)
            self.add(question, RANDOM_WEIGHT)
            self.add("=", TEXT_WEIGHT)
            self.add(f"{answer};", ANSWER_WEIGHT)
            self.add(" ", TEXT_WEIGHT)

    def add_text(self, rng: Generator) -> None:
        if rng.random() < 0.7:
            self.add(_sentence(rng), TEXT_WEIGHT)
            return
        self.add("".join(_story(rng)), TEXT_WEIGHT)
        if rng.random() < 0.75:  # sometimes only a space, so that filler without EOS is familiar too
            self.tokens[-1] = EOS


def _training_row(rng: Generator, length: int, mix: Mix, largest: int) -> _Row:
    row = _Row()
    if rng.random() < 0.2:  # some rows open with many facts in sequence, as `recall_everywhere` does
        for _ in range(int(rng.integers(2, length // 32 + 1))):
            row.add_fact(rng)
    for kind in rng.choice(5, size=length // SHORTEST_SENTENCE + 1, p=mix):
        if kind == 0 or (kind == 1 and not row.facts):
            row.add_fact(rng)
        elif kind == 1:
            row.add_query(rng)
        elif kind == 2:
            row.add_copy(rng)
        elif kind == 3:
            row.add_calc(rng, largest)
        else:
            row.add_text(rng)
        if len(row.tokens) >= length:
            break
    return row


def training_rows(
    rng: Generator, num_rows: int, length: int, mix: Mix, largest: int = 99
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return fresh rows, cut at `length` (at least 96): tokens and loss weights, both `[num_rows, length]`.

    `largest` bounds the operands of sums and differences.
    """
    rows = [_training_row(rng, length, mix, largest) for _ in range(num_rows)]
    tokens = np.array([row.tokens[:length] for row in rows], dtype=np.int64)
    return tokens, np.array([row.weights[:length] for row in rows], dtype=np.float32)


# --- prompts with answers ----------------------------------------------------------------------------------------


def _filler(rng: Generator, num_tokens: int) -> list[str]:
    """Return sentences and stories of exactly `num_tokens` tokens in all. Raises ValueError if that is 1 to 8."""
    if num_tokens != 0 and num_tokens < SHORTEST_SENTENCE:
        raise ValueError(f"filler of {num_tokens} tokens was asked for; it must be 0 or at least {SHORTEST_SENTENCE}")
    items: list[str] = []
    while num_tokens:
        item = _sentence(rng) if rng.random() < 0.7 else "".join(_story(rng))
        rest = num_tokens - len(item)
        if rest == 0 or rest >= SHORTEST_SENTENCE:  # else another try: the rest could not be filled
            items.append(item)
            num_tokens = rest
    return items


def recall_prompt(rng: Generator, distance: int, num_distractors: int = 8) -> Problem:
    """Write a fact, then exactly `distance` tokens of plain text and other facts, then the query for the first fact.

    `distance` is 0 or at least 9; below 32 tokens per distractor there are fewer distractors.
    """
    facts: dict[str, str] = {}
    for _ in range(1 + min(num_distractors, distance // 32)):
        facts[_new_key(rng, facts)] = _value(rng)
    (key, value), *others = facts.items()
    items = [_fact(*other) for other in others]
    items += _filler(rng, distance - sum(map(len, items)))
    between = [items[i] for i in rng.permutation(len(items))]
    opening = "".join(_sentence(rng) for _ in range(int(rng.integers(4))))
    prompt = [BOS, *encode(opening + _fact(key, value) + "".join(between) + f"get {key}=")]
    return prompt, encode(f"{value};")


def recall_everywhere(rng: Generator, num_facts: int, page_size: int = 16) -> tuple[list[int], list[Problem]]:
    """Write a context with one whole fact in every page of `page_size` tokens, and one query for each fact, in order.

    Returns `(context, [(query, answer), ...])`; a prompt is `context + query`. The context starts with BOS and has
    exactly `num_facts * page_size` tokens. `page_size` is 16 (nothing but facts) or at least 25 (plain text between).
    """
    if page_size != 16 and page_size < 16 + SHORTEST_SENTENCE:
        raise ValueError(f"page_size {page_size} was asked for; it must be 16 or at least {16 + SHORTEST_SENTENCE}")
    facts: dict[str, str] = {}
    context: list[int] = []
    for page in range(num_facts):
        # A fact has 16 tokens, or 15 after BOS: "set ", key, "=", value, "; " with key and value of 9 or 8 in all.
        key_length = int(rng.integers(3, 5))
        value_length = (9 if page else 8) - key_length
        key, value = _new_key(rng, facts, key_length, key_length), _value(rng, value_length, value_length)
        facts[key] = value
        context += [BOS] if page == 0 else []
        context += encode(_fact(key, value) + "".join(_filler(rng, page_size - 16)))
    return context, [(encode(f"get {key}="), encode(f"{value};")) for key, value in facts.items()]


def copy_prompt(rng: Generator) -> Problem:
    """Ask the model to copy 4 to 24 random letters and digits."""
    word = _word(rng, LETTERS + DIGITS, 4, 24)
    return [BOS, *encode(f"copy {word} > ")], encode(f"{word};")


def calc_prompt(rng: Generator, held_out: bool = False) -> Problem:
    """Ask for one sum, difference or product; `held_out` gives only sums and differences that training never shows."""
    question, answer = _problem(rng, 99, held_out)
    return [BOS, *encode(f"calc {question}=")], encode(f"{answer};")


def text_prompt(rng: Generator) -> Problem:
    """Give the first two sentences of a story. The answer is one right ending with EOS: compare its loss, not its
    words."""
    story = _story(rng)
    return [BOS, *encode("".join(story[:2]))], [*encode("".join(story[2:])[:-1]), EOS]
