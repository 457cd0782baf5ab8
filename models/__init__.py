"""The architectures that can be loaded: one file each, and one line here."""

from __future__ import annotations

from fp4jax.architecture import Architecture
from fp4jax.errors import ConfigError
from fp4jax.models import llama, nemotron_h, qwen3, qwen3_5, qwen3_5_moe, qwen3_dflash, qwen3_moe

ARCHITECTURES: tuple[Architecture, ...] = (
    llama.ARCHITECTURE,
    qwen3.ARCHITECTURE,
    qwen3_moe.ARCHITECTURE,
    qwen3_5.ARCHITECTURE,
    qwen3_5_moe.ARCHITECTURE,
    nemotron_h.ARCHITECTURE,
    qwen3_dflash.ARCHITECTURE,
    qwen3_dflash.SECOND_GENERATION,
)
"""Every known architecture."""


def find_architecture(names: list[str]) -> Architecture:
    """The architecture that a ``config.json`` names.

    Args:
      names: its ``architectures`` field.

    Raises:
      ConfigError: none of them is known; the known ones are listed.
    """
    for architecture in ARCHITECTURES:
        if not {architecture.name, *architecture.other_names}.isdisjoint(names):
            return architecture
    known = ", ".join(name for a in ARCHITECTURES for name in (a.name, *a.other_names))
    raise ConfigError(
        f"architecture {', '.join(map(repr, names)) or 'unnamed'} is not supported; known: {known}"
    )
