"""What ``train_dflash.py`` computes: text by the target itself, and the loss of a drafter on it.

The drafter is the package's own module with f32 weights, so that what is trained is what drafts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import fp4jax
from fp4jax.fp8 import FP8Weight, dequantize_fp8
from fp4jax.generation import Limits, SamplingArrays, SamplingFeatures, SamplingParams, complete
from fp4jax.generation.block_drafter import BlockDrafter
from fp4jax.layers.cache import Cache
from fp4jax.marlin import MarlinWeight, dequantize_repacked
from fp4jax.models import find_architecture
from fp4jax.quantized import is_quantized

TEMPERATURES = (0.0, 0.0, 0.0, 0.7)
"""Of the rows of a batch, in turn: mostly what greedy decoding will have to draft."""

CONTEXT_LAYERS = 5
"""Layers of the target that the drafter reads, spread over its depth."""

SECOND = (
    ("conv_kernel_size", 2),
    ("conv_group_size", 16),
    ("selector_rank", 128),
    ("selector_top_k", 16),
)
"""What the second generation adds to a config."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corpus:
    """Prompts with answers.

    Attributes:
      tokens: i32 [N, W], right-padded.
      starts: i32 [N], where each answer begins.
      lengths: i32 [N], tokens of prompt and answer.
    """

    tokens: Any
    starts: Any
    lengths: Any


def generate_corpus(
    target: fp4jax.Model,
    prompts: Sequence[Sequence[int]],
    *,
    answer_tokens: int,
    batch_size: int,
    progress: Callable[[int], None],
) -> Corpus:
    """Lets ``target`` answer ``prompts`` (token ids); ``progress`` is told how many are done."""
    width = math.ceil(max(map(len, prompts)) / 16) * 16
    batch_size = min(batch_size, len(prompts))
    rows = [
        SamplingParams(temp=TEMPERATURES[i % len(TEMPERATURES)], seed=i) for i in range(batch_size)
    ]
    features = SamplingFeatures.of(rows)
    sampling = SamplingArrays.of(rows, features)
    limits = Limits(
        jnp.tile(jnp.asarray(target.eos_token_ids, jnp.int32), (batch_size, 1)),
        jnp.full(batch_size, answer_tokens, jnp.int32),
    )
    parts = []
    for begin in range(0, len(prompts), batch_size):
        some = [prompts[(begin + i) % len(prompts)] for i in range(batch_size)]
        padded = np.zeros((batch_size, width), np.int32)
        for row, ids in zip(padded, some, strict=True):
            row[: len(ids)] = ids
        lengths = np.asarray([len(ids) for ids in some], np.int32)
        seeds = sampling.seed + jnp.uint32(begin)
        part = answer(
            target.module, target.params, padded, lengths,
            dataclasses.replace(sampling, seed=seeds), limits,
            features=features, size=answer_tokens,
        )  # fmt: skip
        parts.append(jax.device_get(part))
        progress(min(begin + batch_size, len(prompts)))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(prompts)], *parts)


@functools.partial(jax.jit, static_argnames=("module", "features", "size"))
def answer(module, params, prompts, lengths, sampling, limits, *, features, size) -> Corpus:
    """Prompts [B, T] and what the model says to each, in ``T + size`` columns."""
    batch, width = prompts.shape
    out = complete(
        module, params, prompts, lengths, sampling, limits,
        features=features, capacity=width + size, size=size, dtype=module.dtype,
    )  # fmt: skip
    columns = lengths[:, None] + jnp.arange(size, dtype=jnp.int32)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    tokens = jnp.pad(prompts, ((0, 0), (0, size))).at[rows, columns].set(out.tokens)
    return Corpus(tokens, lengths, lengths + out.count)


def drafter_config(
    target: fp4jax.Model, corpus: Corpus, *, layers: int, block_size: int, second: bool
) -> dict[str, Any]:
    """Contents of the drafter's ``config.json``: layers like the target's, and few of them."""
    c = target.config
    depth = c.num_hidden_layers
    count = min(CONTEXT_LAYERS, depth - 1)
    spread = np.linspace(min(1, depth - 2), max(depth - 3, 0), count).round()
    unused = np.setdiff1d(np.arange(c.vocab_size), corpus.tokens)
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "num_target_layers": depth,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": int(unused[0]),
            "target_layer_ids": sorted({int(i) for i in spread}),
            **dict(SECOND if second else ()),
        },
    }


def make_drafter(hf: dict[str, Any], target: fp4jax.Model, seed: int) -> tuple[BlockDrafter, Any]:
    """An untrained drafter and its parameters in f32."""
    architecture = find_architecture(hf["architectures"])
    config = architecture.config(hf)
    drafter = architecture.model(config=config, dtype=target.dtype, quantized=False)
    start = jnp.zeros((1, config.block_size, config.hidden_size), jnp.float32)
    wide = drafter.clone(dtype=jnp.dtype(jnp.float32))
    cache = wide.init_cache(1, config.block_size, jnp.float32)
    params = jax.jit(wide.init)(jax.random.key(seed), start, cache)["params"]
    # The head expects what the target's last norm gives it.
    params["norm"]["weight"] = target.params["norm"]["weight"].astype(jnp.float32)
    for layer in params.values():
        for name in ("attention_conv", "mlp_conv"):
            if name in layer:  # begins by passing everything on
                base = layer[name]["base_kernel"]
                layer[name]["base_kernel"] = jnp.zeros_like(base).at[:, 0].set(1)
    if "candidate_selector" in params:  # begins by leaving the logits alone
        codebook = params["candidate_selector"]["successor_codebook"]
        params["candidate_selector"]["successor_codebook"] = jnp.zeros_like(codebook)
    return drafter, params


def with_dense_head(params: dict[str, Any]) -> dict[str, Any]:
    """The target's tree with embedding and head in f32: quantized ones have no gradient."""

    def dense(node):
        if isinstance(node, MarlinWeight):
            return dequantize_repacked(node, jnp.float32)
        return dequantize_fp8(node) if isinstance(node, FP8Weight) else node

    heads = {name: params[name] for name in ("embed_tokens", "lm_head") if name in params}
    return params | jax.tree.map(dense, heads, is_leaf=is_quantized)


def block_loss(params, drafter, target, target_params, batch: Corpus, key, *, anchors: int):
    """Cross-entropy of blocks that follow random anchors in the answers.

    Each block sees the context before its anchor and itself, as in drafting. Position i of a block
    counts ``exp(-(i - 1) / γ)``, because it matters only where all before it are right.

    Args:
      params: the drafter's tree.
      drafter, target: static modules.
      target_params: of :func:`with_dense_head`.
      batch: some rows of the corpus.
      key: draws the anchors.
      anchors: blocks a row.

    Returns:
      The loss, and the mean number of tokens that a step would have given.
    """
    size, (rows, width) = drafter.block_size, batch.tokens.shape
    out = target.apply(
        {"params": target_params}, batch.tokens, lengths=batch.lengths, taps=drafter.taps
    )
    none = drafter.init_cache(rows, width, drafter.dtype)
    context = drafter.observe(params, none, batch.tokens, out.taps, batch.lengths)

    first, last = batch.starts[:, None], batch.lengths[:, None] - 1
    at = jax.random.randint(key, (rows, anchors), first, jnp.maximum(last, first + 1))
    places = at[..., None] + jnp.arange(size, dtype=jnp.int32)  # [rows, anchors, block]
    valid = (places < batch.lengths[:, None, None])[..., 1:]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
    tokens = batch.tokens[row, jnp.minimum(places, width - 1)]
    labels = tokens[..., 1:]

    def hidden_states(anchor, position):
        cache = Cache(position, context.layers)
        return drafter.hidden_states(params, target, target_params, anchor, cache)

    hidden = jax.vmap(hidden_states, in_axes=1, out_axes=1)(tokens[..., 0], at)
    logits = drafter.logits(target, target_params, hidden)
    costs = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = lax.argmax(logits, 3, jnp.int32) == labels
    if drafter.config.selector is not None:
        extra, right = selector_costs(params, drafter, hidden, logits, tokens)
        costs = costs + extra
    gamma = max(size / 2, 1.0)  # 4 for blocks of 8, as in the paper
    weights = jnp.exp(-jnp.arange(size - 1, dtype=jnp.float32) / jnp.float32(gamma))
    weights = jnp.where(valid, weights, 0)
    accepted = 1 + jnp.cumprod((right & valid).astype(jnp.float32), axis=-1).sum(-1)
    return jnp.sum(costs * weights) / jnp.maximum(jnp.sum(weights), 1), jnp.mean(accepted)


def selector_costs(params, drafter, hidden, logits, tokens):
    """The same for the candidate selector, after the right token at each position before."""
    flat = tokens.reshape(-1, tokens.shape[-1])
    labels = flat[:, 1:]

    def choose(scores, ids, position):
        return lax.dynamic_index_in_dim(labels, position, 1, keepdims=False), (scores, ids)

    _, (scores, ids) = drafter.apply(
        {"params": params},
        hidden.reshape(*labels.shape, -1),
        logits.reshape(*labels.shape, -1),
        flat[:, 0],
        choose,
        method="select",
    )
    is_label = ids == labels[..., None]
    own = jnp.sum(jnp.where(is_label, scores, 0), axis=-1)
    costs = jnp.where(is_label.any(-1), jax.nn.logsumexp(scores, axis=-1) - own, 0)
    best = jnp.take_along_axis(ids, jnp.argmax(scores, axis=-1, keepdims=True), axis=-1)[..., 0]
    shape = (*tokens.shape[:-1], tokens.shape[-1] - 1)
    return costs.reshape(shape), (best == labels).reshape(shape)


def make_optimizer() -> optax.GradientTransformation:
    """AdamW, but for the learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.01, lambda tree: jax.tree.map(lambda w: w.ndim > 1, tree)),
    )


@functools.partial(jax.jit, static_argnames=("drafter", "target", "anchors", "rows"))
def train_step(
    state, drafter, target, target_params, corpus: Corpus, rate, step, *, anchors: int, rows: int
):
    """One step on ``rows`` random sequences.

    Args:
      state: parameters and the optimizer's state.
      drafter, target: static modules.
      target_params: of :func:`with_dense_head`.
      corpus: all of it, on the device.
      rate: learning rate, f32.
      step: number of the step, i32; seeds the choice of rows and anchors.
      anchors: blocks a row.

    Returns:
      The new state, and (loss, tokens a step).
    """
    params, moments = state
    which, where = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
    chosen = jax.random.randint(which, (rows,), 0, corpus.tokens.shape[0])
    batch = jax.tree.map(lambda array: jnp.take(array, chosen, axis=0), corpus)
    loss = functools.partial(block_loss, anchors=anchors)
    (cost, accepted), gradient = jax.value_and_grad(loss, has_aux=True)(
        params, drafter, target, target_params, batch, where
    )
    updates, moments = make_optimizer().update(gradient, moments, params)
    updates = jax.tree.map(lambda update: -rate * update, updates)
    return (optax.apply_updates(params, updates), moments), (cost, accepted)


def learning_rate(done: float, peak: float, warm: float = 0.05) -> float:
    """Up to ``peak``, then down to nothing; ``done`` is the share of the training behind."""
    return peak * min(done / warm, 1.0) * min((1 - done) / (1 - warm), 1.0)
