"""What generation hands back."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

TokenLogprob = tuple[int, float]
"""A token id and the natural log of its probability."""


@dataclasses.dataclass(frozen=True)
class GenerationStep:
    """One generated token of a stream. Field names are mlx-lm's.

    Attributes:
      text: what it adds to the text; may be empty while characters or stop strings are unfinished.
      token: its id.
      logprob: natural log of the model's own probability (before bias, penalties, temperature).
      top_logprobs: the likeliest alternatives, best first, as many as ``logprobs`` asked for.
      prompt_tokens: tokens of the prompt.
      prompt_tps: those that were not cached, a second, compilation not counted.
      generation_tokens: tokens so far, this one included.
      generation_tps: tokens a second after the first one (0 until then), likewise.
      peak_memory: in GB (10^9 bytes); see :func:`peak_memory_gb`.
      finish_reason: None, or "stop" or "length" on the last step.
      from_draft: whether a drafter proposed it.
      acceptance: how the drafter fared so far; None where there is none.
      cached_tokens: tokens of the prompt that came from a prompt cache.
    """

    text: str
    token: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None = None
    from_draft: bool = False
    acceptance: AcceptanceStats | None = None
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class AcceptanceStats:
    """What a drafter came to, all rows together.

    Attributes:
      steps: verification passes, counted once for each row that had not ended.
      histogram: entry i counts the steps that gave i + 1 tokens: i accepted proposals and the
        target's own token, or less where the row ended; as many entries as a block has tokens.
    """

    steps: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, counts: np.ndarray) -> AcceptanceStats:
        """From the counts of each row, [batch, block]."""
        histogram = tuple(int(n) for n in counts.sum(axis=0))
        return cls(sum(histogram), histogram)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a step, the target's own included; 0 before the first step."""
        tokens = sum((i + 1) * n for i, n in enumerate(self.histogram))
        return tokens / self.steps if self.steps else 0.0


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """Counts and rates of one call, all rows together.

    Attributes:
      prompt_tokens: tokens of all prompts.
      prompt_tps: those that were not cached, a second up to the first generated token, without
        compilation.
      generation_tokens: generated tokens.
      generation_tps: those after each row's first, a second, without compilation.
      peak_memory: in GB (10^9 bytes).
      compile_seconds: spent tracing and compiling; 0 once the shapes are known.
      acceptance: None where nothing was drafted.
      cached_tokens: tokens of the prompts that came from a prompt cache.
    """

    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    compile_seconds: float
    acceptance: AcceptanceStats | None = None
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """Results of several prompts, in their order.

    Attributes:
      texts: without stop strings and end-of-sequence tokens; empty where there is no tokenizer.
      tokens: ids, the one that ended the row included.
      finish_reasons: "stop" or "length".
      logprobs: of each token, as in :class:`GenerationStep`.
      top_logprobs: likewise.
      from_draft: whether a drafter proposed the token.
      stats: of the whole call.
    """

    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...]
    top_logprobs: tuple[tuple[tuple[TokenLogprob, ...], ...], ...]
    from_draft: tuple[tuple[bool, ...], ...]
    stats: GenerationStats


@dataclasses.dataclass(frozen=True)
class TokenResult:
    """What one prompt of token ids gave; meanings as in :class:`BatchResult`."""

    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    from_draft: tuple[bool, ...]
    stats: GenerationStats


def peak_memory_gb() -> float:
    """Most memory in use so far, in GB (10^9 bytes).

    The largest device peak where the backend keeps count (GPUs); elsewhere the process's peak
    resident size; 0 where neither is known.
    """
    peaks = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(stats["peak_bytes_in_use"])
    if peaks:
        return max(peaks) / 1e9
    try:
        import resource
        import sys
    except ImportError:  # not a POSIX system
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
