"""FP8 weights: e4m3 values and one f32 scale a row, as an immutable pytree node.

Mixed-precision checkpoints keep some layers in FP8. Their values go into the tree as they are
stored, eight bits each: every e4m3 value is exact in bf16 and f16, so the matmul widens them
where it reads them and applies the scale once to its f32 sums. A scale a matrix (ModelOpt), one
a row (llm-compressor) and fused shards with a scale each are all one scale a row here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, UInt32

from fp4jax.checksums import checksum, combine_checksums
from fp4jax.errors import FormatError

FP8_LAYOUT = "fp8.rows.v1"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FP8Weight:
    """An FP8 matrix, several fused along N, or a stack of them. Immutable.

    ``value[n, k] = f32(values[n, k]) * scale[n]``.

    Attributes:
      values: f8e4m3fn ``[..., N, K]``, finite.
      scale: f32 ``[..., N]``, finite and positive.
      fingerprint: u32 ``[..., 4]``, checksum of the two.
      layout: name and version of this arrangement.
    """

    values: Float8e4m3fn[Array, "*stack n k"]
    scale: Float32[Array, "*stack n"]
    fingerprint: UInt32[Array, "*stack 4"]
    layout: str = dataclasses.field(default=FP8_LAYOUT, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape ``[..., N, K]``."""
        return self.values.shape

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes (experts), ``()`` for one matrix."""
        return self.values.shape[:-2]

    @property
    def n(self) -> int:
        """Output features."""
        return self.values.shape[-2]

    @property
    def k(self) -> int:
        """Input features."""
        return self.values.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def static_facts(self) -> tuple[Any, ...]:
        """What identifies the weight besides its fingerprint."""
        return (self.layout, self.shape)


def make_fp8(
    values: Float8e4m3fn[Array, "*stack n k"], scale: Float32[Array, "*stack n"]
) -> FP8Weight:
    """The node of a tree, with its fingerprint taken where the arrays lie.

    Raises:
      FormatError: dtypes or shapes do not fit.
    """
    if values.dtype != E4M3 or scale.dtype != np.float32:
        raise FormatError(
            f"FP8 needs float8_e4m3fn and float32, found {values.dtype}, {scale.dtype}"
        )
    if scale.shape != values.shape[:-1]:
        raise FormatError(f"FP8 scales {scale.shape} do not fit values {values.shape}")
    return FP8Weight(values, scale, _fingerprint(values, scale))


@jax.jit
def _fingerprint(values: Array, scale: Array) -> UInt32[Array, "*stack 4"]:
    def fn(values: Array, scale: Array) -> Array:
        return combine_checksums([checksum(leaf, FP8_LAYOUT) for leaf in (values, scale)])

    for _ in values.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(values, scale)


def row_scales(scales: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """Stored scales of fused shards, one each or one a row, as one a row of them all. On the host.

    Args:
      scales: of each shard, any float dtype: one value, or ``[N]``, or ``[N, 1]``.
      rows: output features of each shard.

    Returns:
      f32 ``[sum(rows)]``.
    """
    parts = [
        np.broadcast_to(np.asarray(scale, np.float32).reshape(-1), (n,))
        for scale, n in zip(scales, rows, strict=True)
    ]
    return np.concatenate(parts)


def validate_fp8(values: np.ndarray | None, scale: np.ndarray, name: str) -> None:
    """Refuses a scale that is not finite and positive, and NaN among the values. On the host.

    Args:
      values: f8e4m3fn, any shape; None looks at the scale alone.
      scale: any float dtype and shape.
      name: what the message calls the weight.

    Raises:
      FormatError: naming the first offender's index.
    """
    wide = np.asarray(scale, np.float32)
    bad = np.argwhere(~(np.isfinite(wide) & (wide > 0)))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise FormatError(
            f"{name}: FP8 scale {list(at) if at else ''} is {wide[at]}; it must be finite and "
            "positive: download the file again, or quantize the model anew"
        )
    if values is None:
        return
    # e4m3fn has no infinities; its NaNs are the two codes with all lower bits set.
    nan = np.argwhere((values.view(np.uint8) & 0x7F) == 0x7F)
    if len(nan):
        raise FormatError(
            f"{name}: value {[int(i) for i in nan[0]]} is NaN: download the file again, or "
            "quantize the model anew"
        )


def dequantize_fp8(weight: FP8Weight, dtype=jnp.float32) -> Float[Array, "*stack n k"]:
    """The matrix in ``dtype``, rounded once in f32."""
    return (weight.values.astype(jnp.float32) * weight.scale[..., None]).astype(dtype)


def take_fp8_rows(
    weight: FP8Weight, rows: Int[Array, "*batch"], dtype=jnp.float32
) -> Float[Array, "*batch k"]:
    """Rows of :func:`dequantize_fp8`; rows out of range are clamped."""
    rows = jnp.clip(rows, 0, weight.n - 1)
    exact = weight.values[rows].astype(jnp.float32)
    return (exact * weight.scale[rows][..., None]).astype(dtype)
