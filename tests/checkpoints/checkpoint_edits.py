"""Changed copies of a reference checkpoint, and what loading them does."""

from __future__ import annotations

import gc
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fp4jax
from fp4jax.checkpoints.tensors import TensorFiles

Tensors = dict[str, np.ndarray]
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of a checkpoint."""
    files = TensorFiles.open(folder)
    return {name: files.read(name) for name in files.names()}


def write_tensors(tensors: Tensors, path: Path) -> None:
    """safetensors; 0-d arrays stay 0-d."""
    save_file({name: np.ascontiguousarray(v).reshape(v.shape) for name, v in tensors.items()}, path)


def edited(
    source: Path,
    folder: Path,
    *,
    tensors: Callable[[Tensors], Any] | None = None,
    config: Callable[[dict], Any] | None = None,
    quant: Callable[[dict], Any] | None = None,
) -> Path:
    """A copy of checkpoint ``source`` with its tensors, config.json or quantization changed.

    The callables change what they are given in place. Where there is a ``hf_quant_config.json``,
    ``quant`` changes it, else the ``quantization_config`` in ``config.json``. Tensors are written
    as one file once they change.
    """
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if not file.name.startswith(("oracle.", "reference.")):
            shutil.copy(file, folder)
    if tensors is not None:
        values = read_tensors(source)
        tensors(values)
        for file in folder.glob("model*.safetensors*"):
            file.unlink()
        write_tensors(values, folder / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text())
    if config is not None:
        config(stated)
    own = folder / "hf_quant_config.json"
    if quant is not None and own.exists():
        value = json.loads(own.read_text())
        quant(value["quantization"])
        own.write_text(json.dumps(value))
    elif quant is not None:
        quant(stated["quantization_config"])
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def load(folder: Path, dtype: str = "float32") -> fp4jax.Model:
    """Without a progress bar."""
    return fp4jax.load_model(folder, dtype=dtype, progress=False)


def logits(folder: Path, ids: np.ndarray | None = None) -> np.ndarray:
    """f32 logits of a few tokens."""
    return np.asarray(load(folder)(IDS if ids is None else ids))


IDS = np.asarray([[3, 141, 59, 26, 5, 35, 89, 79]])


def live_arrays() -> list[tuple]:
    """What lies on the devices."""
    return sorted((array.shape, array.dtype.name) for array in jax.live_arrays())


@contextmanager
def refused(error: type[fp4jax.errors.Fp4JaxError], *words: str) -> Iterator[None]:
    """The block raises exactly ``error``, its message holds ``words``, and no device was touched.

    Loading puts nothing on a device before ``load_params``, so that function must not have begun.
    """
    before = live_arrays()
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    frames = {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert "load_model" in frames or "open_checkpoint" in frames, frames
    assert "load_params" not in frames
    caught = None
    if live_arrays() != before:
        gc.collect()  # slow, and seldom needed
    assert live_arrays() == before


def dequantized(tensors: Tensors, module: str) -> np.ndarray:
    """f32 values of a ModelOpt NVFP4 matrix, in plain numpy."""
    packed, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    step = scale.astype(np.float32) * tensors[f"{module}.weight_scale_2"].reshape(())
    return E2M1[codes] * np.repeat(step, 16, axis=1)


def unquantize(tensors: Tensors, module: str, dtype: Any = np.float32) -> None:
    """Puts the dequantized values of a ModelOpt matrix in its place."""
    value = dequantized(tensors, module)
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        tensors.pop(f"{module}.{leaf}", None)
    tensors[f"{module}.weight"] = value.astype(dtype)


def quantize(tensors: Tensors, module: str, seed: int = 0) -> None:
    """Puts a random ModelOpt NVFP4 matrix in place of an unquantized one."""
    n, k = tensors[f"{module}.weight"].shape
    rng = np.random.default_rng(seed)
    tensors[f"{module}.weight"] = rng.integers(0, 256, (n, k // 2), np.uint8)
    scale = rng.uniform(0.5, 2, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = scale
    tensors[f"{module}.weight_scale_2"] = np.asarray(0.02, np.float32)
