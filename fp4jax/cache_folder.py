"""Where files that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FP4JAX_CACHE"


def cache_folder() -> Path:
    """``$FP4JAX_CACHE``, else ``$XDG_CACHE_HOME/fp4jax``, else ``~/.cache/fp4jax``."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "fp4jax"
