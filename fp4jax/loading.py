"""``load``: a checkpoint folder to a model and its tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    architecture_names,
    eos_token_ids,
    read_json,
    text_config,
)
from fp4jax.checkpoints.loader import check_values, load_params
from fp4jax.checkpoints.plan import Plan, make_plan
from fp4jax.checkpoints.quantization import QuantizationConfig, read_quantization
from fp4jax.checkpoints.stacked import unstack_experts
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.errors import CheckpointError, CheckpointWarning, ConfigError
from fp4jax.model import Model
from fp4jax.models import find_architecture
from fp4jax.progress import Progress, progress_bar

if TYPE_CHECKING:
    from fp4jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose headers were read and matched; no data yet.

    Attributes:
      files: its tensors.
      hf: contents of ``config.json``, the text model's fields in front.
      architecture: what it names.
      config: the frozen config; ``tie_word_embeddings`` is what the tensors say.
      quantization: its own statement.
      plan: which tensors fill what.
    """

    files: TensorFiles
    hf: Mapping[str, Any]
    architecture: Architecture
    config: Any
    quantization: QuantizationConfig
    plan: Plan


def open_checkpoint(path: str | Path) -> OpenedCheckpoint:
    """Reads the configuration and every header of a checkpoint and matches the two.

    Raises:
      CheckpointError: no such folder, or files or tensors are missing, damaged or left over.
      ConfigError: an architecture, algorithm or size that is unknown or contradictory.
      FormatError: a tensor is not valid NVFP4.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such checkpoint folder")
    raw = read_json(root / CONFIG_NAME, required=True)
    hf = text_config(raw)
    try:
        architecture = find_architecture(architecture_names(raw))
        config = architecture.config(hf)
        quantization = read_quantization(root, hf)
    except ConfigError as error:
        raise type(error)(f"{root}: {error}") from None
    files = unstack_experts(TensorFiles.open(root))
    plan = make_plan(
        files,
        architecture.keys(config),
        quantization,
        tied=config.tie_word_embeddings,
        skips=architecture.skip,
    )
    config = dataclasses.replace(config, tie_word_embeddings=plan.tied)
    return OpenedCheckpoint(files, hf, architecture, config, quantization, plan)


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool | Progress | None = None,
) -> tuple[Model, Tokenizer]:
    """Loads a checkpoint folder in Hugging Face layout.

    Args:
      path: folder with ``config.json``, safetensors and ``tokenizer.json``.
      dtype: of activations and unquantized weights: bf16, f16 or f32. By default bf16 on an
        accelerator and f32 on a CPU.
      mesh: spread the weights over a ``jax.sharding.Mesh`` (its axis named "model", "tensor" or
        "tp", else the last). By default everything is on one device.
      progress: True or False for a progress bar, or a callable ``(stage, done, total)`` told about
        bytes. By default a bar where the error stream is a terminal.

    Returns:
      The model and its tokenizer.

    Raises:
      Fp4JaxError: one of its kinds; see :func:`open_checkpoint`, :class:`TokenizerError`.
    """
    from fp4jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(path)
    return load_model(path, dtype=dtype, mesh=mesh, progress=progress), tokenizer


def load_model(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool | Progress | None = None,
) -> Model:
    """:func:`load` without a tokenizer, for token ids alone. Arguments and errors as there.

    Warns:
      CheckpointWarning: config and tensors contradict each other; the tensors decide.
    """
    compute = compute_dtype(dtype)
    opened = open_checkpoint(path)
    for message in opened.plan.warnings:
        warnings.warn(f"{opened.files.root}: {message}", CheckpointWarning, stacklevel=2)
    generation = read_json(opened.files.root / GENERATION_CONFIG_NAME)
    eos = eos_token_ids(generation, opened.hf)
    check_values(opened.files, opened.plan)
    module = opened.architecture.model(config=opened.config, dtype=compute)
    with _progress(progress) as report:
        params = load_params(opened.files, opened.plan, dtype=compute, mesh=mesh, progress=report)
    return Model(module, params, eos)


def compute_dtype(dtype: Any = None) -> jnp.dtype:
    """The dtype that ``load(dtype=…)`` stands for.

    Raises:
      ConfigError: not bf16, f16 or f32.
    """
    if dtype is None:
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32)):
        raise ConfigError(f"dtype={dtype!r} must be bfloat16, float16 or float32")
    return found


@contextlib.contextmanager
def _progress(progress: bool | Progress | None) -> Iterator[Progress | None]:
    if progress is None:
        progress = sys.stderr.isatty()
    if isinstance(progress, bool):
        if not progress:
            yield None
            return
        with progress_bar() as report:
            yield report
        return
    yield progress
