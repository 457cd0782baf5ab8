"""NVFP4 and FP8 as ``nvidia-modelopt`` writes them.

NVFP4: ``weight`` u8 [N, K/2], ``weight_scale`` f8e4m3 [N, K/16] and ``weight_scale_2`` f32, a
multiplier. FP8: ``weight`` f8e4m3 [N, K] and ``weight_scale`` f32, one or one a row, a multiplier.
``input_scale`` belongs to quantized activations. https://github.com/NVIDIA/TensorRT-Model-Optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4jax.checkpoints.formats import WeightFormat
from fp4jax.checkpoints.hf_config import mapping, sequence
from fp4jax.errors import ConfigError

MODELOPT = WeightFormat("modelopt", "weight", "weight_scale", "weight_scale_2")
QUANT_CONFIG_NAME = "hf_quant_config.json"

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Algorithms whose weights are NVFP4 or FP8 without anything folded into the activations."""


def parse_modelopt_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``QuantizationConfig`` from ``hf_quant_config.json``.

    Raises:
      ConfigError: unknown algorithm or block size.
    """
    if not isinstance(config.get("quantization"), Mapping):
        raise ConfigError(f"{QUANT_CONFIG_NAME}: no 'quantization' object")
    return _parse(config["quantization"], "exclude_modules", QUANT_CONFIG_NAME)


def parse_modelopt(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``QuantizationConfig`` from ``config.json``'s ``quantization_config``.

    Raises:
      ConfigError: unknown algorithm or block size.
    """
    ignore = "ignore" if "ignore" in config else "exclude_modules"
    return _parse(config, ignore, "config.json: quantization_config")


def _parse(stated: Mapping[str, Any], ignore: str, where: str) -> dict[str, Any]:
    algorithm = stated.get("quant_algo")
    mixed = algorithm == "MIXED_PRECISION"
    layers = _mixed(stated, where) if mixed else [(algorithm, where, "")]
    for name, at, _ in layers:
        if name not in ALGORITHMS:
            known = ", ".join((*ALGORITHMS, "MIXED_PRECISION of these"))
            raise ConfigError(f"{at}: quant_algo {name!r} is not supported; known: {known}")
    group = stated.get("group_size")
    if group not in (None, 16):
        raise ConfigError(f"{where}: group_size {group} is not NVFP4's block size, 16")
    return {
        "method": MODELOPT.name,
        "algorithms": tuple(dict.fromkeys(name for name, _, _ in layers)),
        "ignore": sequence(stated, ignore, str, where),
        "targets": tuple((module, name) for name, _, module in layers) if mixed else (),
    }


def _mixed(stated: Mapping[str, Any], where: str) -> list[tuple[Any, str, str]]:
    """(algorithm, place that names it, module) of each layer of MIXED_PRECISION.

    ``hf_quant_config.json`` names an algorithm a module; ``config.json`` lists modules a group.
    """
    layers = mapping(stated, "quantized_layers", where)
    listed = f"{where}: quantized_layers"
    named = [(mapping(layers, m, listed).get("quant_algo"), m) for m in layers]
    if named:
        return [(name, f"{listed}: {module}", module) for name, module in named]
    found: list[tuple[Any, str, str]] = []
    groups = mapping(stated, "config_groups", where)
    for group in groups:
        at = f"{where}: {group}"
        fields = mapping(groups, group, f"{where}: config_groups")
        weights = mapping(fields, "weights", at)
        bits, kind, size = (weights.get(key) for key in ("num_bits", "type", "group_size"))
        name = "NVFP4" if (bits, kind, size) == (4, "float", 16) else f"{kind} {bits} bit"
        name = "FP8" if (bits, kind) == (8, "float") else name
        found += [(name, at, module) for module in sequence(fields, "targets", str, at)]
    if not found:
        raise ConfigError(
            f"{where}: MIXED_PRECISION with neither quantized_layers nor config_groups, so the "
            "algorithms are not known"
        )
    return found
