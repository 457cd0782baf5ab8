"""A loaded engine: a module, its parameter tree, and what generation needs to know.

The tree is the engine. Nothing about it is kept anywhere else, and its identity is computed from
its content.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from fp4jax.checksums import checksum
from fp4jax.errors import GenerationError
from fp4jax.layers.decoder import DecoderModel
from fp4jax.quantized import is_quantized


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One engine. Immutable; ``dataclasses.replace(model, params=…)`` makes another.

    Attributes:
      module: Flax module: static configuration, no arrays; hashable, a static argument of ``jit``.
      params: the parameter tree: arrays and repacked weights, an argument of every call.
      eos_token_ids: end-of-sequence ids of the checkpoint's configs, each once.
    """

    module: DecoderModel
    params: Any
    eos_token_ids: tuple[int, ...] = ()

    @property
    def config(self) -> Any:
        """The architecture's frozen config."""
        return self.module.config

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations."""
        return self.module.dtype

    @property
    def max_context(self) -> int:
        """Tokens, prompt and answer together, that the model was made for."""
        return self.config.max_position_embeddings

    @property
    def engine_id(self) -> str:
        """Digest of the parameter tree's content; see :func:`engine_id`."""
        return engine_id(self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.params))

    def __call__(self, input_ids: Int[Array, "batch time"]) -> Float32[Array, "batch time vocab"]:
        """f32 logits of every position. Compiled once a shape.

        Args:
          input_ids: integers; nested lists and numpy arrays are taken too.

        Raises:
          GenerationError: not a non-empty integer matrix, too long, or an id out of range.
        """
        if not isinstance(input_ids, jax.core.Tracer):
            ids = np.asarray(input_ids)
            if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
                raise GenerationError(
                    f"input_ids must be integers [batch, time], at least one; found {ids.dtype} "
                    f"{list(ids.shape)}"
                )
            low, high, vocab = int(ids.min()), int(ids.max()), self.config.vocab_size
            if low < 0 or high >= vocab:
                bad = low if low < 0 else high
                raise GenerationError(f"input_ids holds {bad}; the vocabulary has 0 to {vocab - 1}")
            input_ids = jnp.asarray(ids, jnp.int32)
        if input_ids.shape[1] > self.max_context:
            raise GenerationError(
                f"input_ids has {input_ids.shape[1]} tokens a row; the model's context is "
                f"{self.max_context}"
            )
        return forward(self.module, self.params, input_ids)

    def __repr__(self) -> str:
        size = self.nbytes / 1e6
        return f"Model({type(self.module).__name__}, {self.dtype.name}, {size:.1f} MB)"


@functools.partial(jax.jit, static_argnames=("module",))
def forward(
    module: DecoderModel, params: Any, tokens: Int32[Array, "batch time"]
) -> Float32[Array, "batch time vocab"]:
    """Logits of every position, without a cache.

    Args:
      module: static.
      params: its tree.
      tokens: no padding.
    """
    out: Any = module.apply({"params": params}, tokens)
    logits: Any = module.apply({"params": params}, out.hidden, method="logits")
    return logits


def engine_id(params: Any) -> str:
    """Digest of a parameter tree's content: names, shapes, dtypes and every value.

    Quantized weights contribute the fingerprint that they carry, other arrays a checksum taken
    here. Whatever outlives a call and depends on weights carries this id.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    facts, values = [], []
    for _, node in leaves:
        if is_quantized(node):
            facts.append(node.static_facts)
            values.append(node.fingerprint)
        else:
            facts.append((node.dtype.name, node.shape))
            values.append(_checksum(node))
    digest = hashlib.sha256()
    # Fetched at once: every array waited for on its own would cost a round trip.
    for (path, _), fact, value in zip(leaves, facts, jax.device_get(values), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {fact}".encode())
        digest.update(np.asarray(value).tobytes())
    return digest.hexdigest()[:32]


_checksum = jax.jit(checksum)
