"""Quantizing a checkpoint on disk, and writing it the way either vendor's tool does.

Tensors stream through: at most one group of fused linears and one output shard are in memory.
Everything is written into a hidden folder beside the target, which gets its name at the very end.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fp4jax
from fp4jax.checkpoints.accounting import TIED_REASON
from fp4jax.checkpoints.compressed_tensors import COMPRESSED_TENSORS, PACKED_FORMAT
from fp4jax.checkpoints.formats import WeightFormat
from fp4jax.checkpoints.hf_config import CONFIG_NAME, read_json
from fp4jax.checkpoints.modelopt import MODELOPT, QUANT_CONFIG_NAME
from fp4jax.checkpoints.output import SHARD_BYTES, ShardWriter, write_json, written_at_once
from fp4jax.checkpoints.plan import Plan, PlannedNode
from fp4jax.checkpoints.quantization import HEADS, matches
from fp4jax.checkpoints.stored import DENSE, FP8, StoredMatrix
from fp4jax.checkpoints.tensors import TensorFiles
from fp4jax.errors import CheckpointError, ConfigError, FormatError, UnsupportedError
from fp4jax.nvfp4 import BLOCK_SIZE, Convention, global_scale_of, quantize
from fp4jax.progress import Progress

FORMATS = (MODELOPT, COMPRESSED_TENSORS)
"""Formats that can be written."""

DEFAULT_EXCLUDE = ("lm_head",)
"""Modules that are left alone unless the caller says otherwise; both vendors' recipes do this."""

ROUTERS = ("*.gate", "*router*", "*.shared_expert_gate")
"""Expert routers, which no recipe quantizes."""

DECAYS = ("*.linear_attn.in_proj_a", "*.linear_attn.in_proj_b")
"""One value a head for decay and write strength of linear attention; likewise."""

EMBEDDING = "embed_tokens"
"""What the token embedding is called in the tree."""

CHUNK_ELEMENTS = 1 << 26
"""Elements quantized at once; bounds the f32 copies of a large matrix."""

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
"""Files of a checkpoint that hold weights; all others are copied."""


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    exclude: Sequence[str] | None = None,
    format: str = MODELOPT.name,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Quantizes the linear layers of a checkpoint to NVFP4 (weights only, round to nearest).

    Norms, embeddings and expert routers keep their values, as does any matrix whose K is not a
    multiple of 16. Linears that will be fused (q/k/v, gate/up) share one global scale, as the
    vendors' tools have it. Tokenizer, chat template and other small files are copied.

    Args:
      source: unquantized checkpoint folder in Hugging Face layout.
      target: folder to write; must not exist or be empty.
      exclude: modules to leave alone: names, wildcards, or ``re:`` and a regular expression.
        Default :data:`DEFAULT_EXCLUDE`; ``()`` quantizes the output head too.
      format: whose names and arithmetic: ``"modelopt"`` (nvidia-modelopt's W4A16_NVFP4) or
        ``"compressed-tensors"`` (llm-compressor's NVFP4A16).
      shard_bytes: a new file is begun where this would be passed.
      progress: called as ``progress("quantize", done, total)``, in bytes of the source.

    Returns:
      The target folder.

    Raises:
      CheckpointError: the source is damaged or already quantized, or the target is not empty or
        cannot be written.
      ConfigError: an unknown format or architecture, an exclusion that names nothing, or nothing
        left to quantize.
      FormatError: a weight is not finite.
      UnsupportedError: only some experts of a layer are excluded.
    """
    from fp4jax.loading import open_checkpoint  # loads models, which need this package

    form = _format(format)
    target = Path(target).expanduser()
    opened = open_checkpoint(source)
    _check_unquantized(opened.plan, opened.quantization.method, opened.files.root)
    chosen, ignore = _choose(opened.files, opened.plan, exclude)
    raw = read_json(opened.files.root / CONFIG_NAME, required=True)
    with written_at_once(target) as folder:
        writer = ShardWriter(folder, shard_bytes)
        total, done = _source_bytes(opened.plan), 0
        for node in opened.plan.nodes:
            for tensors, read in _node_tensors(opened.files, node, chosen, form):
                writer.add(tensors)
                done += read
                if progress is not None:
                    progress("quantize", done, total)
        for info, reason in opened.plan.skipped:
            if reason != TIED_REASON:
                writer.add({info.name: opened.files.read(info.name)})
        writer.close()
        _write_configs(folder, raw, form, ignore)
        _copy_rest(opened.files.root, folder)
    return target


def _format(name: str) -> WeightFormat:
    for form in FORMATS:
        if form.name == name:
            return form
    known = ", ".join(form.name for form in FORMATS)
    raise ConfigError(f"format {name!r} is not known; use one of {known}")


def _check_unquantized(plan: Plan, method: str | None, root: Path) -> None:
    stored = [m for node in plan.nodes for group in node.matrices for m in group]
    found = next((m for m in stored if m.format != DENSE), None)
    if found is not None:
        kind = "FP8" if found.format == FP8 else f"{found.format} NVFP4"
        raise CheckpointError(f"{root}: already quantized: {found.module} is {kind}")
    if method is not None:
        raise CheckpointError(f"{root}: its configuration says that it is quantized ({method})")


def _choose(
    files: TensorFiles, plan: Plan, exclude: Sequence[str] | None
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Modules to quantize, and those left alone."""
    patterns = DEFAULT_EXCLUDE if exclude is None else tuple(exclude)
    if isinstance(exclude, str) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"exclude must be a list of module names or patterns, found {exclude!r}")
    every = [(node.path[0], m) for node in plan.nodes for group in node.matrices for m in group]
    linears = [m for name, m in every if name != EMBEDDING]
    embeddings = [m.module for name, m in every if name == EMBEDDING]  # drafters have none
    modules = (*HEADS, *(name.rpartition(".")[0] for name in files.names()))
    for pattern in patterns:
        if not any(matches(module, [pattern]) for module in modules):
            raise ConfigError(f"exclude: {pattern!r} names no module of this model")
    chosen = frozenset(
        m.module
        for m in linears
        if m.shape[-1] % BLOCK_SIZE == 0 and not matches(m.module, [*patterns, *ROUTERS, *DECAYS])
    )
    if not chosen:
        raise ConfigError("nothing is left to quantize; exclude less")
    for node in plan.nodes:
        for alike in zip(*node.matrices, strict=True):
            if len({m.module in chosen for m in alike}) > 1:
                some = next(m.module for m in alike if m.module not in chosen)
                raise UnsupportedError(
                    f"exclude: {some} is left alone but other experts of its layer are not; "
                    "exclude all of them or none"
                )
    heads = HEADS[:1] if plan.tied else ()
    left = {m.module: None for m in linears if m.module not in chosen}
    return chosen, tuple(sorted([*heads, *embeddings, *left]))


def _source_bytes(plan: Plan) -> int:
    return sum(node.nbytes for node in plan.nodes)


def _node_tensors(
    files: TensorFiles, node: PlannedNode, chosen: frozenset[str], form: WeightFormat
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """What is written for a node, a group of fused linears at a time, and bytes read for it."""
    for info in node.vectors:
        if info is not None:
            yield {info.name: files.read(info.name)}, info.nbytes
    for group in node.matrices:
        tensors: dict[str, np.ndarray] = {}
        partners = [m for m in group if m.module in chosen]
        for matrix in group:
            if matrix.module not in chosen:
                tensors[matrix.weight.name] = files.read(matrix.weight.name)
        tensors |= _quantized(files, partners, form)
        yield tensors, sum(m.weight.nbytes for m in group)


def _quantized(
    files: TensorFiles, partners: Sequence[StoredMatrix], form: WeightFormat
) -> dict[str, np.ndarray]:
    """Tensors of linears that share one global scale."""
    if not partners:
        return {}
    values = [files.read(matrix.weight.name) for matrix in partners]
    convention: Convention = "modelopt" if form is MODELOPT else "compressed-tensors"
    for matrix, value in zip(partners, values, strict=True):
        if not np.isfinite(value).all():
            raise FormatError(
                f"{matrix.weight.file}: {matrix.weight.name} holds NaN or infinity, which cannot "
                "be quantized; the file is damaged"
            )
    largest = max((np.abs(value).max() for value in values), key=float)
    scale = global_scale_of(jnp.asarray(largest), convention)
    tensors: dict[str, np.ndarray] = {}
    for matrix, value in zip(partners, values, strict=True):
        rows = max(1, CHUNK_ELEMENTS // value.shape[1])
        try:
            parts = [
                quantize(
                    jnp.asarray(value[i : i + rows]), convention=convention, global_scale=scale
                )
                for i in range(0, value.shape[0], rows)
            ]
        except FormatError as error:
            raise FormatError(f"{matrix.weight.file}: {matrix.weight.name}: {error}") from error
        shape = (1,) if form.global_is_divisor else ()
        name = matrix.module
        tensors |= {
            f"{name}.{form.codes}": np.concatenate([np.asarray(p.packed) for p in parts]),
            f"{name}.{form.block_scale}": np.concatenate([np.asarray(p.scale) for p in parts]),
            f"{name}.{form.global_scale}": np.asarray(scale, np.float32).reshape(shape),
        }
    return tensors


def _write_configs(
    folder: Path, raw: Mapping[str, Any], form: WeightFormat, ignore: tuple[str, ...]
) -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": BLOCK_SIZE, "dynamic": False}
    producer = {"name": "fp4jax", "version": fp4jax.__version__}
    if form is MODELOPT:
        algorithm = "W4A16_NVFP4"
        stated: dict[str, Any] = {
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": list(ignore),
            "quant_algo": algorithm,
            "producer": producer,
            "quant_method": MODELOPT.name,
        }
        own = {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(ignore),
        }
        write_json(folder / QUANT_CONFIG_NAME, {"producer": producer, "quantization": own})
    else:
        weights |= {"strategy": "tensor_group", "symmetric": True}
        weights |= {"scale_dtype": "torch.float8_e4m3fn"}
        group = {
            "format": PACKED_FORMAT,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
        }
        stated = {
            "config_groups": {"group_0": group},
            "format": PACKED_FORMAT,
            # This tool's lists name linears only.
            "ignore": [name for name in ignore if not name.endswith("embed_tokens")],
            "kv_cache_scheme": None,
            "quant_method": COMPRESSED_TENSORS.name,
            "quantization_status": "compressed",
        }
    write_json(folder / CONFIG_NAME, {**raw, "quantization_config": stated})


def _copy_rest(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        written = (folder / file.name).exists()
        if file.is_file() and not written and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
