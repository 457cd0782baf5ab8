"""Self-attention with grouped queries, and optional rotary positions, q/k norm and output gate."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp4jax.checkpoints.keys import Key, fused, linear, vector
from fp4jax.layers.cache import KVCache
from fp4jax.layers.linear import FusedLinear, Linear
from fp4jax.layers.norms import RMSNorm
from fp4jax.layers.rope import RopeConfig, apply_rope
from fp4jax.ops.attention import attention

QKV = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Causal grouped-query attention (GQA, arXiv 2305.13245); q, k and v are one matmul.

    Attributes:
      hidden_size: features of input and output.
      heads: query heads.
      kv_heads: key/value heads, a divisor of ``heads``.
      head_dim: channels of a head.
      rope: rotary embedding; None where a model leaves positions to its other layers.
      qk_norm: epsilon of an RMSNorm over each head of q and k; None for none.
      window: tokens seen, the own one included; None for all.
      use_bias: biases on q, k, v and o made by ``init``.
      quantized: whether ``init`` makes NVFP4 weights.
      rotary_dim: channels of a head that are rotated; None for all.
      zero_centered_norm: the q/k norm multiplies by ``1 + weight``.
      gated: ``q_proj`` also gives each head a gate (its second half), whose sigmoid multiplies the
        head's output (arXiv 2505.06708).
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    qk_norm: float | None = None
    window: int | None = None
    use_bias: bool = False
    quantized: bool = True
    rotary_dim: int | None = None
    zero_centered_norm: bool = False
    gated: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        positions: Int[Array, "batch time"],
        cache: KVCache | None,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], KVCache | None]:
        """Without a cache, the tokens given are the whole context.

        ``lengths`` changes nothing here: padding is never seen by a valid token, and its slots
        are overwritten.
        """
        del lengths
        batch, time = positions.shape
        kv = self.kv_heads * self.head_dim
        shards = ((1 + self.gated) * self.heads * self.head_dim, kv, kv)
        qkv = FusedLinear(shards, QKV, self.use_bias, self.quantized, name="qkv_proj")(x)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        query, key, value = (
            part.reshape(batch, time, count, -1) for part, count in zip(qkv, heads, strict=True)
        )
        query, gate = query[..., : self.head_dim], query[..., self.head_dim :]
        if self.qk_norm is not None:
            query = RMSNorm(self.qk_norm, self.zero_centered_norm, name="q_norm")(query)
            key = RMSNorm(self.qk_norm, self.zero_centered_norm, name="k_norm")(key)
        if self.rope is not None:
            query = apply_rope(query, positions, self.rope, self.rotary_dim)
            key = apply_rope(key, positions, self.rope, self.rotary_dim)
        keys, values = key, value
        if cache is not None:
            cache = cache.write(key, value, positions[:, 0])
            keys, values = cache.keys, cache.values
        out = attention(query, keys, values, positions, window=self.window)
        if self.gated:
            out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
        out = out.reshape(batch, time, -1)
        out_proj = Linear(self.hidden_size, self.use_bias, self.quantized, name="o_proj")
        return out_proj(out), cache


def attention_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool = False,
    bias: bool | None = None,
    gated: bool = False,
) -> tuple[Key, ...]:
    """Checkpoint keys of an :class:`Attention` at tree path ``target``."""
    q, kv = heads * head_dim, kv_heads * head_dim
    norms = ("q_norm", "k_norm") if qk_norm else ()
    shards = dict(zip(QKV, ((1 + gated) * q, kv, kv), strict=True))
    return (
        fused(f"{target}/qkv_proj", source, shards, hidden_size, bias),
        *(vector(f"{target}/{name}", f"{source}.{name}", head_dim) for name in norms),
        linear(f"{target}/o_proj", f"{source}.o_proj", hidden_size, q, bias),
    )
