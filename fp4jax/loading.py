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
from fp4jax.checkpoints.keys import Key
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


@dataclasses.dataclass(frozen=True)
class StatedConfig:
    """What a checkpoint's configuration files say; meanings as in :class:`OpenedCheckpoint`."""

    hf: Mapping[str, Any]
    architecture: Architecture
    config: Any
    quantization: QuantizationConfig

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key table of these sizes."""
        return self.architecture.keys(self.config)

    def plan(self, files: TensorFiles) -> Plan:
        """``files`` matched with the keys; errors as :func:`make_plan`'s."""
        return make_plan(
            files,
            self.keys,
            self.quantization,
            tied=self.config.tie_word_embeddings,
            skips=self.architecture.skip,
        )


def read_config(path: Path) -> StatedConfig:
    """A ``config.json``, and ``hf_quant_config.json`` beside it where there is one.

    Raises:
      CheckpointError: missing, or not JSON.
      ConfigError: an architecture, algorithm or size that is unknown or contradictory.
    """
    raw = read_json(path, required=True)
    hf = text_config(raw)
    try:
        architecture = find_architecture(architecture_names(raw))
        return StatedConfig(
            hf, architecture, architecture.config(hf), read_quantization(path.parent, hf)
        )
    except ConfigError as error:
        raise type(error)(f"{path.parent}: {error}") from None


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
    stated = read_config(root / CONFIG_NAME)
    files = unstack_experts(TensorFiles.open(root))
    plan = stated.plan(files)
    config = dataclasses.replace(stated.config, tie_word_embeddings=plan.tied)
    return OpenedCheckpoint(
        files, stated.hf, stated.architecture, config, stated.quantization, plan
    )


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
    return _load(path, dtype, mesh, progress, drafter=False)


def load_draft(
    path: str | Path,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool | Progress | None = None,
) -> Model:
    """Loads a drafter, which proposes tokens to a model; it has neither tokenizer nor head.

    Its ``module`` is a :class:`~fp4jax.generation.drafting.Drafter`. Arguments, errors and
    warnings as of :func:`load_model`.
    """
    return _load(path, dtype, mesh, progress, drafter=True)


def _load(
    path: str | Path,
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
    progress: bool | Progress | None,
    *,
    drafter: bool,
) -> Model:
    compute = compute_dtype(dtype)
    opened = open_checkpoint(path)
    if opened.architecture.drafter != drafter:
        kind, loader = ("a drafter", "load_draft") if not drafter else ("no drafter", "load_model")
        raise ConfigError(
            f"{opened.files.root}: {opened.architecture.name} is {kind}; fp4jax.{loader} loads it"
        )
    for message in opened.plan.warnings:
        warnings.warn(f"{opened.files.root}: {message}", CheckpointWarning, stacklevel=3)
    generation = read_json(opened.files.root / GENERATION_CONFIG_NAME)
    eos = eos_token_ids(generation, opened.hf)
    check_values(opened.files, opened.plan)
    module = opened.architecture.model(config=opened.config, dtype=compute)
    with reported(progress) as report:
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
def reported(progress: bool | Progress | None) -> Iterator[Progress | None]:
    """What ``load(progress=…)`` stands for: a bar, the caller's own callable, or nothing."""
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
