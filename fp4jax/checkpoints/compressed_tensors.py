"""NVFP4 as ``compressed-tensors`` writes it (llm-compressor's ``nvfp4-pack-quantized``).

``weight_packed`` u8 [N, K/2], ``weight_scale`` f8e4m3 [N, K/16] and ``weight_global_scale`` f32
(1,), the divisor; ``input_global_scale`` belongs to W4A4 serving.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp4jax.checkpoints.formats import WeightFormat
from fp4jax.checkpoints.hf_config import mapping, sequence
from fp4jax.errors import ConfigError

COMPRESSED_TENSORS = WeightFormat(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    global_is_divisor=True,
)
PACKED_FORMAT = "nvfp4-pack-quantized"


def parse_compressed_tensors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``QuantizationConfig`` from ``config.json``'s ``quantization_config``.

    Raises:
      ConfigError: another format, bit width or block size than NVFP4's.
    """
    where = "config.json: quantization_config"
    groups = mapping(config, "config_groups", where)
    targets: list[str] = []
    for name in groups:
        group = mapping(groups, name, f"{where}: config_groups")
        form = group.get("format") or config.get("format")
        if form != PACKED_FORMAT:
            raise ConfigError(
                f"{where}: {name}: format {form!r} is not supported; known: {PACKED_FORMAT}"
            )
        weights = mapping(group, "weights", f"{where}: {name}")
        bits, kind, size = (weights.get(key) for key in ("num_bits", "type", "group_size"))
        if (bits, kind, size) != (4, "float", 16):
            raise ConfigError(
                f"{where}: {name}: weights of {bits} {kind} bits in groups of {size} are not NVFP4 "
                "(4 float bits in groups of 16)"
            )
        targets += sequence(group, "targets", str, f"{where}: {name}")
    return {
        "method": COMPRESSED_TENSORS.name,
        "algorithms": (PACKED_FORMAT,),
        "ignore": sequence(config, "ignore", str, where),
        "targets": tuple(targets),
    }
