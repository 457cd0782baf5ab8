"""A checkpoint that is nowhere: headers from a model's key table, data drawn when it is read.

The loader takes it for files, so that what a real checkpoint of some sizes takes to load and to
run is found out without having it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from fp4jax.checkpoints.keys import Key
from fp4jax.checkpoints.modelopt import MODELOPT
from fp4jax.checkpoints.quantization import EMBEDDINGS, QuantizationConfig, is_embedding
from fp4jax.checkpoints.stored import FP8_SCALE
from fp4jax.checkpoints.tensors import TensorFiles, TensorInfo
from fp4jax.checkpoints.writer import DECAYS, DEFAULT_EXCLUDE, ROUTERS
from fp4jax.fp8 import E4M3
from fp4jax.nvfp4 import BLOCK_SIZE

UNQUANTIZED = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
POOL = 1 << 20
"""Values drawn for a tensor; a larger one repeats them."""
E4M3_RMS = 100.0
"""Root mean square of uniformly drawn finite e4m3 codes."""
BLOCK_VALUE = 3.6
"""That of an NVFP4 block with uniform codes and scales between 0.5 and 1.875."""

EVERY_LINEAR = QuantizationConfig(
    method=MODELOPT.name,
    algorithms=("W4A16_NVFP4",),
    ignore=(*DEFAULT_EXCLUDE, *ROUTERS, *DECAYS, *(f"*{name}" for name in EMBEDDINGS)),
)
"""What recipes do by default: NVFP4, but for the head, routers and decay projections."""


class RandomFiles(TensorFiles):
    """Random tensors under the names and in the formats of a ModelOpt checkpoint. Immutable.

    Matrices have entries of standard deviation about ``K ** -0.5``, norms are 1, and other
    parameters lie between 0 and 1. A tensor's values depend on the seed and its name.

    Args:
      root: what messages call the checkpoint.
      keys: the model's table.
      quantization: which modules are quantized by what.
      tied: leave out the head.
      seed: of all values.
    """

    def __init__(
        self,
        root: Path,
        keys: Sequence[Key],
        quantization: QuantizationConfig,
        *,
        tied: bool = False,
        seed: int = 0,
    ) -> None:
        infos: dict[str, TensorInfo] = {}
        fan_in: dict[str, int] = {}
        for key, algorithms in _by_key(keys, quantization):
            if tied and key.kind == "head":
                continue
            for source, n, algorithm in algorithms:
                leaves = _leaves(key, source, n, algorithm)
                for name, (dtype, shape) in leaves.items():
                    infos[name] = TensorInfo(name, root, dtype, shape, 0)
                    fan_in[name] = key.k
        super().__init__(root, infos)
        self._seed, self._fan_in = seed, fan_in

    def read(self, name: str) -> np.ndarray:
        """Values of ``name``, the same at every call."""
        info, k = self.info(name), self._fan_in[name]
        rng = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        count = math.prod(info.shape)
        few = min(count, POOL)
        values: np.ndarray
        if not k:
            values = np.ones(few) if name.endswith(".weight") else rng.random(few)
        elif name.endswith(".bias"):
            values = np.zeros(few)
        elif info.dtype == np.uint8:
            values = rng.integers(0, 256, few, np.uint8)
        elif info.dtype == E4M3 and name.endswith(MODELOPT.block_scale):
            values = rng.integers(0x30, 0x40, few, np.uint8).view(E4M3)
        elif info.dtype == E4M3:
            codes = rng.integers(0, 0x7F, few, np.uint8) | (rng.integers(0, 2, few, np.uint8) << 7)
            values = codes.view(E4M3)
        elif info.dtype == np.float32:
            is_fp8 = self.info(f"{name.rpartition('.')[0]}.weight").dtype == E4M3
            values = np.full(few, 1 / ((E4M3_RMS if is_fp8 else BLOCK_VALUE) * math.sqrt(k)))
        else:
            values = rng.standard_normal(few, np.float32) / math.sqrt(k)
        return np.resize(values.astype(info.dtype, copy=False), info.shape)


def _by_key(
    keys: Sequence[Key], quantization: QuantizationConfig
) -> Iterator[tuple[Key, list[tuple[str, int, str | None]]]]:
    """Each key with (module, rows, algorithm) of the matrices that it is made of."""
    for key in keys:
        if not key.k:
            yield key, [(key.sources[0], 0, None)]
            continue
        modules = [
            (source.format(expert=expert), rows)
            for expert in range(max(key.experts, 1))
            for source, rows in zip(key.sources, key.rows, strict=True)
        ]
        chosen = _algorithms([module for module, _ in modules], key.k, quantization)
        yield key, [(*module, a) for module, a in zip(modules, chosen, strict=True)]


def _algorithms(
    modules: Sequence[str], k: int, quantization: QuantizationConfig
) -> list[str | None]:
    stated = quantization.algorithms_of(modules)
    fits = [a is not None and ("FP8" in a or k % BLOCK_SIZE == 0) for a in stated]
    return [
        algorithm if fit and not is_embedding(module) else None
        for module, algorithm, fit in zip(modules, stated, fits, strict=True)
    ]


def _leaves(
    key: Key, source: str, n: int, algorithm: str | None
) -> Mapping[str, tuple[np.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of the tensors of one matrix, vector or parameter."""
    if key.kind == "vector":
        return {f"{source}.weight": (UNQUANTIZED, key.rows)}
    if key.kind == "parameter":
        return {source: (F32, key.rows)}
    k, weight = key.k, f"{source}.weight"
    bias = {f"{source}.bias": (UNQUANTIZED, (n,))} if key.bias else {}
    if algorithm is None:
        return {weight: (UNQUANTIZED, (n, k)), **bias}
    if "FP8" in algorithm:
        return {weight: (E4M3, (n, k)), f"{source}.{FP8_SCALE}": (F32, ()), **bias}
    return {
        weight: (np.dtype(np.uint8), (n, k // 2)),
        f"{source}.{MODELOPT.block_scale}": (E4M3, (n, k // BLOCK_SIZE)),
        f"{source}.{MODELOPT.global_scale}": (F32, ()),
        **bias,
    }
