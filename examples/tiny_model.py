"""A DeepSeek-V3-architecture language model of 2.5 million parameters, written to be trained quickly on a CPU.

It has four decoder layers (one dense, three MoE) and one multi-token-prediction (MTP) layer. It is independent of the
library on purpose: it needs only torch and computes attention without a cache, so it can also judge the library's
answers. Formulas: DeepSeek-V3 technical report (arXiv 2412.19437) and the inference code published with it.

Shapes: T tokens in all = B rows of L, D hidden, H heads, E experts. A row of tokens never sees another row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes, named as in a DeepSeek-V3 `config.json`."""

    vocab_size: int = 264
    hidden_size: int = 192
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.5
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096


SHAPE: Final = Shape()


def init_layer(rng: torch.Generator, dense: bool, shape: Shape = SHAPE) -> Weights:
    """Make random float32 weights of one layer. Matrices are `[out, in]`; a leading axis counts heads or experts.

    Experts and the shared expert are stacked, the shared one last, so that one product serves them all.
    """
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    qk_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim

    def matrix(*sizes: int, gain: float = 1.0) -> Tensor:
        return torch.randn(sizes, generator=rng) * (gain / math.sqrt(sizes[-1]))

    weights = {
        "input_norm": torch.ones(hidden),
        "q_a": matrix(shape.q_lora_rank, hidden),
        "q_a_norm": torch.ones(shape.q_lora_rank),
        "q_b": matrix(heads, qk_dim, shape.q_lora_rank),
        "kv_a": matrix(shape.kv_lora_rank + shape.qk_rope_head_dim, hidden),
        "kv_a_norm": torch.ones(shape.kv_lora_rank),
        "kv_b": matrix(heads, shape.qk_nope_head_dim + shape.v_head_dim, shape.kv_lora_rank),
        "o": matrix(hidden, heads * shape.v_head_dim, gain=0.2),
        "post_norm": torch.ones(hidden),
    }
    if dense:
        inner: tuple[int, ...] = (shape.intermediate_size,)
    else:
        inner = (shape.n_routed_experts + 1, shape.moe_intermediate_size)
        weights["router"] = matrix(shape.n_routed_experts, hidden)
    weights["gate"], weights["up"] = matrix(*inner, hidden), matrix(*inner, hidden)
    weights["down"] = matrix(*inner[:-1], hidden, inner[-1], gain=0.2)
    return weights


def init_mtp(rng: torch.Generator, shape: Shape = SHAPE) -> Weights:
    """Make random float32 weights of the MTP layer: a MoE layer, and the parts that join its inputs and end it."""
    hidden = shape.hidden_size
    return init_layer(rng, dense=False, shape=shape) | {
        "enorm": torch.ones(hidden),
        "hnorm": torch.ones(hidden),
        "eh": torch.randn((hidden, 2 * hidden), generator=rng) * (2 * hidden) ** -0.5,
        "out_norm": torch.ones(hidden),
    }


def rms_norm(x: Tensor, weight: Tensor, eps: float = SHAPE.rms_norm_eps) -> Tensor:
    """Apply the root-mean-square norm over the last axis, in float32; return x's dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope_tables(positions: Tensor, shape: Shape = SHAPE) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each `[T, qk_rope_head_dim / 2]` float32, of the positions `[T]`."""
    exponents = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float32) / shape.qk_rope_head_dim
    angles = positions.float()[:, None] * (1.0 / shape.rope_theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs (2i, 2i+1) of the last axis of `[T, heads, rope dim]`."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def attention_inputs(x: Tensor, w: Weights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[T, H, 64]` of hidden states `[T, D]`: MLA in its expanded form, without a
    cache."""
    heads, nope, rank = SHAPE.num_attention_heads, SHAPE.qk_nope_head_dim, SHAPE.kv_lora_rank
    y = rms_norm(x, w["input_norm"])
    q = (rms_norm(y @ w["q_a"].T, w["q_a_norm"]) @ w["q_b"].flatten(0, 1).T).view(len(x), heads, -1)
    latent = y @ w["kv_a"].T  # the part to expand per head, then the rotary key all heads share
    kv = (rms_norm(latent[:, :rank], w["kv_a_norm"]) @ w["kv_b"].flatten(0, 1).T).view(len(x), heads, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
    k_rope = rotate(latent[:, None, rank:], cos, sin).expand(-1, heads, -1)
    return q, torch.cat((kv[..., :nope], k_rope), -1), kv[..., nope:]


def attention(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Compute causal attention inside each row of `length` tokens: `[T, H, 64]` three times -> `[T, H * 64]`."""
    q, k, v = (z.reshape(-1, length, *z.shape[1:]).transpose(1, 2) for z in (q, k, v))
    if length > 256:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:  # plain products beat the fused CPU kernel on short rows
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype) @ v
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def route(y: Tensor, router: Tensor, bias: Tensor, shape: Shape = SHAPE) -> Tensor:
    """Return gates `[T, E]` in float32: zero except for the experts each token goes to.

    The bias, which balances the load without a loss, affects the choice and not the weight (noaux_tc).
    """
    scores = (y.float() @ router.float().T).sigmoid()
    with torch.no_grad():
        biased = scores + bias
        groups = biased.view(len(y), shape.n_group, -1)
        group_scores = groups.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(group_scores).scatter(-1, group_scores.topk(shape.topk_group, -1).indices, 1.0)
        biased = groups.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
        chosen = torch.zeros_like(biased).scatter(-1, biased.topk(shape.num_experts_per_tok, -1).indices, 1.0)
    gates = scores * chosen
    return gates / (gates.sum(-1, keepdim=True) + 1e-20) * shape.routed_scaling_factor


def finish_dense(x: Tensor, mixed: Tensor, w: Weights) -> Tensor:
    """Add attention output and feed-forward network to the residual stream `[T, D]`."""
    x = x + mixed @ w["o"].T
    y = rms_norm(x, w["post_norm"])
    return x + (F.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T


def finish_moe(x: Tensor, mixed: Tensor, w: Weights, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same as `finish_dense`, with experts; also return how many tokens chose each expert, `[E]` float32.

    At this size it is fastest to compute every expert for every token and multiply by a gate that is mostly zero.
    """
    x = x + mixed @ w["o"].T
    y = rms_norm(x, w["post_norm"])
    gates = route(y, w["router"], bias)
    load = (gates > 0).float().sum(0)
    gates = torch.cat((gates, torch.ones_like(gates[:, :1])), -1).to(y.dtype)  # the shared expert's is always one
    inner = F.silu(y @ w["gate"].flatten(0, 1).T) * (y @ w["up"].flatten(0, 1).T)
    inner = (inner.view(*gates.shape, -1) * gates[..., None]).flatten(-2)
    return x + inner @ w["down"].transpose(1, 2).flatten(0, 1), load


def join_mtp(normed: Tensor, next_embeddings: Tensor, w: Weights) -> Tensor:
    """Join the input of the MTP layer: the next token's embedding first, then the main model's state after its final
    norm."""
    return torch.cat((rms_norm(next_embeddings, w["enorm"]), rms_norm(normed, w["hnorm"])), -1) @ w["eh"].T


def weighted_loss(normed: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the cross entropy in nats, weighted mean over tokens; the head's product in the weights' dtype, the rest
    float32."""
    losses = F.cross_entropy((normed @ head.T).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


class TinyModel:
    """The weights in compute dtype, and the forward pass.

    `shared` holds embed, head and norm; `layers` the main layers and then the MTP layer; `biases` `[layers + 1, E]`
    (the dense layer's row is unused); `loads` counts tokens per expert since it was last set to zero.
    """

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        size = (SHAPE.vocab_size, SHAPE.hidden_size)
        self.shared: Weights = {
            "embed": torch.randn(size, generator=rng) * 0.5,
            "head": torch.randn(size, generator=rng) * SHAPE.hidden_size**-0.5,
            "norm": torch.ones(SHAPE.hidden_size),
        }
        num_layers = SHAPE.num_hidden_layers
        self.layers = [init_layer(rng, dense=i < SHAPE.first_k_dense_replace) for i in range(num_layers)]
        self.layers.append(init_mtp(rng))
        self.biases = torch.zeros(num_layers + 1, SHAPE.n_routed_experts)
        self.loads = torch.zeros_like(self.biases)
        self.attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention_inputs
        self.finish_dense: Callable[..., Tensor] = finish_dense
        self.finish_moe: Callable[..., tuple[Tensor, Tensor]] = finish_moe
        self.loss: Callable[..., Tensor] = weighted_loss

    def compile(self) -> None:
        """Compile all but attention, for a fixed number of tokens in all; row lengths may vary."""
        for name in ("attention_inputs", "finish_dense", "finish_moe", "loss"):
            setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def named_weights(self) -> Iterator[tuple[str, Weights, str]]:
        """Return `(name, the dict that holds it, its key)` of every weight, in a fixed order."""
        for key in self.shared:
            yield key, self.shared, key
        for index, layer in enumerate(self.layers):
            for key in layer:
                yield f"layers.{index}.{key}", layer, key

    def rounded(self) -> "TinyModel":
        """Return a copy in float32 that holds the values a bf16 checkpoint stores; it needs no gradient and no
        compiler."""
        copy = TinyModel()
        for (_, target, key), (_, source, _) in zip(copy.named_weights(), self.named_weights(), strict=True):
            target[key] = source[key].detach().bfloat16().float()
        copy.biases = self.biases.clone()
        return copy

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings `[T, D]`. The table may be wider than the compute dtype: its gradient should sum up in
        float32."""
        return F.embedding(tokens.flatten(), self.shared["embed"]).to(self.shared["head"].dtype)

    def layer(self, index: int, x: Tensor, rope: tuple[Tensor, Tensor], length: int) -> Tensor:
        """Run one decoder layer on `[T, D]`; add to `loads`."""
        w = self.layers[index]
        q, k, v = self.attention_inputs(x, w, *rope)
        mixed = attention(q, k, v, length)
        if "router" not in w:
            return self.finish_dense(x, mixed, w)
        x, load = self.finish_moe(x, mixed, w, self.biases[index])
        self.loads[index] += load.detach()
        return x

    def hidden(self, tokens: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return hidden states after the final norm, `[T, D]`, of tokens `[B, L]`."""
        x = self.embed(tokens)
        for index in range(SHAPE.num_hidden_layers):
            x = self.layer(index, x, rope, tokens.shape[1])
        return rms_norm(x, self.shared["norm"])

    def mtp_hidden(self, normed: Tensor, next_tokens: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return the MTP layer's normed states `[T, D]`; the head makes them logits of the token after
        `next_tokens`."""
        w = self.layers[-1]
        x = join_mtp(normed, self.embed(next_tokens), w)
        x = self.layer(len(self.layers) - 1, x, rope, next_tokens.shape[1])
        return rms_norm(x, w["out_norm"])

    def logits(self, tokens: Tensor) -> Tensor:
        """Return float32 logits `[B, L, vocabulary]` of tokens `[B, L]` at positions 0 to L - 1."""
        rope = rope_tables(torch.arange(tokens.shape[1]).repeat(len(tokens)))
        return (self.hidden(tokens, rope) @ self.shared["head"].T).float().view(*tokens.shape, -1)
