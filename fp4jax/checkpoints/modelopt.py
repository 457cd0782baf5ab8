"""NVFP4 as ``nvidia-modelopt`` writes it.

``weight`` u8 [N, K/2], ``weight_scale`` f8e4m3 [N, K/16] and ``weight_scale_2`` f32, a multiplier;
``input_scale`` belongs to W4A4 serving. https://github.com/NVIDIA/TensorRT-Model-Optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4jax.checkpoints.formats import WeightFormat
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
    stated = config.get("quantization")
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{QUANT_CONFIG_NAME}: no 'quantization' object")
    return _parse(stated, stated.get("exclude_modules"), QUANT_CONFIG_NAME)


def parse_modelopt(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``QuantizationConfig`` from ``config.json``'s ``quantization_config``.

    Raises:
      ConfigError: unknown algorithm or block size.
    """
    ignore = config.get("ignore", config.get("exclude_modules"))
    return _parse(config, ignore, "config.json: quantization_config")


def _parse(stated: Mapping[str, Any], ignore: Any, where: str) -> dict[str, Any]:
    algorithm = stated.get("quant_algo")
    layers = stated.get("quantized_layers") or {}
    algorithms: list[Any] = [algorithm]
    if algorithm == "MIXED_PRECISION":
        algorithms = sorted({str(layer.get("quant_algo")) for layer in layers.values()})
    for name in algorithms:
        if name not in ALGORITHMS:
            known = ", ".join((*ALGORITHMS, "MIXED_PRECISION of these"))
            raise ConfigError(f"{where}: quant_algo {name!r} is not supported; known: {known}")
    group = stated.get("group_size")
    if group not in (None, 16):
        raise ConfigError(f"{where}: group_size {group} is not NVFP4's block size, 16")
    return {
        "method": MODELOPT.name,
        "algorithms": tuple(algorithms),
        "ignore": tuple(ignore or ()),
        "targets": tuple(layers),
    }
