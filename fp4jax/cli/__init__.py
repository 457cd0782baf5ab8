"""The ``fp4jax`` command: ``generate``, ``chat``, ``cache-prompt``, ``quantize``, ``inspect``,
``bench``, ``perplexity``. One file a command; flags are spelled as mlx-lm's are.
"""

from fp4jax.cli.app import main

__all__ = ["main"]
