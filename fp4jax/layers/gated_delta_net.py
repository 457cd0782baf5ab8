"""Gated DeltaNet: linear attention with a short convolution, decay, and an output gate."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from fp4jax.checkpoints.keys import Key, fused, linear, parameter, vector
from fp4jax.layers.cache import Trial
from fp4jax.layers.linear import FusedLinear, Linear
from fp4jax.layers.norms import RMSNorm
from fp4jax.ops.causal_conv1d import causal_conv1d, causal_conv1d_state
from fp4jax.ops.gated_delta_rule import gated_delta_rule

L2_EPSILON = 1e-6
"""Added to the squared length of queries and keys."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetInputs:
    """What the tokens of a pass update a :class:`DeltaNetCache` with."""

    mixed: Float[Array, "batch time channels"]
    key: Float32[Array, "batch time key_heads dk"]
    value: Float[Array, "batch time heads dv"]
    g: Float32[Array, "batch time heads"]
    beta: Float32[Array, "batch time heads"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetCache:
    """What a sequence leaves behind in one Gated DeltaNet layer; its size is that of no token.

    Attributes:
      conv: the convolution's last inputs, oldest first.
      state: the recurrent state, f32 in every model.
    """

    conv: Float[Array, "batch channels past"]
    state: Float32[Array, "batch heads dk dv"]

    def advance(self, inputs: DeltaNetInputs, lengths: Int32[Array, " batch"]) -> DeltaNetCache:
        """See :class:`~fp4jax.layers.cache.RecurrentCache`."""
        i = inputs
        _, state = gated_delta_rule(
            i.key, i.key, i.value, i.g, i.beta, state=self.state, lengths=lengths
        )
        return DeltaNetCache(causal_conv1d_state(i.mixed, self.conv, lengths), state)


@dataclasses.dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a Gated DeltaNet layer.

    Attributes:
      key_heads: heads of queries and keys.
      value_heads: heads of values, a multiple of ``key_heads``.
      key_dim: channels of a query or key head.
      value_dim: channels of a value head.
      conv_width: tokens that the convolution sees, the present one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    def empty_cache(self, batch: int, dtype: jnp.dtype) -> DeltaNetCache:
        """The cache before the first token; ``dtype`` is the convolution's."""
        return DeltaNetCache(
            jnp.zeros((batch, self.channels, self.conv_width - 1), dtype),
            jnp.zeros((batch, self.value_heads, self.key_dim, self.value_dim), jnp.float32),
        )


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3.5 has it.

    Queries, keys and values go through a causal convolution and SiLU, queries and keys are brought
    to length 1, and the gated delta rule runs with decay ``-exp(A_log) softplus(a + dt_bias)`` and
    write strength ``sigmoid(b)``. Each head's result is normed and multiplied by ``silu(z)``.

    Attributes:
      hidden_size: features of input and output.
      sizes: of the heads and the convolution.
      epsilon: of the output's RMSNorm.
      quantized: whether ``init`` makes NVFP4 weights; those of ``a`` and ``b`` never are.
    """

    hidden_size: int
    sizes: DeltaNetSizes
    epsilon: float = 1e-6
    quantized: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        positions: Int[Array, "batch time"],
        cache: DeltaNetCache | Trial | None,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], DeltaNetCache | Trial | None]:
        """Positions mean nothing here; ``lengths`` keep padding out of the cache."""
        before = cache.before if isinstance(cache, Trial) else cache
        batch, time = positions.shape
        s = self.sizes
        shards = (s.channels, s.values)
        qkvz = FusedLinear(shards, QKV_Z, False, self.quantized, name="in_proj_qkvz")
        projected, z = qkvz(x)
        b, a = FusedLinear(2 * (s.value_heads,), B_A, False, False, name="in_proj_ba")(x)

        taps = self.param("conv1d", nn.initializers.normal(0.5), (s.channels, 1, s.conv_width))
        mixed, conv = causal_conv1d(
            projected,
            taps[:, 0],
            state=None if before is None else before.conv,
            lengths=lengths,
            activation="silu",
        )
        keys = s.key_heads * s.key_dim
        query, key, value = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        query = unit_length(query.reshape(batch, time, s.key_heads, s.key_dim))
        key = unit_length(key.reshape(batch, time, s.key_heads, s.key_dim))
        value = value.reshape(batch, time, s.value_heads, s.value_dim)

        a_log = self.param("A_log", nn.initializers.zeros, (s.value_heads,))
        dt_bias = self.param("dt_bias", nn.initializers.zeros, (s.value_heads,))
        rate = jax.nn.softplus(a.astype(jnp.float32) + dt_bias.astype(jnp.float32))
        g = -jnp.exp(a_log.astype(jnp.float32)) * rate
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        out, state = gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            state=None if before is None else before.state,
            lengths=lengths,
        )
        normed = RMSNorm(self.epsilon, name="norm")(out).astype(jnp.float32)
        gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
        y = (normed * gate).astype(x.dtype).reshape(batch, time, s.values)
        out_proj = Linear(self.hidden_size, False, self.quantized, name="out_proj")
        if before is None:
            return out_proj(y), None
        if isinstance(cache, Trial):
            return out_proj(y), Trial(before, DeltaNetInputs(projected, key, value, g, beta))
        return out_proj(y), DeltaNetCache(conv, state)


QKV_Z = ("in_proj_qkv", "in_proj_z")
B_A = ("in_proj_b", "in_proj_a")


def unit_length(x: Float[Array, "*batch dim"]) -> Float32[Array, "*batch dim"]:
    """``x`` divided by its length over the last axis, in f32."""
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(square + jnp.float32(L2_EPSILON))


def gated_delta_net_keys(
    target: str, source: str, *, hidden_size: int, sizes: DeltaNetSizes
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`GatedDeltaNet` at tree path ``target``."""
    s = sizes
    qkvz = dict(zip(QKV_Z, (s.channels, s.values), strict=True))
    return (
        fused(f"{target}/in_proj_qkvz", source, qkvz, hidden_size),
        fused(f"{target}/in_proj_ba", source, dict.fromkeys(B_A, s.value_heads), hidden_size),
        parameter(f"{target}/conv1d", f"{source}.conv1d.weight", s.channels, 1, s.conv_width),
        parameter(f"{target}/A_log", f"{source}.A_log", s.value_heads),
        parameter(f"{target}/dt_bias", f"{source}.dt_bias", s.value_heads),
        vector(f"{target}/norm", f"{source}.norm", s.value_dim),
        linear(f"{target}/out_proj", f"{source}.out_proj", hidden_size, s.values),
    )
