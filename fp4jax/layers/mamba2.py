"""Mamba2: a selective state space with a short convolution and a gated, grouped norm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from fp4jax.checkpoints.hf_config import CONFIG_NAME, whole
from fp4jax.checkpoints.keys import Key, linear, parameter, vector
from fp4jax.errors import ConfigError
from fp4jax.layers.cache import Trial
from fp4jax.layers.linear import Linear
from fp4jax.layers.norms import RMSNorm
from fp4jax.ops.causal_conv1d import causal_conv1d, causal_conv1d_state
from fp4jax.ops.mamba2 import mamba2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mamba2Inputs:
    """What the tokens of a pass update a :class:`Mamba2Cache` with; see the op for the names."""

    mixed: Float[Array, "batch time channels"]
    x: Float[Array, "batch time heads dim"]
    dt: Float[Array, "batch time heads"]
    b: Float[Array, "batch time groups n"]
    a: Float32[Array, " heads"]
    dt_bias: Float[Array, " heads"]
    dt_limit: tuple[float, float] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mamba2Cache:
    """What a sequence leaves behind in one Mamba2 layer; its size is that of no token.

    Attributes:
      conv: the convolution's last inputs, oldest first.
      state: the recurrent state, f32 in every model.
    """

    conv: Float[Array, "batch channels past"]
    state: Float32[Array, "batch heads dim n"]

    def advance(self, inputs: Mamba2Inputs, lengths: Int32[Array, " batch"]) -> Mamba2Cache:
        """See :class:`~fp4jax.layers.cache.RecurrentCache`."""
        i = inputs
        _, state = mamba2(
            i.x,
            i.dt,
            i.a,
            i.b,
            i.b,
            dt_bias=i.dt_bias,
            dt_limit=i.dt_limit,
            state=self.state,
            lengths=lengths,
        )
        return Mamba2Cache(causal_conv1d_state(i.mixed, self.conv, lengths), state)


@dataclasses.dataclass(frozen=True)
class Mamba2Sizes:
    """Sizes of a Mamba2 layer.

    Attributes:
      heads: of the state space.
      head_dim: channels of a head.
      groups: of heads that share read and write vectors, and of channels that are normed together.
      state: size of those vectors.
      conv_width: tokens that the convolution sees, the present one included.
      time_step_limit: smallest and largest time step.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Mamba2Sizes:
        """From the fields of a Nemotron-H ``config.json``.

        Raises:
          ConfigError: a field is missing, has the wrong type, or contradicts another.
        """
        heads, groups = whole(hf, "mamba_num_heads"), whole(hf, "n_groups")
        if heads % groups:
            raise ConfigError(
                f"{CONFIG_NAME}: mamba_num_heads = {heads} is not a multiple of n_groups = {groups}"
            )
        return cls(
            heads,
            whole(hf, "mamba_head_dim"),
            groups,
            state=whole(hf, "ssm_state_size"),
            conv_width=whole(hf, "conv_kernel", 4),
            time_step_limit=_time_step_limit(hf),
        )

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: the heads' inputs, write and read vectors."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Channels of the input projection: gate, convolution, time steps."""
        return self.inner + self.channels + self.heads

    def empty_cache(self, batch: int, dtype: jnp.dtype) -> Mamba2Cache:
        """The cache before the first token; ``dtype`` is the convolution's."""
        return Mamba2Cache(
            jnp.zeros((batch, self.channels, self.conv_width - 1), dtype),
            jnp.zeros((batch, self.heads, self.head_dim, self.state), jnp.float32),
        )


def _time_step_limit(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Two numbers, of which transformers writes an infinite one as an object."""
    stated = hf.get("time_step_limit")
    stated = (0.0, math.inf) if stated is None else stated
    ends = list(stated) if isinstance(stated, (list, tuple)) else []
    infinite = {"__float__": "Infinity"}
    ends = [math.inf if end in (infinite, "Infinity", "inf") else end for end in ends]
    numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not numbers or not 0 <= ends[0] <= ends[1]:
        raise ConfigError(
            f"{CONFIG_NAME}: time_step_limit must be a smallest and a largest number, found "
            f"{stated!r:.80}"
        )
    return float(ends[0]), float(ends[1])


class Mamba2(nn.Module):
    """Mamba2 (arXiv 2405.21060) as Nemotron-H has it.

    One projection gives a gate ``z``, the convolution's input and the time steps. What comes out of
    the convolution and SiLU is written to and read from the state, which decays at the rate
    ``-exp(A_log)``. The result times ``silu(z)`` is normed in groups.

    Attributes:
      hidden_size: features of input and output.
      sizes: of the heads and the convolution.
      epsilon: of the output's RMSNorm.
      use_bias: biases on the two projections made by ``init``.
      conv_bias: whether the convolution has a bias.
      quantized: whether ``init`` makes NVFP4 weights.
    """

    hidden_size: int
    sizes: Mamba2Sizes
    epsilon: float = 1e-5
    use_bias: bool = False
    conv_bias: bool = True
    quantized: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch time hidden"],
        positions: Int[Array, "batch time"],
        cache: Mamba2Cache | Trial | None,
        lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time hidden"], Mamba2Cache | Trial | None]:
        """Positions mean nothing here; ``lengths`` keep padding out of the cache."""
        before = cache.before if isinstance(cache, Trial) else cache
        batch, time = positions.shape
        s = self.sizes
        in_proj = Linear(s.projected, self.use_bias, self.quantized, name="in_proj")
        z, projected, dt = jnp.split(in_proj(x), (s.inner, s.inner + s.channels), axis=-1)

        taps = self.param("conv1d", nn.initializers.normal(0.5), (s.channels, 1, s.conv_width))
        conv_bias = None
        if self.conv_bias:
            conv_bias = self.param("conv1d_bias", nn.initializers.zeros, (s.channels,))
        mixed, conv = causal_conv1d(
            projected,
            taps[:, 0],
            bias=conv_bias,
            state=None if before is None else before.conv,
            lengths=lengths,
            activation="silu",
        )
        vectors = s.groups * s.state
        value, write, read = jnp.split(mixed, (s.inner, s.inner + vectors), axis=-1)
        value = value.reshape(batch, time, s.heads, s.head_dim)
        write, read = (v.reshape(batch, time, s.groups, s.state) for v in (write, read))

        a_log = self.param("A_log", nn.initializers.zeros, (s.heads,))
        a = -jnp.exp(a_log.astype(jnp.float32))
        dt_bias = self.param("dt_bias", nn.initializers.zeros, (s.heads,))
        out, state = mamba2(
            value.astype(jnp.float32),  # or the result would be rounded before its norm
            dt,
            a,
            write,
            read,
            d=self.param("D", nn.initializers.ones, (s.heads,)),
            dt_bias=dt_bias,
            dt_limit=s.time_step_limit,
            state=None if before is None else before.state,
            lengths=lengths,
        )
        gate = jax.nn.silu(z.astype(jnp.float32))
        gated = out.reshape(batch, time, s.inner).astype(jnp.float32) * gate
        normed = RMSNorm(self.epsilon, groups=s.groups, name="norm")(gated)
        out_proj = Linear(self.hidden_size, self.use_bias, self.quantized, name="out_proj")
        y = out_proj(normed.astype(x.dtype))
        if before is None:
            return y, None
        if isinstance(cache, Trial):
            inputs = Mamba2Inputs(projected, value, dt, write, a, dt_bias, s.time_step_limit)
            return y, Trial(before, inputs)
        return y, Mamba2Cache(conv, state)


def mamba2_keys(
    target: str,
    source: str,
    *,
    hidden_size: int,
    sizes: Mamba2Sizes,
    bias: bool | None = None,
    conv_bias: bool = True,
) -> tuple[Key, ...]:
    """Checkpoint keys of a :class:`Mamba2` at tree path ``target``."""
    s = sizes
    taps = [parameter(f"{target}/conv1d", f"{source}.conv1d.weight", s.channels, 1, s.conv_width)]
    if conv_bias:
        taps.append(parameter(f"{target}/conv1d_bias", f"{source}.conv1d.bias", s.channels))
    return (
        linear(f"{target}/in_proj", f"{source}.in_proj", s.projected, hidden_size, bias),
        *taps,
        *(parameter(f"{target}/{n}", f"{source}.{n}", s.heads) for n in ("A_log", "D", "dt_bias")),
        vector(f"{target}/norm", f"{source}.norm", s.inner),
        linear(f"{target}/out_proj", f"{source}.out_proj", hidden_size, s.inner, bias),
    )
