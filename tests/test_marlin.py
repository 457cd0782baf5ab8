"""The repacked weight: layout, round trip, identity, and its life as a pytree node."""

from __future__ import annotations

import dataclasses
import functools
import io

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax import marlin, nvfp4
from fp4jax.checksums import checksum
from fp4jax.errors import FormatError
from fp4jax.marlin import MarlinWeight
from fp4jax.nvfp4 import NVFP4Weight

F8 = ml_dtypes.float8_e4m3fn
# One compilation each, not one an operation.
decode = jax.jit(marlin.decode, static_argnums=1)
dequantize = jax.jit(marlin.dequantize_repacked)
take_rows = jax.jit(marlin.take_rows, static_argnums=2)
per_row_global_scale = jax.jit(marlin.per_row_global_scale)

NAMES = ("words", "scales", "global_scale", "fingerprint")


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def make_weight(n, k, stack=(), seed=0, divisor=False) -> NVFP4Weight:
    """Random codes, every kind of block scale: zero, smallest, subnormal, largest."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*stack, n, k // 2), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (*stack, n, k // 16), dtype=np.uint8)
    kind = rng.random(scale.shape)
    scale[kind < 0.2] = 0
    scale[(kind > 0.2) & (kind < 0.4)] = 1
    scale[kind > 0.9] = 0x7E
    global_scale = rng.uniform(0.01, 100, stack).astype(np.float32)
    arrays = (jnp.asarray(packed), jnp.asarray(scale.view(F8)), jnp.asarray(global_scale))
    return NVFP4Weight(*arrays, global_is_divisor=divisor)


def codes_of(packed) -> np.ndarray:
    packed = np.asarray(packed)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def canonical(weight: NVFP4Weight) -> NVFP4Weight:
    """Without magnitudes in blocks of scale 0. In NumPy, on the host."""
    codes = codes_of(weight.packed)
    codes[np.repeat(bits(weight.scale) == 0, 16, axis=-1)] &= 8
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return dataclasses.replace(weight, packed=packed)


def assert_same(found, want) -> None:
    """Equal structure and static fields, equal bits."""
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


# Layout.


def test_words_by_hand():
    # Code (k // 16 + k) % 16: word c of the tile then holds, from its lowest nibble up, the codes
    # c, c + 1, c + 2 and c + 3 (mod 16). Row 1 has only a 1 at k = 0 and an 8 (-0) at k = 33.
    k = np.arange(64)
    codes = np.zeros((2, 64), np.uint8)
    codes[0] = (k // 16 + k) % 16
    codes[1, 0], codes[1, 33] = 1, 8
    weight = NVFP4Weight(
        nvfp4.pack_codes(jnp.asarray(codes)),
        jnp.asarray([[1, 448, 2**-9, 1.75], [2, 2, 0, 2]], F8),
        jnp.float32(3),
    )
    w = marlin.repack(weight)
    assert (w.shards, w.k, w.layout, w.shape) == ((2,), 64, "k64.v1", (2, 64))
    first = [0x3210, 0x4321, 0x5432, 0x6543, 0x7654, 0x8765, 0x9876, 0xA987]
    first += [0xBA98, 0xCBA9, 0xDCBA, 0xEDCB, 0xFEDC, 0x0FED, 0x10FE, 0x210F]
    second = [0x0001, 0x0800, *[0] * 14]
    np.testing.assert_array_equal(w.words, [first, second, *[[0] * 16] * 6])
    # Byte 8 e + m is (1 + m / 8) * 2**(e - 9); zero blocks and padding are 0x90.
    z = 0x90
    assert w.scales.shape == (8, 16)
    np.testing.assert_array_equal(w.scales[0], [9 * 8, 17 * 8 + 6, 0, 9 * 8 + 6, *[z] * 12])
    np.testing.assert_array_equal(w.scales[1], [10 * 8, 10 * 8, z, 10 * 8, *[z] * 12])
    assert np.all(np.asarray(w.scales[2:]) == z)
    np.testing.assert_array_equal(w.global_scale, [3])


def test_padding_of_rows_k_and_scales():
    w = marlin.repack(make_weight(301, 80))
    assert w.words.shape == (304, 2 * 16)
    assert w.scales.shape == (304, 16)
    words = np.asarray(w.words)
    assert np.all(words[301:] == 0)
    assert np.all(words[:, 16:] < 16)  # of the second tile only k = 64..79 exist
    assert np.any(words[:, 16:] > 0)
    assert np.all(np.asarray(w.scales)[301:] == marlin.ZERO_SCALE)
    assert np.all(np.asarray(w.scales)[:, 5:] == marlin.ZERO_SCALE)
    assert marlin.repack(make_weight(1, 272)).scales.shape == (8, 32)


def test_every_scale_survives():
    scale = np.arange(127, dtype=np.uint8).view(F8)  # every finite e4m3 that is not negative
    encoded = np.asarray(marlin.encode_scale(jnp.asarray(scale)))
    assert len(set(encoded)) == 127
    assert encoded[0] == marlin.ZERO_SCALE
    # S0E5M3 by its definition, in Python.
    values = [(1 + (b & 7) / 8) * 2.0 ** ((b >> 3) - 9) for b in encoded.tolist()]
    np.testing.assert_array_equal(values[1:], scale.astype(np.float64)[1:])
    decoded = marlin.decode_scale(jnp.asarray(encoded))
    np.testing.assert_array_equal(decoded, np.asarray(values, np.float32))
    weight = NVFP4Weight(
        jnp.full((127, 8), 0x11, jnp.uint8), jnp.asarray(scale)[:, None], jnp.float32(1)
    )
    np.testing.assert_array_equal(
        bits(marlin.unpack(marlin.repack(weight)).scale[:, 0]), range(127)
    )


# Round trip.


def words_numpy(codes: np.ndarray) -> np.ndarray:
    """The layout as the module describes it, one code at a time in effect."""
    n, k = codes.shape
    words = np.zeros((-(-n // 8) * 8, -(-k // 64) * 16), np.uint16)
    for column in range(k):
        t, j, c = column // 64, column % 64 // 16, column % 16
        words[:n, 16 * t + c] |= codes[:, column].astype(np.uint16) << 4 * j
    return words


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    n=st.one_of(st.sampled_from([1, 301, 388]), st.integers(1, 400)),
    groups=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    divisor=st.booleans(),
)
def test_any_shape_round_trips(n, groups, seed, divisor):
    weight = make_weight(n, 16 * groups, seed=seed, divisor=divisor)
    clean = canonical(weight)
    repacked = marlin.repack(weight)
    assert repacked.shape == weight.shape
    np.testing.assert_array_equal(repacked.words, words_numpy(codes_of(clean.packed)))
    assert_same(marlin.unpack(repacked), clean)


@pytest.mark.parametrize(
    ("shards", "stack", "divisor"),
    [
        ((5, 16, 388), (), True),
        ((301,), (3,), False),
        ((5, 301), (3,), True),
        ((16, 8, 8), (2, 2), False),
    ],
)
def test_stacks_and_fused_shards_round_trip(shards, stack, divisor):
    k = 48
    parts = [make_weight(n, k, stack, seed=i, divisor=divisor) for i, n in enumerate(shards)]
    w = marlin.repack(parts)
    assert (w.n, w.k, w.stack, w.shape) == (sum(shards), k, stack, (*stack, sum(shards), k))
    assert w.global_scale.shape == (*stack, len(shards))
    assert len(set(np.asarray(w.global_scale).ravel())) == w.global_scale.size  # all unequal
    assert w.nbytes == sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(w))
    found = marlin.unpack(w)
    found = (found,) if len(shards) == 1 else found
    assert_same(found, tuple(canonical(part) for part in parts))

    # Values, by NumPy from what went in.
    want = []
    for part in parts:
        values = codes_of(part.packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        exact = values * np.repeat(np.asarray(part.scale).astype(np.float32), 16, axis=-1)
        scale = np.asarray(part.global_scale)[..., None, None]
        want.append(exact / scale if divisor else exact * scale)
    want = np.concatenate(want, axis=-2)
    np.testing.assert_array_equal(dequantize(w), want)
    rows = np.asarray(per_row_global_scale(w))
    assert rows.shape == (*stack, sum(shards))
    np.testing.assert_array_equal(rows[..., -1], w.global_scale[..., -1])
    np.testing.assert_array_equal(rows[..., shards[0] - 1], w.global_scale[..., 0])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_code_times_block_scale_is_exact_in_16_bits(dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    scale = jnp.asarray(np.arange(127, dtype=np.uint8).view(F8))[:, None]
    w = marlin.repack(NVFP4Weight(nvfp4.pack_codes(jnp.asarray(codes)), scale, jnp.float32(1)))
    narrow, wide = decode(w, dtype), np.asarray(decode(w))
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(np.asarray(narrow).astype(np.float32), wide)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(wide, values * np.asarray(scale).astype(np.float64))


@pytest.mark.parametrize("divisor", [False, True])
def test_take_rows(divisor):
    parts = [make_weight(n, 80, seed=n, divisor=divisor) for n in (5, 8)]
    w = marlin.repack(parts)
    table = np.asarray(dequantize(w))
    rows = np.array([[0, 4, 5], [12, 5, 0]])
    np.testing.assert_array_equal(take_rows(w, jnp.asarray(rows)), table[rows])
    outside = jnp.asarray([-3, 13, 2**31 - 1])
    np.testing.assert_array_equal(take_rows(w, outside), table[[0, 12, 12]])
    assert take_rows(w, jnp.asarray(rows), jnp.bfloat16).dtype == jnp.bfloat16
    assert take_rows(w, jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 80)


def test_apply_global_scale_keeps_to_each_row():
    for divisor in (False, True):
        w = marlin.repack([make_weight(n, 16, divisor=divisor) for n in (3, 4)])
        # Powers of two: a backend may multiply by a rounded reciprocal here.
        w = dataclasses.replace(w, global_scale=jnp.asarray([4, 0.125], jnp.float32))
        found = marlin.apply_global_scale(w, jnp.ones((2, 7), jnp.float32))
        want = [0.25] * 3 + [8] * 4 if divisor else [4] * 3 + [0.125] * 4
        np.testing.assert_array_equal(found, [want, want])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one"),
        ([(8, 32, {}), (8, 48, {})], r"disagree: \(8, 48\) beside \(8, 32\)"),
        ([(8, 32, {"stack": (2,)}), (8, 32, {})], r"disagree: \(8, 32\) beside \(2, 8, 32\)"),
        ([(8, 32, {"divisor": True}), (8, 32, {})], "mix a multiplier and a divisor"),
    ],
)
def test_shards_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(FormatError, match=message):
        marlin.repack([make_weight(n, k, **more) for n, k, more in parts])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("packed", jnp.zeros((8, 12), jnp.uint8), "K = 24 is not a multiple of the block size 16"),
        ("scale", jnp.zeros((8, 1), F8), r"block scales \(8, 1\) do not fit codes \(8, 16\)"),
        ("global_scale", jnp.ones(1), r"global scale \(1,\) does not fit \(8, 16\)"),
    ],
)
def test_damaged_weights_are_refused(field, value, message):
    weight = dataclasses.replace(make_weight(8, 32), **{field: value})
    with pytest.raises(FormatError, match=message):
        marlin.repack(weight)


# Identity.


def fingerprints(packed, scale, global_scale) -> set[tuple[int, ...]]:
    """Of a stack of matrices; each must have its own."""
    stack = NVFP4Weight(jnp.asarray(packed), jnp.asarray(scale.view(F8)), jnp.asarray(global_scale))
    return {tuple(row) for row in np.asarray(marlin.repack(stack).fingerprint).tolist()}


def test_fingerprint_depends_on_every_bit():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (3, 24), dtype=np.uint8)
    scale = rng.integers(8, 0x70, (3, 3), dtype=np.uint8)
    global_scale = np.frombuffer(np.float32(0.37).tobytes(), np.uint8)
    fields = [packed, scale, global_scale]
    variants = [fields]
    for which, usable in enumerate((8, 7, 8)):  # a block scale has no sign
        for i, bit in np.ndindex(fields[which].size, usable):
            changed = [field.copy() for field in fields]
            changed[which].reshape(-1)[i] ^= 1 << bit
            variants.append(changed)
    assert len(variants) == 1 + 8 * 72 + 7 * 9 + 8 * 4
    packed, scale, global_scale = (np.stack(column) for column in zip(*variants, strict=True))
    assert not np.any(scale == 0x7F)
    found = fingerprints(packed, scale, np.ascontiguousarray(global_scale).view(np.float32)[:, 0])
    assert len(found) == len(variants)


def test_fingerprint_depends_on_order():
    weight = make_weight(4, 32)
    packed, scale = np.asarray(weight.packed), bits(weight.scale)
    orders = np.array([[0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3, 2], [3, 1, 2, 0], [2, 3, 0, 1]])
    columns = np.array([*range(8, 16), *range(8)])
    packed = np.concatenate([packed[orders], packed[None][:, :, columns]])
    scale = np.concatenate([scale[orders], scale[None]])
    assert len(fingerprints(packed, scale, np.full(6, 2, np.float32))) == 6


def test_fingerprint_is_of_the_content():
    weight = make_weight(16, 32)
    w = marlin.repack(weight)
    assert np.any(np.asarray(weight.packed) != canonical(weight).packed)
    again = marlin.repack(jax.tree.map(jnp.asarray, canonical(weight)))
    assert_same(again, w)
    halves = [
        dataclasses.replace(weight, packed=weight.packed[rows], scale=weight.scale[rows])
        for rows in (slice(0, 8), slice(8, 16))
    ]
    fused = marlin.repack(halves)
    np.testing.assert_array_equal(fused.words, w.words)
    divided = marlin.repack(dataclasses.replace(weight, global_is_divisor=True))
    kinds = [np.asarray(x.fingerprint).tolist() for x in (w, fused, divided)]
    assert len({tuple(kind) for kind in kinds}) == 3
    stacked = marlin.repack(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weight))
    np.testing.assert_array_equal(stacked.fingerprint, [w.fingerprint] * 2)


def test_checksum_of_any_array():
    x = np.arange(24, dtype=np.float32)
    forms = [x, x.reshape(2, 12), x.reshape(12, 2), x.view(np.int32), x[::-1], x[:23], -x]
    forms += [x.astype(t) for t in (np.float16, ml_dtypes.bfloat16, np.uint8, F8)]
    forms += [forms[-4][:23], forms[-2][:23], np.float32(0), np.zeros(0, np.float32)]
    found = {tuple(np.asarray(checksum(jnp.asarray(form))).tolist()) for form in forms}
    assert len(found) == len(forms)
    assert np.any(np.asarray(checksum(jnp.asarray(x), "a")) != np.asarray(checksum(jnp.asarray(x))))


# A pytree node like any other.


@pytest.fixture(scope="module")
def node() -> MarlinWeight:
    return marlin.repack([make_weight(n, 64, (3,), seed=n) for n in (5, 8)])


def test_it_passes_through_jit_and_vmap(node):
    assert_same(jax.jit(lambda w: w)(node), node)
    per_expert = jax.vmap(lambda w: (decode(w), w))(node)
    np.testing.assert_array_equal(per_expert[0], decode(node))
    assert_same(per_expert[1], node)
    one = jax.tree.map(lambda leaf: leaf[1], node)
    assert one.shape == (13, 64)
    np.testing.assert_array_equal(decode(one), decode(node)[1])


def test_static_fields_are_part_of_the_structure(node):
    other = dataclasses.replace(node, shards=(8, 5))
    assert jax.tree.structure(node) != jax.tree.structure(other)
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, node, other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.k = 32
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(node)]
    assert paths == [f".{name}" for name in NAMES]


def test_device_put_and_donation(node):
    device = jax.devices()[-1]
    moved = jax.device_put(node, device)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(moved))
    assert_same(jax.device_get(moved), jax.device_get(node))

    copy = jax.tree.map(jnp.copy, node)
    rescale = functools.partial(jax.jit, donate_argnums=0)(
        lambda w: dataclasses.replace(w, global_scale=w.global_scale * 2)
    )
    result = rescale(copy)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copy))
    np.testing.assert_array_equal(result.global_scale, node.global_scale * 2)
    np.testing.assert_array_equal(result.words, node.words)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(node))


def test_it_survives_a_file(node):
    tree = {"layer": {"weight": node, "bias": jnp.arange(13, dtype=jnp.bfloat16)}}
    leaves, structure = jax.tree.flatten(tree)
    data = flax.serialization.msgpack_serialize({str(i): x for i, x in enumerate(leaves)})
    read = flax.serialization.msgpack_restore(data)
    restored = structure.unflatten([jnp.asarray(read[str(i)]) for i in range(len(leaves))])
    assert_same(restored, tree)

    file = io.BytesIO()
    np.savez(file, **{name: np.asarray(getattr(node, name)) for name in NAMES})
    file.seek(0)
    with np.load(file) as arrays:
        assert_same(dataclasses.replace(node, **{name: arrays[name] for name in NAMES}), node)


# Memory: a loader may need the result and three times the packed bytes, no more.


@pytest.mark.parametrize(
    ("stack", "shards", "k"),
    [
        ((), (2048,), 2048),
        ((), (1024, 512, 512), 2048),
        ((8,), (256,), 2048),
        ((8,), (128, 128), 2048),
        ((), (301, 388), 1872),  # padded rows and a padded tile
    ],
)
def test_repack_needs_little_memory(stack, shards, k):
    def shape(n):
        return NVFP4Weight(
            jax.ShapeDtypeStruct((*stack, n, k // 2), jnp.uint8),
            jax.ShapeDtypeStruct((*stack, n, k // 16), F8),
            jax.ShapeDtypeStruct(stack, jnp.float32),
        )

    weights = tuple(shape(n) for n in shards)
    needs = jax.jit(marlin.repack).lower(weights).compile().memory_analysis()
    packed = sum(w.packed.size for w in weights)
    result = jax.eval_shape(marlin.repack, weights)
    assert needs.argument_size_in_bytes >= packed
    assert result.nbytes <= needs.output_size_in_bytes < result.nbytes + 1024
    total = needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes
    assert total <= result.nbytes + 3 * packed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint8])
def test_checksum_needs_little_memory(dtype):
    x = jax.ShapeDtypeStruct((1024, 1024), dtype)
    needs = jax.jit(checksum).lower(x).compile().memory_analysis()
    # The CPU backend fuses all of it; a GPU's reduction in two steps may write its hashes out.
    limit = 0.01 if jax.default_backend() == "cpu" else 4.1
    assert needs.temp_size_in_bytes <= limit * x.size * x.dtype.itemsize


# Random weights.


@pytest.mark.parametrize(
    ("shards", "k", "stack"), [((301,), 80, ()), ((64, 32), 512, ()), ((16, 24), 48, (3,))]
)
def test_random_weights_are_weights(shards, k, stack):
    w = marlin.random_weight(jax.random.key(0), shards, k, stack)
    assert (w.shards, w.k, w.stack, w.layout) == (shards, k, stack, marlin.LAYOUT)
    found = marlin.unpack(w)
    found = (found,) if len(shards) == 1 else found
    for part in found:
        nvfp4.validate(part)
    assert_same(marlin.repack(found), w)  # padding and fingerprint as a repack makes them
    values = np.asarray(dequantize(w))
    assert abs(values.std() * k**0.5 - 1) < 0.1
    assert abs(values.mean() * k**0.5) < 0.1
    codes = np.concatenate([codes_of(part.packed).ravel() for part in found])
    assert np.bincount(codes).min() > 0.8 * len(codes) / 16
    assert set(np.concatenate([bits(part.scale).ravel() for part in found])) == set(range(48, 64))


def test_random_weights_follow_their_key():
    make = functools.partial(marlin.random_weight, shards=(16,), k=64)
    w = make(jax.random.key(0))
    assert_same(jax.jit(make)(jax.random.key(0)), w)
    other = make(jax.random.key(1))
    assert np.mean(np.asarray(other.words) == np.asarray(w.words)) < 0.01
    stack = make(jax.random.key(0), stack=(2,))
    assert np.any(np.asarray(stack.words[0]) != np.asarray(stack.words[1]))
    with pytest.raises(FormatError, match="K = 40 is not a multiple"):
        make(jax.random.key(0), k=40)
