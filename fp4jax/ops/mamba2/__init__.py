"""State space duality (Mamba2): a linear recurrence whose state decays by what each token says."""

from fp4jax.ops.mamba2.api import mamba2

__all__ = ["mamba2"]
