"""What a checkpoint's configuration says about its quantization, whoever wrote it.

The tensors decide how a weight is read; the configuration is read to refuse algorithms that this
package does not know, and to warn where the two contradict each other.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4jax.checkpoints.compressed_tensors import COMPRESSED_TENSORS, parse_compressed_tensors
from fp4jax.checkpoints.hf_config import mapping, read_json
from fp4jax.checkpoints.modelopt import (
    MODELOPT,
    QUANT_CONFIG_NAME,
    parse_modelopt,
    parse_modelopt_file,
)
from fp4jax.errors import ConfigError

TRUNKS = ("model.language_model.", "language_model.model.", "model.", "backbone.", "")
"""Prefixes that the same decoder's modules have in different checkpoints and configs."""

HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
"""Names that the output head has in them."""

PARSERS = ((MODELOPT.name, parse_modelopt), (COMPRESSED_TENSORS.name, parse_compressed_tensors))


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's own statement.

    Attributes:
      method: "modelopt", "compressed-tensors", or None where nothing is said to be quantized.
      algorithms: names of the algorithms in use.
      ignore: modules that are not quantized: names, wildcards, or ``re:`` expressions.
      targets: modules that are, likewise; empty where all linears are.
    """

    method: str | None = None
    algorithms: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def expects(self, module: str) -> bool:
        """Whether the statement has ``module``'s weight quantized."""
        if self.method is None or matches(module, self.ignore):
            return False
        return not self.targets or matches(module, self.targets)


def read_quantization(root: Path, hf: Mapping[str, Any]) -> QuantizationConfig:
    """The statement in ``hf_quant_config.json`` or, failing that, in ``config.json``.

    Args:
      root: the checkpoint folder.
      hf: contents of its ``config.json``.

    Raises:
      ConfigError: an unknown method or algorithm, or another block size than NVFP4's 16.
    """
    own = read_json(root / QUANT_CONFIG_NAME)
    if own:
        return QuantizationConfig(**parse_modelopt_file(own))
    stated = mapping(hf, "quantization_config") or mapping(hf, "compression_config")
    if not stated:
        return QuantizationConfig()
    method = stated.get("quant_method", MODELOPT.name if "quant_algo" in stated else None)
    for name, parse in PARSERS:
        if method == name:
            return QuantizationConfig(**parse(stated))
    known = ", ".join(name for name, _ in PARSERS)
    raise ConfigError(f"config.json: quant_method {method!r} is not supported; known: {known}")


def matches(module: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern names ``module`` or one of its parents.

    A pattern is a name, a wildcard, or ``re:`` and a regular expression; it may spell the
    decoder's prefix in any of the usual ways.
    """
    spellings = _spellings(module)
    for pattern in patterns:
        if pattern.startswith("re:"):
            expression = _expression(pattern)
            if any(expression.match(name) for name in spellings):
                return True
        elif pattern == "Linear":  # a class name: every linear, the head included
            if not module.endswith("embed_tokens"):
                return True
        elif any(
            fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern.rstrip(".") + ".")
            for name in spellings
        ):
            return True
    return False


def _spellings(module: str) -> tuple[str, ...]:
    if module in HEADS:
        return HEADS
    for trunk in TRUNKS:
        if trunk and module.startswith(trunk):
            return tuple(other + module[len(trunk) :] for other in TRUNKS)
    return (module,)


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise ConfigError(f"quantization pattern {pattern!r} is not valid: {error}") from None
