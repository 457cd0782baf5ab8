"""What a checkpoint's configuration says about its quantization, whoever wrote it.

The tensors decide how a weight is read; the configuration is read to refuse algorithms that this
package does not know, and to warn where the two contradict each other.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
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

EMBEDDINGS = ("embed_tokens", "embeddings")
"""Last names of the token embedding in them."""

PARSERS = ((MODELOPT.name, parse_modelopt), (COMPRESSED_TENSORS.name, parse_compressed_tensors))


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """A checkpoint's own statement.

    Attributes:
      method: "modelopt", "compressed-tensors", or None where nothing is said to be quantized.
      algorithms: names of the algorithms in use.
      ignore: modules that are not quantized: names, wildcards, or ``re:`` expressions.
      targets: (module, algorithm) of those that are, modules likewise; empty where all linears
        are, by the one algorithm.
    """

    method: str | None = None
    algorithms: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    targets: tuple[tuple[str, str], ...] = ()

    def algorithms_of(self, modules: Iterable[str]) -> list[str | None]:
        """The algorithm that each module's weight is said to be quantized by; None for none."""
        if self.method is None:
            return [None for _ in modules]
        ignored = _Patterns([(pattern, "") for pattern in self.ignore])
        everything = [("*", name) for name in self.algorithms[:1]]
        chosen = _Patterns(self.targets or everything)
        return [chosen.find(m) if ignored.find(m) is None else None for m in modules]


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
    return _Patterns([(pattern, "") for pattern in patterns]).find(module) is not None


class _Patterns:
    """Patterns and a value for each. Plain names, possibly thousands, are looked up."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._names: dict[str, str] = {}
        self._others: list[tuple[str, str]] = []
        for pattern, value in pairs:
            if pattern.startswith("re:") or pattern == "Linear" or set(pattern) & set("*?["):
                self._others.append((pattern, value))
            else:
                self._names.setdefault(pattern.rstrip("."), value)
        self._others.sort(key=lambda pair: pair[0] == "Linear")  # a class gives way to a name

    def find(self, module: str) -> str | None:
        """The value of a pattern that names ``module`` or a parent; plain names come first."""
        spellings = _spellings(module)
        for name in spellings:
            while name:
                if name in self._names:
                    return self._names[name]
                name = name.rpartition(".")[0]
        return next((v for p, v in self._others if _fits(p, module, spellings)), None)


def _fits(pattern: str, module: str, spellings: tuple[str, ...]) -> bool:
    if pattern.startswith("re:"):
        expression = _expression(pattern)
        return any(expression.match(name) for name in spellings)
    if pattern == "Linear":  # a class name: every linear, the head included
        return not is_embedding(module)
    return any(fnmatch.fnmatchcase(name, pattern) for name in spellings)


def is_embedding(module: str) -> bool:
    """Whether ``module`` is a token embedding, which no class of linears means."""
    return module.endswith(EMBEDDINGS)


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
