"""Content checksums of arrays, computed where the arrays lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


def checksum(x: Array, salt: str = "") -> UInt32[Array, "4"]:
    """128-bit content checksum of one array's bits, shape and dtype, and of ``salt``.

    Each 32-bit word is hashed together with its position, and four sums are taken over hashes of
    that. So it depends on the order of the elements, yet is one parallel reduction, in integers:
    the same on every backend. It tells arrays apart; it is no defence against forgery.
    """
    words = _words(x)
    keys = [jnp.uint32(hash_text(f"{x.dtype.name}{x.shape}{salt}{lane}")) for lane in range(4)]
    position = jax.lax.iota(jnp.uint32, words.size)
    mixed = _fmix(words ^ _fmix(position ^ keys[0]))
    lanes = (mixed, *(_fmix(mixed ^ key) for key in keys[1:]))
    # One reduction of four operands: the CPU backend then fuses the hashes into it. With four
    # reductions it writes every hash out, several times the size of the array.
    sums = jax.lax.reduce(
        lanes,
        (jnp.uint32(0),) * 4,
        lambda totals, hashes: tuple(t + h for t, h in zip(totals, hashes, strict=True)),
        (0,),
    )
    return jnp.stack(sums)


def combine_checksums(parts: Sequence[UInt32[Array, "4"]]) -> UInt32[Array, "4"]:
    """One checksum of several, in order."""
    total = jnp.zeros(4, jnp.uint32)
    for part in parts:
        total = _fmix(total * jnp.uint32(0x01000193) ^ part)
    return total


def hash_text(text: str) -> int:
    """FNV-1a, 32 bits: a stable salt (Python's own ``hash`` differs between processes)."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _words(x: Array) -> UInt32[Array, " size"]:
    """The array's bits, as many elements a word as fit and come out even."""
    size = x.dtype.itemsize
    flat = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).reshape(-1)
    if size < 4 and flat.size % (4 // size) == 0:
        return jax.lax.bitcast_convert_type(flat.reshape(-1, 4 // size), jnp.uint32)
    return flat.astype(jnp.uint32)


def _fmix(h: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    # Murmur3's 32-bit finalizer: full avalanche, so position and value mix.
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
