"""Random cases of what tests elsewhere choose by hand, and a host that has set torch and its process in any way:

    models     logits of random configurations, also packed in four bits, against transformers
    engines    requests over pairs of engines against the model in one piece
    ops        kernels in C against the reference, at random sizes
    steps      recorded decode steps against steps that are not, in bfloat16

Each case follows from its number. `python -m tests.fuzz.sweep` runs many of them under every setting.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.kernels import reference
from pdinfer.kernels.formats.four_bits import GROUP, MXFP4, Int4
from pdinfer.kernels.native import ops as native
from pdinfer.testing import FAMILIES, random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.conformance.op_suite import (
    Attention,
    assert_experts,
    assert_product,
    draw,
    floats_of,
    four_bit_weight,
    four_bits_in_strips,
    fp8_in_strips,
    fp8_weight,
    in_strips,
    int8_weight,
)
from tests.e2e.setups import Tally, arrive, by_request, join, plain_reference, pool_of, tokens_of
from tests.e2e.test_recorded_steps import SIZES
from tests.packed import SCHEMES, with_twin
from tests.rounding import assert_within, difference_of_models, error_of_norm, error_of_products, error_of_silu

Host = Callable[[], AbstractContextManager[Any]]
"""Enters what a host has set; a case does so around all that is pdinfer's."""
DTYPE = torch.bfloat16
"""Of ops and recorded steps."""


def config_of(chance: random.Random) -> dict[str, Any]:
    """Return the config.json of a model of any family with random sizes that transformers takes too."""
    family = chance.choice(FAMILIES)
    groups = chance.choice((1, 2, 4))
    per_group = chance.choice((2, 3, 4))
    top_groups = chance.randint(1, groups)
    heads = chance.randint(1, 6)
    config = tiny_config_dict(
        family,
        vocab_size=chance.randint(20, 130),
        hidden_size=heads * chance.randint(3, 14),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=chance.randint(3, 90),
        moe_intermediate_size=chance.randint(1, 40),
        num_hidden_layers=(layers := chance.randint(1, 4)),
        first_k_dense_replace=chance.randint(0, layers),
        n_shared_experts=chance.randint(1, 2),
        kv_lora_rank=2 * chance.randint(2, 20),
        qk_rope_head_dim=2 * chance.randint(1, 8),
        qk_nope_head_dim=2 * chance.randint(1, 10),
        v_head_dim=chance.randint(1, 20),
        rms_norm_eps=chance.choice((1e-6, 1e-5, 1e-3)),
        rope_theta=chance.choice((1e3, 1e4, 1e6)),
        routed_scaling_factor=chance.choice((1.0, 1.7, 2.5)),
    )
    if config["q_lora_rank"] is not None:
        config["q_lora_rank"] = chance.randint(4, 40)
    if config["n_group"] == 1:
        groups = top_groups = 1
        per_group *= 3
    config |= {"n_group": groups, "topk_group": top_groups, "n_routed_experts": groups * per_group}
    config["num_experts_per_tok"] = chance.randint(1, top_groups * per_group)
    if "index_topk" in config:
        config["index_topk"] = chance.randint(1, 40)
        config["index_head_dim"] = config["qk_rope_head_dim"] + chance.randint(0, 12)
    if "indexer_types" in config:
        config["indexer_types"] = ["full", *(chance.choice(("full", "shared")) for _ in range(layers - 1))]
    return config


def prompt_of(chance: random.Random, vocab_size: int, longest: int) -> tuple[int, ...]:
    return tuple(chance.randrange(vocab_size) for _ in range(chance.randint(1, longest)))


def models(chance: random.Random, host: Host) -> None:
    import transformers

    config = config_of(chance)
    prompt = prompt_of(chance, config["vocab_size"], 90)
    providers, seed = chance.choice((None, "torch")), chance.randrange(1000)
    scheme = chance.choice((None, None, *SCHEMES))
    if scheme is not None:
        config |= {
            "hidden_size": GROUP * config["num_attention_heads"],
            "moe_intermediate_size": GROUP * chance.randint(1, 3),
        }
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        folder = exact = Path(root) / "floats"
        write_checkpoint(folder, config, seed=seed)
        if scheme is not None:
            folder, exact = with_twin(folder, scheme, every_linear=True)
        warnings.simplefilter("ignore")  # of transformers
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            exact, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt])).logits[0].clone()
        with host():
            model = pd.load_model(folder, dtype=torch.float32, providers=providers)
            logits = model.logits(prompt)
    off = float((logits - expected).abs().max())
    within = difference_of_models(model.config, len(prompt), float(expected.abs().max()))
    assert off <= within, f"logits are {off:.2g} apart, and rounding explains {within:.2g}"


def sampling_of(chance: random.Random, count: int) -> pd.SamplingParams:
    """Return greedy sampling half the time, and with any of what else there is."""
    options: dict[str, Any] = {"temperature": chance.choice((0.0, 0.0, 0.7, 1.3))}
    for name, values in {
        "top_k": (3, 20),
        "top_p": (0.5, 0.95),
        "min_p": (0.05,),
        "repetition_penalty": (1.2, 0.8),
        "frequency_penalty": (0.7, -0.4),
        "presence_penalty": (0.6,),
        "logprobs": (0, 3),
    }.items():
        if chance.random() < 0.2:
            options[name] = chance.choice(values)
    return pd.SamplingParams(max_new_tokens=count, seed=chance.randrange(100), ignore_eos=True, **options)


def requests_of(chance: random.Random, vocab_size: int, longest: int, count: int) -> list[pd.Request]:
    """Return requests of which some begin alike."""
    common = prompt_of(chance, vocab_size, longest)
    return [
        pd.Request(
            request_id=str(index),
            prompt=common[: chance.randint(0, len(common))] + prompt_of(chance, vocab_size, longest),
            sampling=sampling_of(chance, chance.randint(1, 14)),
        )
        for index in range(count)
    ]


def served(
    chance: random.Random, model: pd.Model, requests: list[pd.Request], config: pd.EngineConfig, **joined: Any
) -> dict[str, list[pd.TokenEvent]]:
    """Let requests arrive one after another, and return their events. All pages are free in the end."""
    page_size = chance.choice((1, 3, 4, 16))
    num_pages = 40 + 400 // page_size
    pools = [pool_of(model, page_size=page_size, num_pages=num_pages) for _ in range(chance.choice((2, 3)))]
    transport = chance.choice(("shared", "loopback"))
    some = (
        {"decode_pools": pools[:1]}
        if transport == "shared"
        else {"prefill_pools": pools[1:], "decode_pools": pools[:1]}
    )
    with join(model, transport, engine=config, **some, **joined) as setup:
        return by_request(arrive(setup, requests, chance, 0.4))


def engines(chance: random.Random, host: Host) -> None:
    config = pd.ModelConfig.from_dict(config_of(chance) | {"num_nextn_predict_layers": 1})
    drafts = chance.choice((0, 0, 1, 3))
    options = {"seed": chance.randrange(1000), "providers": chance.choice((None, "torch", "reference"))}
    engine = pd.EngineConfig(
        chunked_prefill_size=chance.choice((1, 5, 16, 512)),
        max_running_requests=chance.randint(1, 5),
        num_draft_tokens=drafts,
    )
    requests = requests_of(chance, config.vocab_size, 30, chance.randint(1, 6))
    whole = random_model(config, mtp=True, **options)
    with host():
        model = random_model(config, mtp=True, **options)
        streams = served(chance, model, requests, engine)
    tally = Tally()
    for request in requests:
        stream = streams[str(request.request_id)]
        assert stream[-1].error is None, stream[-1]
        tokens = tokens_of(stream)
        assert len(tokens) == request.sampling.max_new_tokens
        tally.compare(str(request.request_id), stream, plain_reference(whole, request, tokens))
    if tally.near_ties:
        print("near ties:", tally.near_ties)


def steps(chance: random.Random, host: Host) -> None:
    family = chance.choice(("v2", "v3", "v3-yarn"))
    config = tiny_config(family, **SIZES, num_hidden_layers=chance.randint(1, 3))
    requests = requests_of(chance, config.vocab_size, 30, chance.randint(2, 8))
    running, order = chance.randint(1, 6), chance.randrange(1000)
    plain = pd.EngineConfig(max_running_requests=running, graph_batch_sizes=())
    sizes = (
        None
        if chance.random() < 0.5
        else tuple(sorted(chance.sample(range(1, running + 1), chance.randint(1, running))))
    )
    recorded = pd.EngineConfig(max_running_requests=running, graph_batch_sizes=sizes)
    expected = told_of(served(random.Random(order), random_model(config, dtype=DTYPE), requests, plain))
    with host():
        got = told_of(served(random.Random(order), random_model(config, dtype=DTYPE), requests, recorded))
    assert got == expected


def told_of(streams: dict[str, list[pd.TokenEvent]]) -> dict[str, list[Any]]:
    return {
        name: [(event.token, event.logprob, event.top_logprobs, event.error) for event in stream]
        for name, stream in streams.items()
    }


def ops(chance: random.Random, host: Host) -> None:
    OPS[chance.choice(sorted(OPS))](chance, host)


def rows_of(chance: random.Random) -> int:
    return chance.choice((0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, chance.randint(1, 200)))


def linear(chance: random.Random, host: Host) -> None:
    rows, width, outs = rows_of(chance), chance.randint(1, 300), chance.randint(1, 300)
    x, weight = draw(rows, width).to(DTYPE), draw(outs, width, seed=1).to(DTYPE)
    with host():
        got = native.products.linear(x, weight)
    assert_product(got, x, weight, DTYPE)


def linear_strips(chance: random.Random, host: Host) -> None:
    rows, width, parts = rows_of(chance), 32 * chance.randint(1, 12), chance.choice((1, 2))
    x, weight = draw(rows, width).to(DTYPE), draw(32 * parts * chance.randint(1, 6), width, seed=1).to(DTYPE)
    strips = in_strips(weight, parts)
    with host():
        got = native.products.linear_strips(x, strips)
    assert_product(got, x, weight, DTYPE)


def heads(chance: random.Random, host: Host) -> None:
    rows, count, width = rows_of(chance), chance.randint(1, 5), chance.randint(1, 140)
    x, out = draw(rows, count, width).to(DTYPE), draw(count, 8 * chance.randint(1, 12), width, seed=1).to(DTYPE)
    into = draw(count, width, 128 * chance.randint(1, 3), seed=1).to(DTYPE)
    with host():
        got = native.products.heads_out(x, out), native.products.heads_in(x, into)
    for y, weight in zip(got, (out, into.mT), strict=True):
        error = torch.stack(
            [error_of_products(*one) for one in zip(x.double().unbind(1), weight.double(), strict=True)], 1
        )
        exact = torch.einsum("thn,hon->tho", x.double(), weight.double())
        assert_within(y, exact, error, DTYPE)


def experts(chance: random.Random, host: Host) -> None:
    counts = [chance.choice((0, 1, 2, 5, 17, 20)) for _ in range(chance.randint(1, 9))]
    in_steps = chance.random() < 0.5
    width, inner = (32 * chance.randint(1, 8) if in_steps else chance.randint(1, 150) for _ in range(2))
    x = draw(sum(counts), width).to(DTYPE)
    gate_up = (draw(len(counts), 2 * inner, width, seed=1) * width**-0.5).to(DTYPE)
    down = (draw(len(counts), width, inner, seed=2) * inner**-0.5).to(DTYPE)
    strips = (in_strips(gate_up, 2), in_strips(down)) if in_steps else None
    counts_E = torch.tensor(counts)
    with host():
        got = [native.products.grouped_mlp(x, counts_E, gate_up, down)]
        if strips is not None:
            got.append(native.products.grouped_mlp_strips(x, counts_E, *strips))
    for y in got:
        assert_experts(y, counts, x, gate_up, down, DTYPE)


def stored(chance: random.Random, host: Host) -> None:
    """FP8 and INT8."""
    rows, outs, width = rows_of(chance), chance.randint(1, 200), chance.randint(1, 400)
    x, int8, fp8 = draw(rows, width).to(DTYPE), int8_weight(outs, width), fp8_weight(outs, width)
    in_steps = fp8_weight(32 * chance.randint(1, 6), 32 * chance.randint(1, 30), parts=chance.choice((1, 2)))
    strips, wide = fp8_in_strips(in_steps), draw(rows, in_steps.numbers.shape[1]).to(DTYPE)
    with host():
        got = (
            native.products.linear_w8a8_dynamic(x, int8),
            native.products.linear_fp8(x, fp8),
            native.products.linear_fp8_strips(wide, strips),
        )
    torch.testing.assert_close(got[0], reference.linear_w8a8_dynamic(x, int8), rtol=0.01, atol=0.01)
    torch.testing.assert_close(got[1], reference.linear_fp8(x, fp8), rtol=0.02, atol=0.02)
    torch.testing.assert_close(got[2], reference.linear_fp8(wide, in_steps), rtol=0.02, atol=0.02)


def four_bits(chance: random.Random, host: Host) -> None:
    kind, parts = chance.choice((Int4, MXFP4)), chance.choice((1, 2))
    weight = four_bit_weight(kind, 32 * parts * chance.randint(1, 5), 32 * chance.randint(1, 24))
    x, strips = draw(rows_of(chance), 2 * weight.numbers.shape[1]).to(DTYPE), four_bits_in_strips(weight, parts)
    with host():
        got = native.products.linear_int4_strips(x, strips)
    assert_product(got, x, floats_of(weight), DTYPE)


def norms(chance: random.Random, host: Host) -> None:
    rows, width, eps = rows_of(chance), chance.randint(1, 300), chance.choice((1e-6, 1e-3))
    x, weight = draw(rows, width).to(DTYPE), draw(width, seed=1).to(DTYPE)
    wide = draw(rows, 2 * width, seed=2).to(DTYPE)
    with host():
        got, silu = native.rows.rms_norm(x, weight, eps), native.rows.gated_silu(wide)
    x, weight, wide = x.double(), weight.double(), wide.double()
    assert_within(got, reference.rms_norm(x, weight, eps), error_of_norm(x, weight, None, eps), DTYPE)
    assert_within(silu, reference.gated_silu(wide), error_of_silu(*wide.chunk(2, -1)), DTYPE)


def attention(chance: random.Random, host: Host) -> None:
    queries = chance.choice((1, 1, 2, 4))
    contexts = tuple(chance.randint(queries, 200) for _ in range(chance.randint(1, 5)))
    case = Attention(
        DTYPE,
        heads=chance.randint(1, 20),
        page_size=chance.choice((1, 3, 16, 64)),
        contexts=contexts,
        query_lens=tuple(chance.randint(1, context) for context in contexts),
        dims=(32 * chance.randint(1, 4), 32 * chance.randint(1, 2), 2 * chance.randint(1, 30), chance.randint(1, 70)),
        num_queries=queries,
    )
    for name, run in (("mla_decode", case.decode), ("mla_prefill", case.prefill)):
        pages = case.pages

        def op(*inputs: Any, name: str = name, **options: Any) -> Tensor:
            with host():
                return getattr(native.attention, name)(*inputs, **options)

        assert_within(run(op, pages, lambda x: x), *case.expected(name), DTYPE)


Case = Callable[[random.Random, Host], None]
OPS: dict[str, Case] = {
    each.__name__: each for each in (linear, linear_strips, heads, experts, stored, four_bits, norms, attention)
}
KINDS: dict[str, Case] = {each.__name__: each for each in (models, engines, ops, steps)}
"""Each raises where its case is not as it should be."""


def run_case(kind: str, number: int, host: Host) -> None:
    KINDS[kind](random.Random(f"{kind}/{number}"), host)
