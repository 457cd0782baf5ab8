"""Accounting for a checkpoint: every tensor is used once or skipped, and the config agrees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fp4jax.checkpoints.compressed_tensors import FP8_FORMAT
from fp4jax.checkpoints.keys import Skip
from fp4jax.checkpoints.quantization import HEADS, QuantizationConfig, is_embedding
from fp4jax.checkpoints.stored import DENSE, FP8, StoredMatrix
from fp4jax.checkpoints.tensors import TensorFiles, TensorInfo
from fp4jax.errors import CheckpointError

SKIPS = (
    Skip(r".*\.input(_global)?_scale", "scale of quantized activations; they are kept in 16 bits"),
    Skip(r".*\.[qkv]_scale", "scale of an 8-bit KV cache; the cache is kept in 16 bits"),
    Skip(r".*rotary_emb\.inv_freq", "rotary frequencies follow from the config"),
)
"""Tensors that no architecture uses."""

TIED_REASON = "the output head repeats the tied embedding"


def tied_skip(tied: bool) -> list[Skip]:
    """Leaves a stored output head out where the embedding serves for it."""
    pattern = "|".join(re.escape(head) for head in HEADS)
    return [Skip(rf"({pattern})\..*", TIED_REASON)] if tied else []


def account(
    files: TensorFiles, used: list[TensorInfo], skips: list[Skip]
) -> tuple[tuple[TensorInfo, str], ...]:
    """Every tensor is used once or skipped, or the checkpoint is refused."""
    seen: dict[str, None] = {}
    for tensor in used:
        if tensor.name in seen:
            raise CheckpointError(f"{tensor.file}: {tensor.name} would be used twice")
        seen[tensor.name] = None
    rules = [(re.compile(skip.pattern), skip.reason) for skip in skips]
    skipped, left = [], []
    for name in files.names():
        if name in seen:
            continue
        reason = next((reason for rule, reason in rules if rule.fullmatch(name)), None)
        if reason is None:
            left.append(name)
        else:
            skipped.append((files.info(name), reason))
    if left:
        raise CheckpointError(
            f"{files.root}: {len(left)} tensors belong to no part of the model: {some_of(left)}; "
            "use the config.json that came with them; if it did, the architecture is not fully "
            "supported"
        )
    return tuple(skipped)


def conflicts(stored: Iterable[StoredMatrix], quantization: QuantizationConfig) -> list[str]:
    """Where the quantization statement and the tensors disagree."""
    stored = [matrix for matrix in stored if not is_embedding(matrix.module)]
    stated = quantization.algorithms_of(matrix.module for matrix in stored)
    found: dict[str, list[str]] = {kind: [] for kind in ("as NVFP4", "as FP8", "unquantized")}
    for matrix, algorithm in zip(stored, stated, strict=True):
        kind = {DENSE: "unquantized", FP8: "as FP8"}.get(matrix.format, "as NVFP4")
        if kind != _kind_of(algorithm):
            found[kind].append(matrix.module)
    return [
        f"{len(modules)} modules are stored {kind}, whatever the config says: {some_of(modules)}"
        for kind, modules in found.items()
        if modules
    ]


def _kind_of(algorithm: str | None) -> str:
    if algorithm is None:
        return "unquantized"
    return "as FP8" if algorithm.startswith(("FP8", FP8_FORMAT)) else "as NVFP4"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """A list for people, cut short."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
