"""Two engines in one process never share a weight.

The hazard that this package exists to rule out, first on record with a small cache of the kind
that other engines have, then the same scenario through ``load`` and ``generate``.
"""

# fp4jax: allow-file ES002 (the hazard on record)

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compilations import Compilations
from engine_checkpoints import KINDS, make_checkpoint
from engine_outputs import NEW_TOKENS, PROMPTS, engine_outputs, generation_outputs

import fp4jax
from fp4jax.marlin import repack
from fp4jax.model import forward
from fp4jax.nvfp4 import NVFP4Weight, dequantize
from fp4jax.ops.w4a16_matmul import w4a16_matmul

HERE = Path(__file__).parent


# --- the hazard -------------------------------------------------------------------------------


class AddressKeyedCache:
    """What other engines do: repack on first use, remember the result by the weight's address."""

    def __init__(self):
        self._repacked = {}

    def matmul(self, x, weight):
        key = id(weight)
        if key not in self._repacked:
            self._repacked[key] = repack(weight)
        return w4a16_matmul(x, self._repacked[key])


def make_weight(seed: int) -> NVFP4Weight:
    rng = np.random.default_rng(seed)
    return NVFP4Weight(
        packed=rng.integers(0, 256, (64, 32), np.uint8),
        scale=rng.uniform(0.5, 2, (64, 4)).astype(ml_dtypes.float8_e4m3fn),
        global_scale=np.float32(0.01),
    )


def make_weight_at(address: int, seed: int) -> NVFP4Weight | None:
    """A weight whose ``id`` is ``address``, a freed one that the allocator hands out again."""
    weight = make_weight(seed)
    misses = []
    for _ in range(100_000):  # more than other free places of this size
        if id(weight) == address:
            return weight
        misses.append(weight)  # kept alive, so that the next one must lie elsewhere
        weight = dataclasses.replace(weight)
    return None


def recycled_pair(cache: AddressKeyedCache, x) -> tuple[np.ndarray, NVFP4Weight]:
    """A first engine's answer, and a second engine's weight at the address of the first's."""
    for attempt in range(100):  # something else may take the address first
        first = make_weight(seed=1)
        address = id(first)
        answer = np.asarray(cache.matmul(x, first))
        del first
        second = make_weight_at(address, seed=2)
        if second is not None:
            assert id(second) == address, attempt
            return answer, second
    raise AssertionError("no address was recycled")


def test_an_address_keyed_cache_serves_the_dead_engines_weight():
    cache = AddressKeyedCache()
    x = jnp.cos(jnp.arange(64, dtype=jnp.float32))[None]
    first_answer, second = recycled_pair(cache, x)
    answer = np.asarray(cache.matmul(x, second))

    np.testing.assert_array_equal(answer, first_answer)  # right shape, right dtype, wrong numbers
    right = np.asarray(x @ dequantize(jax.tree.map(jnp.asarray, second)).T)
    np.testing.assert_allclose(np.asarray(w4a16_matmul(x, repack(second))), right, rtol=1e-5)
    assert np.abs(answer - right).max() > 0.1 * np.abs(right).max()


# --- its absence ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_engines(tmp_path_factory, oracles):
    """By kind: two checkpoints of the same shapes, what each gives in a process of its own."""
    root = tmp_path_factory.mktemp("engines")

    def make(kind: str) -> tuple[list[Path], list[dict]]:
        paths = [root / kind / f"{i}" for i in range(2)]
        if not (root / kind).exists():
            for i, path in enumerate(paths):
                make_checkpoint(path, oracles, KINDS[kind], i)
            script = str(HERE / "engine_outputs.py")
            children = [
                subprocess.Popen(
                    [sys.executable, script, str(path), str(path / "alone.npz")], env=os.environ
                )
                for path in paths
            ]
            assert [child.wait(timeout=300) for child in children] == [0, 0]
        return paths, [dict(np.load(path / "alone.npz")) for path in paths]

    return make


@pytest.fixture(params=KINDS)
def engines(request, make_engines):
    """Kind, and what ``make_engines`` gives for it."""
    return request.param, *make_engines(request.param)


def load(path: Path) -> fp4jax.Model:
    return fp4jax.load_model(path, dtype="float32", progress=False)


def assert_same(found: dict, alone: dict) -> None:
    """Bit for bit."""
    for name, value in found.items():
        assert value.tobytes() == alone[name].tobytes(), name


def live() -> tuple[int, int]:
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_the_two_engines_differ_in_every_consumer(engines):
    kind, _, alone = engines
    found = {name.removeprefix("consumer ") for name in alone[0] if name.startswith("consumer")}
    assert found == set(KINDS[kind].consumers)
    for name, value in alone[0].items():
        assert value.shape == alone[1][name].shape
        assert not np.array_equal(value, alone[1][name]), name


def test_a_second_engine_after_the_first_is_gone(engines):
    _, paths, alone = engines
    load(paths[0])(np.asarray([[1, 2]]))  # constants that JAX itself makes once
    at_start = live()
    first = load(paths[0])
    first_id = first.engine_id
    assert_same(engine_outputs(first), alone[0])
    del first
    assert live() == at_start

    traces = forward._cache_size()
    with Compilations() as compiled:
        second = load(paths[1])
        assert second.engine_id != first_id
        assert_same(engine_outputs(second), alone[1])
    assert (forward._cache_size(), compiled.count) == (traces, 0)
    del second
    assert live() == at_start

    again = load(paths[0])
    assert again.engine_id == first_id
    assert_same(engine_outputs(again), alone[0])


def test_interleaved_engines(engines):
    _, paths, alone = engines
    models = [load(path) for path in paths]
    for _ in range(2):
        for model, expected in zip(models, alone, strict=True):
            assert_same(engine_outputs(model), expected)
    sessions = [
        [
            iter(fp4jax.stream_generate(model, NoText(), list(PROMPTS[0]), ignore_eos=True,
                                        max_tokens=NEW_TOKENS))
            for model in models
        ]
    ]  # fmt: skip
    tokens = [[next(stream).token for stream in sessions[0]] for _ in range(NEW_TOKENS)]
    for i, expected in enumerate(alone):
        assert [step[i] for step in tokens] == expected["greedy tokens"][0].tolist()


def test_two_threads(engines):
    _, paths, alone = engines
    models = [load(path) for path in paths]
    start = threading.Barrier(2)
    found: list[list[dict]] = [[], []]

    def run(which: int) -> None:
        start.wait(timeout=60)
        for _ in range(4):
            found[which].append(generation_outputs(models[which]))

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    for which, expected in enumerate(alone):
        assert len(found[which]) == 4
        for outputs in found[which]:
            assert_same(outputs, expected)


def test_swapping_the_tree_swaps_the_engine(engines):
    """The tree is the engine: one module serves both, and nothing stays behind."""
    _, paths, alone = engines
    first, second = (load(path) for path in paths)
    assert first.module == second.module and hash(first.module) == hash(second.module)
    swapped = fp4jax.Model(first.module, second.params, first.eos_token_ids)
    assert swapped.engine_id == second.engine_id != first.engine_id
    assert_same(generation_outputs(swapped), alone[1])
    assert_same(generation_outputs(first), alone[0])


def test_a_hybrid_and_a_dense_engine_together(make_engines):
    """Engines of different families alive at once, called in turn; one goes, the other stays."""
    (hybrids, hybrid_alone), (dense, dense_alone) = make_engines("delta"), make_engines("tied")
    first, second = load(hybrids[0]), load(dense[0])
    for _ in range(2):
        assert_same(engine_outputs(first), hybrid_alone[0])
        assert_same(engine_outputs(second), dense_alone[0])
    del second
    third = load(dense[1])
    assert_same(engine_outputs(third), dense_alone[1])
    assert_same(engine_outputs(first), hybrid_alone[0])


class NoText:
    """Stands where a tokenizer is asked for though only ids matter."""

    eos_token_ids = ()

    def encode(self, text):
        raise AssertionError(text)

    def encode_chat(self, messages):
        raise AssertionError(messages)

    def detokenizer(self):
        return self

    def add(self, token):
        return ""

    def flush(self):
        return ""
