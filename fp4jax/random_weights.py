"""Engines of any size without a download: a configuration, and random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from fp4jax.checkpoints.hf_config import CONFIG_NAME
from fp4jax.checkpoints.loader import load_params
from fp4jax.checkpoints.random_files import EVERY_LINEAR, RandomFiles
from fp4jax.errors import CheckpointError
from fp4jax.loading import compute_dtype, read_config, reported
from fp4jax.model import Model
from fp4jax.progress import Progress


def random_model(
    config: str | Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool | Progress | None = None,
    seed: int = 0,
) -> Model:
    """An engine of a configuration's sizes with random weights, through the loader's own path.

    Weights are quantized as the configuration says (``quantization_config``, or
    ``hf_quant_config.json`` beside it: NVFP4, FP8, mixed); where it says nothing, all linears but
    the output head and the routers are NVFP4. Memory, load time and speed are a real checkpoint's;
    its text is noise, and no token ends
    it.

    Args:
      config: a ``config.json``, or a folder with one.
      dtype, mesh, progress: as in :func:`fp4jax.load`.
      seed: of the weights.

    Raises:
      CheckpointError: no such file.
      ConfigError: an architecture, algorithm or size that is unknown or contradictory.
    """
    compute = compute_dtype(dtype)
    path = Path(config).expanduser()
    path = path / CONFIG_NAME if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"{path}: no such configuration file")
    stated = read_config(path)
    if stated.quantization.method is None:
        stated = dataclasses.replace(stated, quantization=EVERY_LINEAR)
    tied = stated.config.tie_word_embeddings
    files = RandomFiles(path, stated.keys, stated.quantization, tied=tied, seed=seed)
    module = stated.architecture.model(config=stated.config, dtype=compute)
    with reported(progress) as report:
        params = load_params(files, stated.plan(files), dtype=compute, mesh=mesh, progress=report)
    return Model(module, params)
