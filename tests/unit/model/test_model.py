"""A whole model: it agrees with transformers, and the ways of running it agree with each other."""

from __future__ import annotations

import warnings
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import ConfigError, RequestError
from pdinfer.kernels.arguments import DecodeCache
from pdinfer.kernels.formats.format import WHOLE, Shard, Weight
from pdinfer.kernels.formats.weights import tensors_of
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.kv.view import KVView
from pdinfer.model import mla
from pdinfer.model.batch import Batch, Row
from pdinfer.model.destinations import Destinations
from pdinfer.model.load import DTYPES, load_model
from pdinfer.model.model import Model
from pdinfer.parallel.topology import Topology
from pdinfer.testing import FAMILIES, random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.rounding import difference_of_models
from tests.slices import one_in

CPU = torch.device("cpu")
PAGE_SIZE = 5

CASES: dict[str, dict[str, Any]] = {
    **{family: tiny_config_dict(family) for family in FAMILIES},
    "three-heads": tiny_config_dict("v3", num_attention_heads=3, num_key_value_heads=3),
    "all-moe": tiny_config_dict("v3", first_k_dense_replace=0),
    "all-dense": tiny_config_dict("v3", first_k_dense_replace=3),
    "negative-biases": tiny_config_dict("v3"),
    "greedy-in-spite-of-groups": tiny_config_dict("v2", topk_method="greedy"),
    "no-shared-experts": tiny_config_dict("v3", n_shared_experts=0),
    "three-shared-experts": tiny_config_dict("v2", n_shared_experts=3),
    "one-expert-per-token": tiny_config_dict("v3", num_experts_per_tok=1),
    "weights-not-normalized": tiny_config_dict("v3", norm_topk_prob=False),
    "large-eps": tiny_config_dict("v3", rms_norm_eps=1e-2),
    "tied-head": tiny_config_dict("v2", tie_word_embeddings=True),
    "odd-sizes": tiny_config_dict(
        "v3", vocab_size=61, hidden_size=45, kv_lora_rank=13, q_lora_rank=11, qk_nope_head_dim=7, v_head_dim=9
    ),
}


def tokens_of(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()


def assert_same(config: ModelConfig, got: Tensor, logits_TV: Tensor) -> None:
    """Assert that logits are the same but for the order of float32 sums."""
    size = float(logits_TV.abs().max())
    assert float((got - logits_TV).abs().max()) <= difference_of_models(config, len(logits_TV), size)


def lower_biases(folder: Path) -> None:
    """Move every correction bias so far down that all biased scores are below zero."""
    for file in folder.glob("*.safetensors"):
        tensors = load(file.read_bytes())
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] = tensors[name] - 5
        save_file(tensors, file, metadata={"format": "pt"})


@attrs.define
class Sequence:
    """One sequence in a pool of its own. Its pages are out of order, and every slot that was not written holds NaN."""

    model: Model
    view: KVView
    pages: list[int]
    length: int = 0

    @classmethod
    def of(cls, model: Model, capacity: int) -> Sequence:
        layout = model.kv_layout(CacheConfig(page_size=PAGE_SIZE))
        memory = model.allocate_pages(layout, layout.num_pages(capacity) + 1)
        memory.buffer.fill_(0xFF)
        return cls(model, KVView.of(memory), list(range(memory.num_pages - 1, 0, -1)))

    def batch(self, tokens: list[int], *, decode: bool = False) -> Batch:
        row = Row(tokens, self.length, self.pages)
        self.length += len(tokens)
        return Batch.build([row], page_size=PAGE_SIZE, device=self.model.device, decode=decode)

    def run(self, tokens: list[int], *, decode: bool = False) -> Tensor:
        """Return the logits of each of `tokens`, which follow those that ran before."""
        hidden = self.model.forward(self.batch(tokens, decode=decode), self.view)
        return self.model.head(self.model.norm(hidden))


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, CASES[request.param])
    if request.param == "negative-biases":
        lower_biases(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    # about shared experts in models that have none
    warnings.filterwarnings("ignore", "Initializing zero-element tensors")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.inference_mode()
def test_logits_are_those_of_transformers(model: Model, oracle: Any) -> None:
    tokens = tokens_of(model.config, 90)
    expected = oracle(torch.tensor([tokens])).logits[0]
    assert_same(model.config, model.logits(tokens), expected)


@torch.inference_mode()
def test_greedy_continuation_is_that_of_transformers(model: Model, oracle: Any) -> None:
    """Each token is the one that transformers chooses after those before it, which one look at all of them tells."""
    prompt = tokens_of(model.config, 23, seed=1)
    sequence = Sequence.of(model, len(prompt) + 16)
    continued = [int(sequence.run(prompt)[-1].argmax())]
    while len(continued) < 16:
        continued.append(int(sequence.run(continued[-1:], decode=True)[-1].argmax()))
    assert continued == oracle(torch.tensor([[*prompt, *continued]])).logits[0, 22:-1].argmax(-1).tolist()


@torch.inference_mode()
def test_the_layers_of_a_step_share_what_ops_make_of_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[object, Any]] = []

    def noted(*of: Any, of_step: dict[object, Any], **more: Any) -> DecodeCache:
        seen.append(of_step)
        return DecodeCache(*of, of_step=of_step, **more)

    monkeypatch.setattr(mla, "DecodeCache", noted)
    model = random_model()
    sequence = Sequence.of(model, 4)
    for token in (1, 2):
        sequence.run([token], decode=True)
    layers = model.config.num_hidden_layers
    assert layers > 1
    assert [each is seen[0] for each in seen] == [True] * layers + [False] * layers
    assert all(each is seen[-1] for each in seen[layers:])


@torch.inference_mode()
def test_activations_are_those_of_transformers(model: Model, oracle: Any) -> None:
    tokens, num_layers = tokens_of(model.config, 40, seed=4), model.config.num_hidden_layers
    entered: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, x, at=at: entered.update({at: x[0][0]}))
        for at, layer in enumerate(oracle.model.layers)
    ]
    expected = oracle(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    found = model.activations(tokens, routing=True, chunk_size=17)
    assert (found.layers, found.hidden_LTD.shape) == (
        tuple(range(num_layers)),
        (num_layers, 40, model.config.hidden_size),
    )
    for layer in range(num_layers - 1):  # of the last one transformers tells what has passed the final norm
        assert_same(model.config, found[layer], expected[layer + 1][0])
    assert_same(model.config, model.head(model.norm(found[num_layers - 1])), model.logits(tokens))
    assert sorted(found.routing) == [at for at in range(num_layers) if model.config.is_moe_layer(at)]
    for layer, chosen in found.routing.items():
        ids_TK, weights_TK = model.blocks[layer].mlp.router(entered[layer])  # type: ignore[union-attr]
        assert torch.equal(chosen.experts_TK.sort(-1)[0], ids_TK.sort(-1)[0])
        torch.testing.assert_close(chosen.weights_TK.sum(-1), weights_TK.sum(-1))


def test_activations_run_no_further_than_they_must_and_come_in_the_order_asked() -> None:
    model = random_model()
    whole = model.activations([1, 2, 3], chunk_size=2)
    last = model.config.num_hidden_layers - 1
    some = model.activations([1, 2, 3], layers=(1, 0), chunk_size=2)
    assert torch.equal(some[0], whole[0])
    assert torch.equal(some.hidden_LTD, torch.stack([whole[1], whole[0]]))
    assert some.routing == {}
    with pytest.raises(KeyError, match=f"layer {last} is not among"):
        some[last]
    for bad, says in (((last + 1,), "among 0 to"), ((), "at least one"), ((0, 0), "different"), ((-1,), "among")):
        with pytest.raises(ConfigError, match=says):
            model.activations([1], layers=bad)
    with pytest.raises(ConfigError, match="chunk_size"):
        model.activations([1], chunk_size=0)
    for tokens in ([], [10**6]):
        with pytest.raises(RequestError):
            model.activations(tokens)


def test_absorbed_attention_equals_expanded(model: Model) -> None:
    tokens = tokens_of(model.config, 2 * PAGE_SIZE + 1, seed=2)
    sequence = Sequence.of(model, len(tokens))
    one_by_one = torch.cat([sequence.run([token], decode=True) for token in tokens])
    assert_same(model.config, one_by_one, model.logits(tokens))


@pytest.mark.parametrize("chunks", one_in(3, [[7, 1, 13, 2], [5, 10, 8], [22, 1]]), ids=str)
def test_prefill_in_chunks_equals_the_whole(model: Model, chunks: list[int]) -> None:
    tokens = tokens_of(model.config, sum(chunks), seed=3)
    sequence = Sequence.of(model, len(tokens))
    parts = [sequence.run(tokens[start:stop]) for start, stop in pairwise(accumulate(chunks, initial=0))]
    assert_same(model.config, torch.cat(parts), model.logits(tokens))


@pytest.mark.parametrize("decode", [False, True])
def test_each_layer_is_streamed_with_its_cache_written(decode: bool) -> None:
    model = random_model()
    sequence = Sequence.of(model, 12)
    if decode:
        sequence.run(tokens_of(model.config, 11))
    tokens = tokens_of(model.config, 1 if decode else 12)
    batch = sequence.batch(tokens, decode=decode)
    slots = [pages.flatten(0, 1) for pages in sequence.view.latents.values()]
    seen: list[Tensor] = []
    for place, (layer, hidden) in enumerate(model.stream_layers(batch, sequence.view)):
        assert layer == place
        assert hidden.shape == (len(tokens), model.config.hidden_size)
        seen.append(slots[layer][batch.slots_A].clone())
        assert seen[-1].isfinite().all()
        for later in slots[layer + 1 :]:
            assert later[batch.slots_A].isnan().all()
    assert len(seen) == model.config.num_hidden_layers
    for early, final in zip(seen, slots, strict=True):
        assert torch.equal(early, final[batch.slots_A])


def test_a_step_writes_its_own_slots_only() -> None:
    model = random_model()
    sequence = Sequence.of(model, 17)
    batch = sequence.batch(tokens_of(model.config, 17))
    model.forward(batch, sequence.view)
    for pages in sequence.view.latents.values():
        written = ~pages.flatten(0, 1).isnan().any(-1)
        assert written.nonzero()[:, 0].tolist() == sorted(batch.slots_A.tolist())


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_batch_passes(family: str, decode: bool) -> None:
    model = random_model(tiny_config(family))
    view = Sequence.of(model, 1).view
    hidden = model.forward(Batch.build([], page_size=PAGE_SIZE, device=CPU, decode=decode), view)
    assert hidden.shape == (0, model.config.hidden_size)
    assert model.head(model.norm(hidden)).shape == (0, model.config.vocab_size)
    assert all(pages.isnan().all() for pages in view.latents.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_float32(dtype: torch.dtype) -> None:
    logits = random_model(dtype=dtype).logits([1, 2, 3])
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 97))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], ("0 tokens", "1 to 512")),
        ([1] * 513, ("513 tokens", "1 to 512")),
        ([1, 97], ("token 97", "index 1", "0..96")),
        ([-1], ("token -1", "index 0", "0..96")),
    ],
    ids=["none", "too-many", "beyond-vocabulary", "negative"],
)
def test_impossible_tokens_are_named(tokens: list[int], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        random_model().logits(tokens)
    assert all(word in str(caught.value) for word in words)


@attrs.define
class Counting(Destinations):
    """A source that counts the elements and bytes that were asked for, with or without a name."""

    elements: int = 0
    allocated: int = 0

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> Tensor:
        tensor = Destinations.take(self, name, *shape, dtype=dtype, shard=shard)
        self.elements += tensor.numel()
        self.allocated += tensor.nbytes
        return tensor

    def _allocate(self, *arguments: Any) -> Weight:
        weight = Destinations._allocate(self, *arguments)
        self.elements += sum(tensor.numel() for tensor in tensors_of(weight))
        self.allocated += sum(tensor.nbytes for tensor in tensors_of(weight))
        return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_config_knows_the_elements_of_a_model_and_all_of_them_have_names(case: str, dtype: str) -> None:
    config = ModelConfig.from_dict(CASES[case] | {"torch_dtype": dtype})
    source = Counting(torch.device("meta"), DTYPES[dtype])
    Model.build(
        config,
        source,
        resolve_ops(OpSpec(device=CPU, dtype=DTYPES[dtype])),
        device=CPU,
        dtype=DTYPES[dtype],
        topology=Topology(),
        groups=Topology().apart(),
        weights_id=b"",
    )
    assert source.elements == config.num_parameters
    assert source.allocated == source.num_bytes


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_knows_the_bytes_of_a_page(dtype: torch.dtype, page_size: int) -> None:
    model = random_model(dtype=dtype)
    layout = model.kv_layout(CacheConfig(page_size=page_size))
    memory = model.allocate_pages(layout, 1)
    assert layout.page_bytes == memory.num_bytes == sum(pages.nbytes for pages in KVView.of(memory).latents.values())
    assert model.allocate_pages(layout, 7).num_bytes == 7 * layout.page_bytes


def test_a_cache_of_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'kv_format "bfloat16" was asked for and the model runs in torch\.float32'):
        random_model().kv_layout(CacheConfig(kv_format="bfloat16"))


def test_a_pool_larger_than_memory_is_refused() -> None:
    model = random_model()
    with pytest.raises(ConfigError, match=r"a pool of 1099511627776 pages needs about .* GiB"):
        model.allocate_pages(model.kv_layout(CacheConfig()), 2**40)
