"""Content checksums of arrays, computed where the arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8, UInt32

CHECKSUM_PARTS = 64
"""Parts that a checksum's array is split into, where it is not small."""


def _fmix(h: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    # Murmur3's 32-bit finalizer: full avalanche, so position and value mix.
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def checksum(x: Array) -> UInt32[Array, "4"]:
    """128-bit content checksum of one array's bits, shape and dtype; order matters.

    A sum of position-salted mixes, so it is one parallel reduction on any backend and exact
    (integer) on all of them, in whatever order it is added.
    """
    if x.dtype.itemsize == 1:
        flat = jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)
        if x.shape[-1:] and x.shape[-1] % 4 == 0:
            return checksum_parts(
                x,
                flat.size // 4,
                lambda start, size: words_of_bytes(
                    jax.lax.dynamic_slice_in_dim(flat, 4 * start, 4 * size)
                ),
            )
    else:
        flat = jax.lax.bitcast_convert_type(
            x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
        ).reshape(-1)
    return checksum_parts(
        x,
        flat.size,
        lambda start, size: jax.lax.dynamic_slice_in_dim(flat, start, size).astype(jnp.uint32),
    )


def checksum_parts(
    x: Array, count: int, read: Callable[[Array, int], UInt32[Array, " size"]]
) -> UInt32[Array, "4"]:
    """The checksum of an array of which ``read`` gives words ``start`` to ``start + size``.

    Large arrays go through in parts, which bounds what a backend that does not fuse the mixes
    into the sum writes out.
    """
    salt = hash_text(f"{x.dtype.name}{x.shape}")
    keys = [jnp.uint32((salt + seed * 0x9E3779B9) & 0xFFFFFFFF) for seed in range(1, 5)]

    def mixed(start: Array, size: int) -> UInt32[Array, "4"]:
        words = read(start, size)
        index = jax.lax.iota(jnp.uint32, size) + start
        return jnp.stack(
            [jnp.sum(_fmix(words ^ _fmix(index ^ key)), dtype=jnp.uint32) for key in keys]
        )

    size = count // (2 * CHECKSUM_PARTS) * 2  # even: whole blocks of codes
    if size < CHECKSUM_PARTS:
        return mixed(jnp.uint32(0), count)
    done = CHECKSUM_PARTS * size
    total, _ = jax.lax.scan(
        lambda total, i: (total + mixed(i * size, size), None),
        mixed(jnp.uint32(done), count - done),
        jnp.arange(CHECKSUM_PARTS, dtype=jnp.uint32),
    )
    return total


def words_of_bytes(octets: UInt8[Array, " size"]) -> UInt32[Array, " quarter"]:
    """Four bytes a word, the first one lowest."""
    return jax.lax.bitcast_convert_type(octets.reshape(-1, 4), jnp.uint32)


def hash_text(text: str) -> int:
    """FNV-1a, 32 bits: a stable salt (Python's own ``hash`` differs between processes)."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def combine_checksums(parts: Sequence[UInt32[Array, "4"]]) -> UInt32[Array, "4"]:
    """One checksum of several, in order."""
    total = jnp.zeros(4, jnp.uint32)
    for part in parts:
        total = _fmix(total * jnp.uint32(0x01000193) ^ part)
    return total
