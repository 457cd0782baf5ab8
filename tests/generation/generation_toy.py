"""A one-layer causal model behind the package's module interface, and the same in numpy float64."""

from __future__ import annotations

import codecs
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

VOCAB = 61
HIDDEN = 24


def tracing() -> None:
    """Called when a toy module's Python body runs, which is when it is traced; tests replace it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyCache:
    position: Any
    keys: Any
    values: Any

    def on_trial(self):
        return self

    def commit(self, position, lengths):
        return dataclasses.replace(self, position=position + lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyOut:
    hidden: Any
    cache: Any
    taps: Any = ()


def angles(position, hidden, xp):
    rates = xp.asarray(0.3 ** np.arange(hidden), dtype=xp.float32)
    return position[..., None].astype(xp.float32) * rates


class ToyModule(nn.Module):
    vocab_size: int = VOCAB
    hidden: int = HIDDEN

    def setup(self):
        self.embedding = self.param(
            "embedding", nn.initializers.normal(1.0), (self.vocab_size, self.hidden)
        )
        self.mix = self.param("mix", nn.initializers.normal(0.4), (3, self.hidden, self.hidden))
        self.head = self.param("head", nn.initializers.normal(0.5), (self.hidden, self.vocab_size))

    def init_cache(self, batch, capacity, dtype):
        empty = jnp.zeros((batch, capacity, self.hidden), dtype)
        return ToyCache(jnp.zeros(batch, jnp.int32), empty, empty)

    def __call__(self, tokens, *, cache, lengths=None, taps=()):
        tracing()
        time = tokens.shape[1]
        positions = cache.position[:, None] + jnp.arange(time, dtype=jnp.int32)
        x = self.embedding[tokens] + jnp.sin(angles(positions, self.hidden, jnp))
        query, key, value = (
            jnp.einsum("bth,hk->btk", x, self.mix[i], precision="highest") for i in range(3)
        )
        write = jax.vmap(
            lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0)
        )
        keys = write(cache.keys, key.astype(cache.keys.dtype), cache.position)
        values = write(cache.values, value.astype(cache.values.dtype), cache.position)
        scores = jnp.einsum("bth,bsh->bts", query, keys, precision="highest")
        scores = scores * jnp.float32(self.hidden**-0.5)
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
        seen = slots[None, None, :] <= positions[:, :, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        out = x + jnp.einsum("bts,bsh->bth", weights, values, precision="highest")
        ahead = time if lengths is None else lengths
        return ToyOut(out, ToyCache(cache.position + ahead, keys, values), (x,) * len(taps))

    def embed(self, tokens):
        return self.embedding[tokens]

    def logits(self, hidden):
        return jnp.einsum("...h,hv->...v", hidden, self.head, precision="highest")


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = VOCAB


@dataclasses.dataclass(frozen=True)
class ToyModel:
    module: ToyModule
    params: Any
    config: ToyConfig = ToyConfig()
    eos_token_ids: tuple[int, ...] = ()
    max_context: int = 96
    dtype: Any = jnp.float32


def make_toy(seed: int, **fields) -> ToyModel:
    rng = np.random.default_rng(seed)

    def normal(scale, *shape):
        return jnp.asarray((rng.normal(size=shape) * scale).astype(np.float32))

    params = {
        "embedding": normal(1.0, VOCAB, HIDDEN),
        "mix": normal(0.4, 3, HIDDEN, HIDDEN),
        "head": normal(0.5, HIDDEN, VOCAB),
    }
    return ToyModel(module=ToyModule(), params=params, **fields)


def reference_logits(params, tokens) -> np.ndarray:
    """Float64 logits [T, V] of one row, everything computed anew, no cache, no padding."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    time, hidden = len(tokens), p["embedding"].shape[1]
    x = p["embedding"][list(tokens)] + np.sin(angles(np.arange(time), hidden, np).astype(float))
    query, key, value = (x @ p["mix"][i] for i in range(3))
    out = np.empty_like(x)
    for t in range(time):
        scores = key[: t + 1] @ query[t] / np.sqrt(hidden)
        weights = np.exp(scores - scores.max())
        out[t] = x[t] + weights @ value[: t + 1] / weights.sum()
    return out @ p["head"]


def reference_greedy(params, prompt, count) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(reference_logits(params, tokens)[-1])))
    return tokens[len(prompt) :]


class ToyDetokenizer:
    def __init__(self, pieces):
        self._pieces, self._decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token):
        return self._decoder.decode(self._pieces[token])

    def flush(self):
        return self._decoder.decode(b"", final=True)


class ToyTokenizer:
    """Ids 0-25 are letters, 26-51 pairs of letters, the rest the bytes of two characters."""

    def __init__(self, eos_token_ids=()):
        letters = "abcdefghijklmnopqrstuvwxyz"
        pieces = [c.encode() for c in letters] + [
            (a + b).encode() for a, b in zip(letters, letters[1:] + "a", strict=True)
        ]
        pieces += [bytes([byte]) for byte in "é€é€".encode()][: VOCAB - len(pieces)]
        self.pieces = pieces + [b"."] * (VOCAB - len(pieces))
        self.eos_token_ids = eos_token_ids

    def encode(self, text):
        return [self.pieces.index(c.encode()) for c in text]

    def encode_chat(self, messages):
        return self.encode("".join(message["content"] for message in messages))

    def detokenizer(self):
        return ToyDetokenizer(self.pieces)
