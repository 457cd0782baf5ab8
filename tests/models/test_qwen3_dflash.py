"""DFlash drafters against the public code, whatever the batch around a row and however stored."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax
from fp4jax.checkpoints.writer import quantize_checkpoint
from fp4jax.errors import CheckpointError, ConfigError
from fp4jax.fp8 import E4M3, FP8Weight, dequantize_fp8
from fp4jax.generation.drafting import Drafter, Draw
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, init_sampler
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.loading import open_checkpoint
from fp4jax.marlin import MarlinWeight, dequantize_repacked
from fp4jax.model import Model
from fp4jax.models import find_architecture
from fp4jax.quantized import is_quantized

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "checkpoints")]

from checkpoint_edits import edited, refused  # noqa: E402
from dflash_cases import ANCHORS, NAMES, PIECES, config_of, target_of, write_drafter  # noqa: E402

DATA = TESTS / "data" / "dflash"
LAGGING = (4, 6, 0, 6)
"""Pieces of a second row, which has caught up at the end."""

CAPACITY = sum(PIECES) + max(PIECES)


def make_target(case: str, layers: int = 6, **sizes: int) -> Model:
    """A Llama without layers to speak of: embedding and head are all that a drafter reads."""
    hf = {**config_of(case), "num_hidden_layers": layers, **sizes}
    architecture = find_architecture(["LlamaForCausalLM"])
    values = target_of(config_of(case))
    params = {
        "embed_tokens": {"weight": jnp.asarray(values["embed"])},
        "lm_head": {"weight": jnp.asarray(values["head"])},
    }
    return Model(architecture.model(config=architecture.config(hf)), params)


def make_draw(rows: list[SamplingParams], vocab: int) -> Draw:
    features, batch = SamplingFeatures.of(rows), len(rows)
    sampling = SamplingArrays.of(rows, features)
    none = jnp.zeros((batch, 0), jnp.int32)
    state = init_sampler(sampling, features, none, jnp.zeros(batch, jnp.int32), vocab)
    return Draw(sampling, state, jnp.zeros(batch, jnp.int32), features)


@functools.partial(jax.jit, static_argnames=("drafter", "target"))
def step(drafter, params, target, target_params, cache, taps, lengths, anchor, draw):
    """More context, and a proposal after it."""
    cache = drafter.observe(params, cache, None, taps, lengths)
    hidden = drafter.hidden_states(params, target, target_params, anchor, cache)
    logits = drafter.logits(target, target_params, hidden)
    proposal = drafter.propose(params, target, target_params, anchor, cache, draw)
    return cache, (hidden, logits, proposal.tokens)


def run(draft: Model, case: str, pieces: tuple[tuple[int, ...], ...], target: Model | None = None):
    """Hidden states, logits and tokens, ``[proposal, row, …]``, with padding that is not 0."""
    module, target = draft.module, target or make_target(case)
    taps, batch, width = target_of(config_of(case))["taps"], len(pieces), max(PIECES)
    cache = module.init_cache(batch, CAPACITY, jnp.float32)
    draw = make_draw([SamplingParams()] * batch, module.config.vocab_size)
    at, found = np.zeros(batch, int), []
    for i, anchor in enumerate(ANCHORS):
        chunk = np.full((batch, width, *taps.shape[1:]), 3.0, np.float32)
        for b, row in enumerate(pieces):
            chunk[b, : row[i]] = taps[at[b] : at[b] + row[i]]
            at[b] += row[i]
        lengths = np.asarray([row[i] for row in pieces], np.int32)
        cache, out = step(
            module,
            draft.params,
            target.module,
            target.params,
            cache,
            tuple(jnp.asarray(chunk[:, :, j]) for j in range(taps.shape[1])),
            lengths,
            np.full(batch, anchor, np.int32),
            draw,
        )
        found.append(jax.device_get(out))
    return [np.stack(values) for values in zip(*found, strict=True)]


def load(folder: Path) -> Model:
    return fp4jax.load_draft(folder, dtype="float32", progress=False)


@pytest.mark.parametrize("case", NAMES)
def test_as_the_public_code(case, tmp_path):
    """Context comes in pieces; beside each row is one whose context lags behind."""
    reference = np.load(DATA / "reference.npz")
    draft = load(write_drafter(tmp_path / case, case))
    assert isinstance(draft.module, Drafter)
    hidden, logits, tokens = run(draft, case, (PIECES, LAGGING))
    wanted = {key: reference[f"{case}/{key}"] for key in ("hidden", "logits", "tokens")}
    np.testing.assert_allclose(hidden[:, 0], wanted["hidden"][:, 1:], atol=5e-5)
    np.testing.assert_allclose(logits[:, 0], wanted["logits"], atol=5e-5)
    np.testing.assert_array_equal(tokens[:, 0], wanted["tokens"])
    np.testing.assert_allclose(logits[-1, 1], wanted["logits"][-1], atol=5e-5)
    np.testing.assert_array_equal(tokens[-1, 1], wanted["tokens"][-1])
    assert np.abs(logits[0, 1] - wanted["logits"][0]).max() > 0.1
    plain = wanted["logits"].argmax(-1)
    assert (tokens[:, 0] != plain).any() == case.startswith("second")


def test_every_tensor_of_a_real_checkpoint_is_used_once():
    hf = json.loads((DATA / "dflash2-config.json").read_text())
    architecture = find_architecture(hf["architectures"])
    found: dict[str, list[int]] = {}
    for key in architecture.keys(architecture.config(hf)):
        for source, rows in zip(key.sources, key.rows, strict=False):
            name = source if key.kind == "parameter" else f"{source}.weight"
            shape = key.rows if key.kind == "parameter" else (rows, key.k) if key.k else (rows,)
            assert name not in found
            found[name] = list(shape)
    assert found == json.loads((DATA / "dflash2-shapes.json").read_text())


def test_what_a_real_config_says():
    hf = json.loads((DATA / "dflash2-config.json").read_text())
    config = find_architecture(hf["architectures"]).config(hf)
    assert (config.block_size, config.mask_token_id) == (16, 201818)
    assert config.target_layer_ids == (1, 13, 25, 37, 49)
    assert config.windows == (2048,) * 5 and config.causal == (False,) * 5
    assert (config.selector.rank, config.selector.top_k) == (256, 16)
    assert (config.conv.taps, config.conv.group) == (2, 16)
    assert config.final_logit_softcapping == 20 and config.output_multiplier == 26**-0.5


def config(**changes):
    hf = {**config_of("full"), **changes}
    return find_architecture(hf["architectures"]).config(hf)


def test_fields_of_earlier_configs():
    """Everything at the top level, or left to the number of the target's layers."""
    own = {"mask_token_id": 3, "target_layer_ids": [2]}
    flat = config(dflash_config=None, **own)
    assert flat == config(dflash_config=own)
    spread = config(dflash_config={"mask_token_id": 3}, num_target_layers=36, num_hidden_layers=5)
    assert spread.target_layer_ids == (1, 9, 17, 25, 33)
    one = config(dflash_config={"mask_token_id": 3}, num_target_layers=9, num_hidden_layers=1)
    assert one.target_layer_ids == (4,)
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    assert config(**sliding).windows == (8, 8) and config(**sliding).causal == (True, True)
    off = config(**sliding, use_sliding_window=False)
    assert off.windows == (None, None) and off.causal == (True, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 1}, "block_size = 1"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 56, "target_layer_ids": [1]}}, "vocab_size = 56"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": None}, "num_target_layers"),
        ({"dflash_config": [1]}, "dflash_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"is_causal": "no"}, "is_causal"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"output_multiplier": 0}, "output_multiplier"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size"),
        (
            {
                "architectures": ["DFlash2DraftModel"],
                "conv_kernel_size": 2,
                "conv_group_size": 5,
                "selector_rank": 2,
                "selector_top_k": 2,
            },
            "conv_group_size = 5",
        ),
        (
            {
                "architectures": ["DFlash2DraftModel"],
                "conv_kernel_size": 2,
                "conv_group_size": 4,
                "selector_rank": 2,
                "selector_top_k": 57,
            },
            "selector_top_k = 57",
        ),
    ],
)
def test_what_cannot_be_served_is_named(changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        config(**changes)


def test_whether_it_fits(tmp_path):
    module = load(write_drafter(tmp_path / "d", "full")).module
    module.check_fits(make_target("full"))
    for target, words in (
        (make_target("full", vocab_size=64), ("vocab_size is 56", "is 64")),
        (make_target("full", hidden_size=64), ("hidden_size is 32", "is 64")),
        (make_target("full", layers=8), ("num_target_layers = 6", "is 8")),
    ):
        with pytest.raises(ConfigError) as error:
            module.check_fits(target)
        assert all(word in str(error.value) for word in words)
    hf = {**config_of("full"), "num_target_layers": None}
    free = module.clone(config=find_architecture(hf["architectures"]).config(hf))
    free.check_fits(make_target("full", layers=5))
    with pytest.raises(ConfigError, match=r"\[1, 3\].* is 4: the last that can be read is 2"):
        free.check_fits(make_target("full", layers=4))


def test_blocks_of_another_size(tmp_path):
    module = load(write_drafter(tmp_path / "d", "second")).module
    assert module.taps == (1, 3, 5) and module.block_size == 6
    assert module.with_block_size(3).block_size == 3
    assert module.with_block_size(6) == module and hash(module.with_block_size(6)) == hash(module)
    with pytest.raises(ConfigError, match="block_size = 1"):
        module.with_block_size(1)


@pytest.mark.parametrize("case", ["full", "second"])
def test_drawn_tokens_come_from_their_scores(case, tmp_path):
    """Scores hold each token that was drawn; a selector's hold its candidates alone."""
    draft, target = load(write_drafter(tmp_path / case, case)), make_target(case)
    module = draft.module
    draw = make_draw([SamplingParams(temp=1.0, seed=3), SamplingParams(temp=0.0)], 56)
    cache = module.init_cache(2, 16, jnp.float32)
    anchor = jnp.asarray([4, 4], jnp.int32)
    call = jax.jit(module.propose, static_argnums=1)
    proposal = call(draft.params, target.module, target.params, anchor, cache, draw)
    scores = np.asarray(proposal.scores)
    width = module.block_size - 1
    assert scores.shape == (2, width, 56)
    own = np.take_along_axis(scores, np.asarray(proposal.tokens)[..., None], axis=-1)
    assert np.isfinite(own).all()
    finite = np.isfinite(scores).sum(-1)
    assert (finite == (module.config.selector.top_k if case == "second" else 56)).all()
    np.testing.assert_array_equal(proposal.tokens[1], scores[1].argmax(-1))


def dequantized(params):
    """The tree with every quantized weight as an f32 matrix."""

    def widen(node):
        if isinstance(node, MarlinWeight):
            return dequantize_repacked(node, jnp.float32)
        return dequantize_fp8(node) if isinstance(node, FP8Weight) else node

    return jax.tree.map(widen, params, is_leaf=is_quantized)


def to_fp8(tensors):
    """Every linear in e4m3 with one scale."""
    for name in [
        n for n in tensors if n.endswith(("proj.weight", "projection.weight", "fc.weight"))
    ]:
        value = tensors[name].astype(np.float32)
        scale = np.float32(np.abs(value).max() / 448)
        tensors[name] = (value / scale).astype(E4M3)
        tensors[f"{name}_scale"] = np.asarray(scale)


def quantized(kind: str, folder: Path) -> Path:
    source = edited(
        write_drafter(folder / "f32", "second"),
        folder / "bf16",
        tensors=lambda t: t.update({n: v.astype(ml_dtypes.bfloat16) for n, v in t.items()}),
    )
    if kind != "fp8":
        return quantize_checkpoint(source, folder / kind, format=kind)
    stated = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
    return edited(
        source,
        folder / kind,
        tensors=to_fp8,
        config=lambda hf: hf.update(quantization_config=stated),
    )


@pytest.mark.parametrize("kind", ["modelopt", "fp8"])
def test_quantized_weights(kind, tmp_path):
    """A quantized drafter gives what its weights say, and they are the linears' alone."""
    draft = load(quantized(kind, tmp_path))
    nodes = jax.tree.leaves(draft.params, is_leaf=is_quantized)
    held = [node for node in nodes if is_quantized(node)]
    layer = ("q_proj", "kv_proj", "o_proj", "gate_up_proj", "down_proj", "conv", "conv")
    assert len(held) == len(("fc", "selector")) + 2 * len(layer)
    assert {type(node) for node in held} == {FP8Weight if kind == "fp8" else MarlinWeight}
    plain = Model(draft.module, dequantized(draft.params))
    found, wanted = (run(m, "second", (PIECES,))[1] for m in (draft, plain))
    np.testing.assert_allclose(found, wanted, atol=5e-5)
    dense = jax.tree.leaves(load(tmp_path / "bf16").params)
    for stored, exact in zip(jax.tree.leaves(plain.params), dense, strict=True):
        error = np.linalg.norm((stored.astype(np.float32) - exact.astype(np.float32)).ravel())
        share = error / np.linalg.norm(exact.astype(np.float32).ravel())
        assert share < (0.04 if kind == "fp8" else 0.13)


def test_the_head_is_the_targets(tmp_path):
    """Another target's head, another's logits; the drafter holds neither head nor embedding."""
    draft = load(write_drafter(tmp_path / "d", "full"))
    assert not {"embed_tokens", "lm_head"} & set(draft.params)
    target = make_target("full")
    other = Model(
        target.module,
        {**target.params, "lm_head": {"weight": -target.params["lm_head"]["weight"]}},
    )
    hidden, logits, _ = run(draft, "full", (PIECES,), target)
    same, negated, _ = run(draft, "full", (PIECES,), other)
    np.testing.assert_array_equal(hidden, same)
    np.testing.assert_allclose(negated, -logits, atol=1e-5)


def test_copies_of_the_targets_tables_are_left_out(tmp_path):
    def add(tensors):
        for name in ("embed_tokens", "lm_head"):
            tensors[f"{name}.weight"] = np.zeros((56, 32), np.float32)

    folder = edited(write_drafter(tmp_path / "d", "full"), tmp_path / "e", tensors=add)
    opened = open_checkpoint(folder)
    assert {info.name for info, _ in opened.plan.skipped} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }

    def extra(tensors):
        tensors["layers.0.attention_conv.base_kernel"] = np.zeros((2, 2, 32), np.float32)

    folder = edited(tmp_path / "d", tmp_path / "x", tensors=extra)
    with refused(CheckpointError, "layers.0.attention_conv.base_kernel", "belong to no part"):
        load(folder)


def test_each_loader_knows_its_kind(oracles, tmp_path):
    folder = write_drafter(tmp_path / "d", "full")
    with refused(ConfigError, str(folder), "is a drafter", "fp4jax.load_draft"):
        fp4jax.load_model(folder)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is no drafter; fp4jax\.load_model"):
        fp4jax.load_draft(oracles / "llama-modelopt")
