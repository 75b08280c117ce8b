"""What goes in is checked before a program runs: wrong fields, wrong kinds and names that do not exist are errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import pdinfer as pd

PROMPT = (1, 2, 3)

# -- token ids ---------------------------------------------------------------------------------------------------------

pd.Request(prompt=PROMPT)
pd.Request(prompt=[1, 2, 3], output=range(3))
pd.Request(prompt=np.array([1, 2, 3]))
pd.Request(prompt=torch.tensor([1, 2, 3]), output=torch.tensor([4]))
pd.Request(prompt=[1.5])  # type: ignore[list-item]
pd.Request(prompt=["a"])  # type: ignore[list-item]
pd.Request(prompt="text")  # type: ignore[arg-type]
pd.Request(prompt=None)  # type: ignore[arg-type]
pd.Request(prompt={1, 2})  # type: ignore[arg-type]

# -- fields ------------------------------------------------------------------------------------------------------------

pd.Request()  # type: ignore[call-arg]
pd.Request(PROMPT)  # type: ignore[call-arg, arg-type]
pd.Request(promt=PROMPT)  # type: ignore[call-arg]
pd.Request(prompt=PROMPT, priority="high")  # type: ignore[arg-type]
pd.Request(prompt=PROMPT, sampling={"temperature": 0})  # type: ignore[arg-type]
pd.SamplingParams(temprature=0.0)  # type: ignore[call-arg]
pd.SamplingParams(max_new_tokens="8")  # type: ignore[arg-type]
pd.SamplingParams(stop_token_ids=[2])  # type: ignore[arg-type]
pd.CacheConfig(page_size="64")  # type: ignore[arg-type]
pd.CacheConfig(pages=8)  # type: ignore[call-arg]
pd.EngineConfig(chunk_size=512)  # type: ignore[call-arg]
pd.EngineConfig(num_draft_tokens=1.5)  # type: ignore[arg-type]
pd.PairingConfig(max_queued_requests="many")  # type: ignore[arg-type]
pd.Topology(tp=2)  # type: ignore[call-arg]
pd.NoSuchName  # type: ignore[attr-defined]  # noqa: B018

# -- objects -----------------------------------------------------------------------------------------------------------


def load() -> pd.Model:
    pd.load_model(None)  # type: ignore[arg-type]
    pd.load_model("tiny", progress=True)
    pd.load_model("tiny", progress=1.0)  # type: ignore[arg-type]
    pd.load_model("tiny", devise="cpu")  # type: ignore[call-arg]
    return pd.load_model("tiny", progress=lambda done, total: print(done / total))


def build(model: pd.Model) -> pd.Pairing:
    pool = pd.PagePool(model, pd.CacheConfig(num_pages=8))
    pd.PagePool("tiny")  # type: ignore[arg-type]
    channel = pd.KVChannel(pool, pd.kv.SocketTransport())
    pd.KVChannel(model, pd.kv.SocketTransport())  # type: ignore[arg-type]
    pd.KVChannel(pool, pd.kv.SocketTransport)  # type: ignore[arg-type]
    prefill = pd.PrefillEngine(model, channel, pd.EngineConfig())
    pd.PrefillEngine(model, pool)  # type: ignore[arg-type]
    pd.PrefillEngine(model, channel, pd.CacheConfig())  # type: ignore[arg-type]
    decode = pd.DecodeEngine(model, channel)
    pd.Pairing(prefill, pool)  # type: ignore[arg-type]
    pd.Pairing(prefill, prefill)  # type: ignore[arg-type]
    pd.Pairing(prefill, decode, config=pd.EngineConfig())  # type: ignore[arg-type]
    return pd.Pairing([prefill], [decode], policy=pd.policy.round_robin)


def start(role: str) -> pd.Pairing:
    spawn = pd.remote.spawn_prefill if role == "prefill" else pd.remote.spawn_decode
    spawn("tiny", progress=False).process.terminate()
    prefill, decode = pd.remote.spawn_prefill("tiny"), pd.remote.spawn_decode("tiny")
    pd.Pairing(decode, prefill)  # type: ignore[arg-type]
    pd.remote.spawn_decode(1)  # type: ignore[arg-type]
    return pd.Pairing(prefill, decode)


def use(pairing: pd.Pairing, request: pd.Request) -> None:
    pairing.submit("text")  # type: ignore[arg-type]
    pairing.generate("text")  # type: ignore[arg-type]
    pairing.generate([PROMPT])  # type: ignore[list-item]
    pairing.generate(request)
    pairing.generate(each for each in [request])
    pairing.cancel(request)  # type: ignore[arg-type]
    pairing.drain()  # type: ignore[call-arg]


# -- what a host writes itself -----------------------------------------------------------------------------------------


def by_turns(
    shape: pd.policy.RequestShape, prefills: Sequence[pd.policy.PrefillLoad], decodes: Sequence[pd.policy.DecodeLoad]
) -> pd.policy.Choice | None:
    return pd.policy.Choice(
        prefill=prefills[shape.ordinal % len(prefills)].address, decode=decodes[shape.ordinal % len(decodes)].address
    )


def one_argument(shape: pd.policy.RequestShape) -> None:
    """Be no policy."""


def allow_even(argument: str) -> pd.LogitsProcessor:
    def process(prompt: tuple[int, ...], output: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] = float("-inf")
        return logits

    return process


def extend(prefill: pd.PrefillEngine, decode: pd.DecodeEngine, model: pd.Model) -> None:
    pd.Pairing(prefill, decode, policy=by_turns)
    pd.Pairing(prefill, decode, policy=one_argument)  # type: ignore[arg-type]
    pd.Pairing.local(model, logits_processors={"even": allow_even})
    pd.Pairing.local(model, logits_processors=[allow_even])  # type: ignore[arg-type]
