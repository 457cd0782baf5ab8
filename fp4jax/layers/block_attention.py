"""Attention of a drafted block to a context that was projected before, and to itself."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from fp4jax.checkpoints.keys import Key, fused, linear, vector
from fp4jax.layers.cache import KVCache
from fp4jax.layers.linear import FusedLinear, Linear
from fp4jax.layers.norms import RMSNorm
from fp4jax.layers.rope import RopeConfig, apply_rope
from fp4jax.ops.block_attention import block_attention

KV = ("k_proj", "v_proj")


class BlockAttention(nn.Module):
    """Grouped-query attention whose context enters as keys and values alone (arXiv 2602.06036).

    Context tokens have no query, so k and v are one matmul and q is another.

    Attributes:
      hidden_size: features of input and output.
      heads: query heads.
      kv_heads: key/value heads, a divisor of ``heads``.
      head_dim: channels of a head.
      rope: rotary embedding.
      qk_norm: epsilon of the RMSNorm over each head of q and k.
      causal: whether a token of the block sees only those before it; else the whole block.
      window: tokens less than this far away are seen; None for all.
      use_bias: biases on q, k, v and o made by ``init``.
      quantized: whether ``init`` makes NVFP4 weights.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    qk_norm: float
    causal: bool = False
    window: int | None = None
    use_bias: bool = False
    quantized: bool = True

    def setup(self):
        made = {"use_bias": self.use_bias, "quantized": self.quantized}
        self.q_proj = Linear(self.heads * self.head_dim, **made)
        self.kv_proj = FusedLinear(2 * (self.kv_heads * self.head_dim,), KV, **made)
        self.o_proj = Linear(self.hidden_size, **made)
        self.q_norm = RMSNorm(self.qk_norm)
        self.k_norm = RMSNorm(self.qk_norm)

    def remember(
        self,
        x: Float[Array, "batch time hidden"],
        start: Int32[Array, " batch"],
        cache: KVCache,
    ) -> KVCache:
        """The cache with keys and values of ``x``, whose first token is at position ``start``."""
        return cache.write(*self._keys_values(x, start), start)

    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        start: Int32[Array, " batch"],
        cache: KVCache,
    ) -> Float[Array, "batch time hidden"]:
        """Attends from the block ``x`` to the slots before ``start`` and to the block."""
        query = self.q_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim)
        query = apply_rope(self.q_norm(query), positions_of(x, start), self.rope)
        out = block_attention(
            query,
            *self._keys_values(x, start),
            cache.keys,
            cache.values,
            start,
            causal=self.causal,
            window=self.window,
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1))

    def _keys_values(self, x: Array, start: Array) -> tuple[Array, Array]:
        key, value = (
            part.reshape(*x.shape[:2], self.kv_heads, self.head_dim) for part in self.kv_proj(x)
        )
        return apply_rope(self.k_norm(key), positions_of(x, start), self.rope), value


def positions_of(
    x: Float[Array, "batch time hidden"], start: Int32[Array, " batch"]
) -> Int[Array, "batch time"]:
    """Positions of the tokens of ``x``, the first of a row at ``start``."""
    return start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)


def block_attention_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool | None = None,
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`BlockAttention` at tree path ``target``."""
    q, kv = heads * head_dim, kv_heads * head_dim
    return (
        linear(f"{target}/q_proj", f"{source}.q_proj", q, hidden_size, bias),
        fused(f"{target}/kv_proj", source, dict.fromkeys(KV, kv), hidden_size, bias),
        linear(f"{target}/o_proj", f"{source}.o_proj", hidden_size, q, bias),
        *(vector(f"{target}/{n}", f"{source}.{n}", head_dim) for n in ("q_norm", "k_norm")),
    )
