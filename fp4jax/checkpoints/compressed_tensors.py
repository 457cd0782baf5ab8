"""NVFP4 and FP8 as ``compressed-tensors`` writes them (llm-compressor).

``nvfp4-pack-quantized``: ``weight_packed`` u8 [N, K/2], ``weight_scale`` f8e4m3 [N, K/16] and
``weight_global_scale`` f32 (1,), the divisor. ``float-quantized``: ``weight`` f8e4m3 [N, K] and
``weight_scale``, one or one a row. ``input_global_scale`` belongs to quantized activations.
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
FP8_FORMAT = "float-quantized"


def parse_compressed_tensors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ``QuantizationConfig`` from ``config.json``'s ``quantization_config``.

    Raises:
      ConfigError: a format other than NVFP4's and FP8's, or one that its weights do not fit.
    """
    where = "config.json: quantization_config"
    groups = mapping(config, "config_groups", where)
    targets: list[tuple[str, str]] = []
    for name in groups:
        group = mapping(groups, name, f"{where}: config_groups")
        form = group.get("format") or config.get("format")
        if form not in (PACKED_FORMAT, FP8_FORMAT):
            raise ConfigError(
                f"{where}: {name}: format {form!r} is not supported; known: {PACKED_FORMAT}, "
                f"{FP8_FORMAT}"
            )
        weights = mapping(group, "weights", f"{where}: {name}")
        bits, kind, size = (weights.get(key) for key in ("num_bits", "type", "group_size"))
        if form == PACKED_FORMAT and (bits, kind, size) != (4, "float", 16):
            raise ConfigError(
                f"{where}: {name}: weights of {bits} {kind} bits in groups of {size} are not NVFP4 "
                "(4 float bits in groups of 16)"
            )
        strategy = weights.get("strategy")
        if form == FP8_FORMAT and (bits, kind, strategy in ("tensor", "channel")) != (
            8,
            "float",
            True,
        ):
            raise ConfigError(
                f"{where}: {name}: weights of {bits} {kind} bits with a scale a {strategy} are not "
                "FP8 with a scale a tensor or a channel"
            )
        targets += [(name, form) for name in sequence(group, "targets", str, f"{where}: {name}")]
    return {
        "method": COMPRESSED_TENSORS.name,
        "algorithms": tuple(dict.fromkeys(form for _, form in targets)),
        "ignore": sequence(config, "ignore", str, where),
        "targets": tuple(targets),
    }
