"""On a CUDA device, what the host has set changes no token and no logit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from tests.backends import ROOT
from tests.gpu.serving import Answers, joined, requests, serve
from tests.hosts import SETTINGS

pytestmark = pytest.mark.gpu

TINY = ROOT / "examples" / "tiny"
HERE: dict[str, Callable[[], AbstractContextManager[Any]]] = SETTINGS | {
    "autocast-on-the-card": lambda: torch.autocast("cuda", torch.bfloat16),
    "default-device-is-the-card": lambda: torch.device("cuda"),
    "a-stream-of-its-own": lambda: torch.cuda.stream(torch.cuda.Stream()),
}
ASKED = requests([tuple(range(5, 5 + length)) for length in (1, 17, 40)])
CLOSE = 2e-4
"""Of logits up to 24: sums in another order; a product that is rounded to TF32 moves them by more."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    fp8 = tmp_path_factory.mktemp("fp8")
    pd.quantize_checkpoint(TINY, fp8, scheme="fp8")
    return {"float32": TINY, "fp8": fp8}


def made(folder: Path) -> tuple[pd.Model, pd.Pairing]:
    """A model in float32, and engines with a pool each whose decode steps are captured."""
    model = pd.load_model(folder, device="cuda", dtype="float32", weights="stored", mtp=True)
    pairing = joined(model, "loopback", num_draft_tokens=1)
    (decode,) = (port for port in pairing.ports if isinstance(port, pd.DecodeEngine))
    decode.warm_up()
    return model, pairing


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, tuple[torch.Tensor, Answers]]:
    told = {}
    for name, folder in folders.items():
        model, pairing = made(folder)
        told[name] = model.logits(range(5, 45)), serve(pairing, ASKED)
    return told


@pytest.mark.parametrize("setting", HERE)
@pytest.mark.parametrize("name", ["float32", "fp8"])
def test_what_the_host_has_set_changes_nothing(
    name: str, setting: str, folders: dict[str, Path], plain: dict[str, tuple[torch.Tensor, Answers]]
) -> None:
    enter = HERE[setting]
    for around_making, around_steps in ((enter, enter), (contextlib.nullcontext, enter)):
        with around_making():
            model, pairing = made(folders[name])
        with around_steps():
            logits, answers = model.logits(range(5, 45)), serve(pairing, ASKED)
        torch.testing.assert_close(logits, plain[name][0], rtol=CLOSE, atol=CLOSE)
        assert answers == plain[name][1]


def test_rounded_products_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, plain: dict[str, tuple[torch.Tensor, Answers]]
) -> None:
    model, pairing = made(TINY)
    monkeypatch.setattr("pdinfer.process.modes._make_exact", list)
    with pairing, SETTINGS["rounded-products"]():
        assert float((model.logits(range(5, 45)) - plain["float32"][0]).abs().max()) > CLOSE
