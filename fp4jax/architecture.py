"""What a file in ``models/`` declares about its architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fp4jax.checkpoints.keys import Key, Skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
      name: as the ``architectures`` field of a ``config.json`` spells it.
      config: makes the frozen config from ``config.json``'s contents.
      model: Flax module class, called as ``model(config=…, dtype=…)``.
      keys: the checkpoint keys of a config.
      skip: tensors left out on purpose, besides those that every architecture leaves out.
      other_names: names of checkpoints that hold the same text model.
      drafter: whether it only proposes tokens, by another model's embedding and head.
    """

    name: str
    config: Callable[[Mapping[str, Any]], Any]
    model: Callable[..., Any]
    keys: Callable[[Any], tuple[Key, ...]]
    skip: tuple[Skip, ...] = ()
    other_names: tuple[str, ...] = ()
    drafter: bool = False
