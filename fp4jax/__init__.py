"""NVFP4 language-model inference for JAX."""

__version__ = "0.1.0"
