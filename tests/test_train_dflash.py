"""The example that trains a drafter: what it computes, and the whole of it at a tiny size."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp4jax
from fp4jax.checkpoints.writer import quantize_checkpoint

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "examples")]

import train_dflash  # noqa: E402
from dflash_prompts import evaluation_prompts, training_prompts  # noqa: E402
from dflash_training import Corpus, block_loss, drafter_config, make_drafter  # noqa: E402
from tiny_checkpoint import make_unquantized  # noqa: E402

SIZES = (
    "--sequences=12",
    "--answer-tokens=24",
    "--batch-size=6",
    "--rows=4",
    "--anchors=8",
    "--block-size=5",
    "--layers=1",
    "--evaluate=2",
    "--evaluate-tokens=16",
    "--dtype=float32",
)


@pytest.fixture(scope="module")
def checkpoint(oracles, tmp_path_factory) -> Path:
    """A tiny NVFP4 target with a tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    source = make_unquantized(oracles, folder / "bf16")
    return quantize_checkpoint(source, folder / "nvfp4", exclude=())


@pytest.fixture
def run(checkpoint, tmp_path, monkeypatch):
    """Calls the script; returns its exit status and the folder that it was to write."""
    # Byte by byte, real prompts are longer than such a model's context has to be.
    monkeypatch.setattr(
        train_dflash, "training_prompts", lambda count, seed: [f"say {i}" for i in range(count)]
    )

    def call(*args: str) -> tuple[int, Path]:
        folder = tmp_path / "drafter"
        given = [f"--model={checkpoint}", f"--output={folder}", *SIZES, *args]
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            return train_dflash.main(given), folder

    return call


@pytest.mark.parametrize(
    ("args", "kind"),
    [((), "DFlashDraftModel"), (("--generation=2", "--nvfp4"), "DFlash2DraftModel")],
)
def test_a_drafter_learns_and_drafts(args, kind, run, capsys):
    status, folder = run("--steps=40", "--learning-rate=3e-3", *args)
    assert status == 0
    out = capsys.readouterr().out
    assert "| all | 2 | 2 |" in out and "| topics held out |" not in out
    used = folder.with_name(f"{folder.name}-NVFP4") if "--nvfp4" in args else folder
    results = json.loads((used / "results.json").read_text())
    losses = results["training"]["losses"]
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert results["evaluation"]["all"]["same"] == 2
    draft = fp4jax.load_draft(used, progress=False)
    assert json.loads((used / "config.json").read_text())["architectures"] == [kind]
    assert draft.config.block_size == 5 and draft.config.num_hidden_layers == 1


def test_interrupted_training_is_saved(run, monkeypatch, capsys):
    step = train_dflash.train_step

    def interrupted(*args, **kwargs):
        if int(args[6]) == 3:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(train_dflash, "train_step", interrupted)
    status, folder = run("--steps=1000")
    assert status == 130
    assert "interrupted after step 3" in capsys.readouterr().err
    assert fp4jax.load_draft(folder, progress=False).config.block_size == 5
    assert not (folder / "results.json").exists()


def test_interrupted_before_training(run, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_dflash, "generate_corpus", interrupted)
    status, folder = run("--steps=10")
    assert status == 130 and not folder.exists()
    assert "interrupted" in capsys.readouterr().err


def test_the_loss_is_that_of_what_is_drafted(checkpoint):
    """A block sees what came before its anchor, as it will when it drafts."""
    target = fp4jax.load_model(checkpoint, dtype="float32", progress=False)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, (3, 20)).astype(np.int32)
    starts = np.asarray([4, 9, 12], np.int32)
    corpus = Corpus(tokens, starts, starts + 2)  # one place for an anchor, one label
    hf = drafter_config(target, corpus, layers=2, block_size=4, second=False)
    drafter, params = make_drafter(hf, target, seed=1)
    module = target.module
    loss, accepted = jax.jit(block_loss, static_argnums=(1, 2), static_argnames="anchors")(
        params, drafter, target.module, target.params, corpus, jax.random.key(0), anchors=2
    )

    @functools.partial(jax.jit, static_argnums=0)
    def drafted(drafter, params, target_params, before, length, anchor):
        out = module.apply({"params": target_params}, before, taps=drafter.taps)
        cache = drafter.init_cache(1, before.shape[1], jnp.float32)
        cache = drafter.observe(params, cache, before, out.taps, length)
        hidden = drafter.hidden_states(params, module, target_params, anchor, cache)
        return drafter.logits(module, target_params, hidden)[0, 0]

    costs, right = [], []
    for row, start in zip(tokens, starts, strict=True):
        before = np.where(np.arange(20) < start, row, 7).astype(np.int32)[None]
        logits = drafted(drafter, params, target.params, before, start[None], row[start][None])
        label = jnp.asarray(row[start + 1])
        costs.append(optax.softmax_cross_entropy_with_integer_labels(logits, label))
        right.append(int(jnp.argmax(logits)) == label)
    np.testing.assert_allclose(loss, np.mean(costs), rtol=1e-5)
    np.testing.assert_allclose(accepted, 1 + np.mean(right))


def test_prompts_for_evaluation_are_not_trained_on():
    training, evaluation = training_prompts(20_000), evaluation_prompts()
    assert len(set(training)) == 20_000 and len(set(evaluation)) == len(evaluation) == 32
    assert not set(training) & set(evaluation)
    assert training_prompts(50, seed=1) != training_prompts(50)
    assert len(training_prompts(600_000)) == 600_000
