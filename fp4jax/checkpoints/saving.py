"""Writing a parameter tree as a checkpoint, so that what was trained here loads like any other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fp4jax.checkpoints.hf_config import CONFIG_NAME, architecture_names, text_config
from fp4jax.checkpoints.keys import Key
from fp4jax.checkpoints.output import SHARD_BYTES, ShardWriter, write_json, written_at_once
from fp4jax.errors import UnsupportedError
from fp4jax.quantized import is_quantized


def save_checkpoint(
    folder: str | Path, hf: Mapping[str, Any], params: Mapping[str, Any], *, dtype: Any = "bfloat16"
) -> Path:
    """Writes an unquantized parameter tree in Hugging Face layout.

    :func:`~fp4jax.checkpoints.writer.quantize_checkpoint` takes the result.

    Args:
      folder: to write; must not exist or be empty.
      hf: contents of ``config.json``; names the architecture, whose key table names the tensors.
      params: the tree, arrays alone.
      dtype: of all tensors.

    Returns:
      The folder.

    Raises:
      CheckpointError: the folder is not empty or cannot be written.
      ConfigError: an architecture or size that is unknown or contradictory.
      UnsupportedError: a weight is quantized.
    """
    from fp4jax.models import find_architecture  # models need this package

    architecture = find_architecture(architecture_names(hf))
    keys = architecture.keys(architecture.config(text_config(hf)))
    folder = Path(folder).expanduser()
    with written_at_once(folder) as unfinished:
        writer = ShardWriter(unfinished, SHARD_BYTES)
        for name, value in tensors_of_tree(params, keys):
            writer.add({name: np.ascontiguousarray(value, jnp.dtype(dtype))})
        writer.close()
        write_json(unfinished / CONFIG_NAME, dict(hf))
    return folder


def tensors_of_tree(
    params: Mapping[str, Any], keys: Sequence[Key]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a checkpoint with this key table has, by name; fused ones taken apart.

    Raises:
      UnsupportedError: a weight is quantized.
    """
    for key in keys:
        node: Any = params
        for name in key.target.split("/"):
            node = node.get(name) if isinstance(node, Mapping) else None
        if node is None and key.kind == "head":
            continue  # tied to the embedding
        if key.kind == "parameter":
            yield key.sources[0], np.asarray(node)
            continue
        for leaf, value in node.items():
            if is_quantized(value):
                raise UnsupportedError(
                    f"{key.target}/{leaf} is quantized: save the unquantized tree, then quantize "
                    "the checkpoint"
                )
            ends = list(itertools.accumulate(key.rows))[:-1]
            axis = 1 if key.experts else 0
            parts = np.split(np.asarray(value), ends, axis)
            for source, part in zip(key.sources, parts, strict=True):
                for expert in range(max(key.experts, 1)):
                    yield (
                        f"{source.format(expert=expert)}.{leaf}",
                        part[expert] if key.experts else part,
                    )
