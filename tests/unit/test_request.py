"""What a Request takes for token ids, and what it refuses."""

from __future__ import annotations

import array
import collections
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import pdinfer as pd
from pdinfer.checks import CheckedTokens

IDS = (3, 1, 4)


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        list(IDS),
        collections.deque(IDS),
        collections.UserList(IDS),
        bytes(IDS),
        bytearray(IDS),
        memoryview(bytes(IDS)),
        array.array("i", IDS),
        *(np.array(IDS, dtype) for dtype in ("int8", "uint8", "int32", "uint32", "int64", "uint64", ">i4")),
        np.array([IDS, IDS]).T[:, 1],
        tuple(np.array(IDS)),
        list(np.array(IDS)),
        *(torch.tensor(IDS, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)),
        list(torch.tensor(IDS)),
        torch.tensor([IDS, IDS])[0],
    ],
    ids=lambda prompt: f"{type(prompt).__name__} {getattr(prompt, 'dtype', '')}",
)
@pytest.mark.parametrize("field", ["prompt", "output"])
def test_any_sequence_of_ints_is_kept_as_a_tuple(field: str, prompt: Any) -> None:
    made = getattr(pd.Request(**{"prompt": (1,), field: prompt}), field)
    assert made == IDS
    assert type(made) is tuple
    assert {type(token) for token in made} == {int}


def test_ranges_of_ids_and_both_ends_of_what_is_allowed() -> None:
    assert pd.Request(prompt=range(4)).prompt == (0, 1, 2, 3)
    assert pd.Request(prompt=[0, 2**31 - 1]).prompt == (0, 2**31 - 1)
    assert pd.Request(prompt=()).prompt == pd.Request(prompt=np.array([], int)).prompt == ()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hello", "text 'hello': encode it with the model's tokenizer"),
        (None, "a sequence of ints, got None"),
        (5, "a sequence of ints, got 5"),
        (np.int64(5), f"one dimension, got {np.int64(5)!r}"),
        ({1, 2}, "a sequence of ints, got {1, 2}"),
        ({1: 2}, "a sequence of ints, got {1: 2}"),
        (iter([1]), "a sequence of ints, got <list_iterator"),
        ([1, 2.0], "got 2.0 at index 1"),
        ((1, True), "got True at index 1"),
        ([1, "2"], "got '2' at index 1"),
        ([[1, 2]], "got [1, 2] at index 0"),
        ([None], "got None at index 0"),
        ([np.float32(1)], "at index 0"),
        ([np.bool_(True)], "at index 0"),
        ([torch.tensor(True)], "at index 0"),
        ([torch.tensor([1, 2])], "at index 0"),
        (np.array([1.0]), "got 1.0 at index 0 of float64[1]"),
        (np.array([True]), "got True at index 0 of bool[1]"),
        (np.array([[1, 2]]), "one dimension, got int64[1, 2]"),
        (torch.tensor([[1, 2]]), "one dimension, got int64[1, 2] on cpu: make a request for each row"),
        (torch.tensor([1.5]), "got 1.5 at index 0 of float32[1] on cpu"),
        (torch.tensor([False]), "got False at index 0 of bool[1] on cpu"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "cannot be read: "),
        (torch.tensor(IDS).to_sparse(), "give a dense array of them"),
        (torch.Tensor, "a sequence of ints, got class Tensor"),
        ([0, -1], "from 0 to 2147483647, got -1 at index 1"),
        (np.array([-1]), "got -1 at index 0"),
        ((2**31,), "got 2147483648 at index 0"),
        ((2**20_000,), "got an int of 20001 bits at index 0"),
    ],
)
@pytest.mark.parametrize("field", ["prompt", "output"])
def test_what_holds_no_token_ids_is_refused_when_the_request_is_made(field: str, prompt: Any, words: str) -> None:
    with pytest.raises(pd.ConfigError) as caught:
        pd.Request(**{"prompt": (1,), field: prompt})
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


def test_ids_that_were_compared_keep_their_mark() -> None:
    checked = CheckedTokens.of(IDS)
    assert attrs.evolve(pd.Request(prompt=checked), output=(1,)).prompt is checked
