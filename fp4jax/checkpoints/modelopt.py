"""NVFP4 as ``nvidia-modelopt`` writes it.

``weight`` u8 [N, K/2], ``weight_scale`` f8e4m3 [N, K/16] and ``weight_scale_2`` f32, a multiplier;
``input_scale`` belongs to W4A4 serving. https://github.com/NVIDIA/TensorRT-Model-Optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4jax.checkpoints.formats import WeightFormat
from fp4jax.checkpoints.hf_config import mapping, sequence
from fp4jax.errors import ConfigError

MODELOPT = WeightFormat("modelopt", "weight", "weight_scale", "weight_scale_2")
QUANT_CONFIG_NAME = "hf_quant_config.json"

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
"""Algorithms whose weights are NVFP4 without anything folded into the activations."""


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
    algorithms = {algorithm: where}
    targets: tuple[str, ...] = ()
    if algorithm == "MIXED_PRECISION":
        algorithms, targets = _mixed(stated, where)
    for name, at in algorithms.items():
        if name not in ALGORITHMS:
            known = ", ".join((*ALGORITHMS, "MIXED_PRECISION of these"))
            raise ConfigError(f"{at}: quant_algo {name!r} is not supported; known: {known}")
    group = stated.get("group_size")
    if group not in (None, 16):
        raise ConfigError(f"{where}: group_size {group} is not NVFP4's block size, 16")
    return {
        "method": MODELOPT.name,
        "algorithms": tuple(algorithms),
        "ignore": sequence(stated, ignore, str, where),
        "targets": targets,
    }


def _mixed(stated: Mapping[str, Any], where: str) -> tuple[dict[Any, str], tuple[str, ...]]:
    """Algorithms of MIXED_PRECISION, each with a place that names it, and the modules they cover.

    ``hf_quant_config.json`` names an algorithm a module; ``config.json`` lists modules a group.
    """
    algorithms: dict[Any, str] = {}
    layers = mapping(stated, "quantized_layers", where)
    for module in layers:
        name = mapping(layers, module, f"{where}: quantized_layers").get("quant_algo")
        algorithms.setdefault(name, f"{where}: quantized_layers: {module}")
    if layers:
        return algorithms, tuple(layers)
    targets: list[str] = []
    groups = mapping(stated, "config_groups", where)
    for group in groups:
        at = f"{where}: {group}"
        fields = mapping(groups, group, f"{where}: config_groups")
        weights = mapping(fields, "weights", at)
        bits, kind, size = (weights.get(key) for key in ("num_bits", "type", "group_size"))
        name = "NVFP4" if (bits, kind, size) == (4, "float", 16) else f"{kind} {bits} bit"
        algorithms.setdefault("FP8" if (bits, kind) == (8, "float") else name, at)
        targets += sequence(fields, "targets", str, at)
    if not algorithms:
        raise ConfigError(
            f"{where}: MIXED_PRECISION with neither quantized_layers nor config_groups, so the "
            "algorithms are not known"
        )
    return algorithms, tuple(targets)
