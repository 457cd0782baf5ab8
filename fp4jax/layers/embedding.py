"""Token embedding and output head, quantized or not, tied or not."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from fp4jax.layers import weights


class Embedding(nn.Module):
    """Token table. Parameter: ``weight`` [V, H], dense or NVFP4.

    ``attend`` uses the same node as the output head of a tied model.
    """

    vocab_size: int
    features: int
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        # Made here in ``init`` and read from the tree where it is used: an attribute would keep it.
        weights.variable(
            self,
            "weight",
            lambda key: weights.random_dense(key, self.vocab_size, self.features, self.dtype),
        )

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch h"]:
        return weights.embed(self.get_variable("params", "weight"), ids, self.dtype)

    def attend(self, hidden: Float[Array, "*batch h"]) -> Float32[Array, "*batch v"]:
        """f32 logits over the vocabulary."""
        table: weights.Weight = self.get_variable("params", "weight")
        return weights.matmul(hidden, table, out_dtype=jnp.float32)
