"""The one exception family of the package.

Every error that bad input can cause derives from :class:`Fp4JaxError`. Messages name the file,
tensor or field at fault and say what to do about it.
"""

from __future__ import annotations


class Fp4JaxError(Exception):
    """Base class of every error this package raises on purpose."""


class CheckpointError(Fp4JaxError):
    """A checkpoint on disk is missing, damaged, incomplete or contradicts itself."""


class FormatError(Fp4JaxError, ValueError):
    """A tensor is not valid NVFP4 (shape, dtype, block scale or global scale)."""


class ConfigError(Fp4JaxError, ValueError):
    """A model configuration is unusable: unknown architecture, algorithm or field value."""


class UnsupportedError(Fp4JaxError, NotImplementedError):
    """An implementation was asked for that cannot serve these inputs; the message says why."""


class TokenizerError(Fp4JaxError):
    """No usable tokenizer or chat template, or text that it cannot take."""


class SamplingError(Fp4JaxError, ValueError):
    """Sampling values that are out of range or contradict each other."""


class GenerationError(Fp4JaxError, ValueError):
    """A generation request that cannot be served (empty prompt, prompt longer than the context)."""


class EngineMismatchError(Fp4JaxError):
    """Something that depends on one engine's weights was offered to another engine."""


class PromptCacheError(Fp4JaxError, ValueError):
    """A saved prompt cache is missing or damaged, or was made for a model of another layout."""


class EngineStateError(Fp4JaxError):
    """Engine state was found where it must not be, such as weights captured by a function."""


class CheckpointWarning(UserWarning):
    """A checkpoint's configuration contradicts its tensors; the tensors decide."""
