"""Timing a model where it runs: tokens a second, memory, and the floor that memory sets."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.errors import GenerationError
from fp4jax.generation import AcceptanceStats, batch_generate
from fp4jax.generation.drafts import as_draft
from fp4jax.model import Model
from fp4jax.progress import Progress
from fp4jax.quantized import is_quantized

COLUMNS = 4096
READS = 8


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """Result of :func:`benchmark`; rates are medians over the trials.

    Attributes:
      prompt_tokens: of each row.
      generation_tokens: likewise.
      batch_size: rows.
      trials: timed calls, after one that compiles.
      prompt_tps: prompt tokens a second, all rows together.
      generation_tps: generated tokens a second, likewise.
      peak_memory: GB (10^9 bytes); of the device where it keeps count, else of the process.
      step_bytes: bytes that a decode step has to read: weights, and the cache half-way.
      bandwidth: bytes a second that the device was seen to read in the same run, or None.
      drafted_tps: generated tokens a second with the drafter, None without one.
      acceptance: what the drafter came to in one call.
    """

    prompt_tokens: int
    generation_tokens: int
    batch_size: int
    trials: int
    prompt_tps: float
    generation_tps: float
    peak_memory: float
    step_bytes: int
    bandwidth: float | None
    drafted_tps: float | None = None
    acceptance: AcceptanceStats | None = None

    def derived(self) -> dict[str, float | None]:
        """What follows from the measures: shares and, with a drafter, gains."""
        found = {"floor_share": self.floor_share}
        if self.acceptance is not None and self.drafted_tps is not None:
            mean = self.acceptance.mean_accepted_length
            found["mean_accepted_length"] = mean
            found["steps_per_second"] = self.drafted_tps / mean / self.batch_size
            found["speedup"] = self.drafted_tps / self.generation_tps
        return found

    @property
    def floor_share(self) -> float | None:
        """Least time that reading ``step_bytes`` takes over the time a step took."""
        if self.bandwidth is None or not self.generation_tps:
            return None
        return self.step_bytes / self.bandwidth * self.generation_tps / self.batch_size


def benchmark(
    model: Model,
    *,
    prompt_tokens: int = 512,
    generation_tokens: int = 128,
    batch_size: int = 1,
    trials: int = 3,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    progress: Progress | None = None,
) -> BenchResult:
    """Times prefill and decode on random tokens; compilation is not counted.

    Args:
      model: from ``fp4jax.load``.
      prompt_tokens: tokens of each prompt.
      generation_tokens: tokens to generate for each, at least 2; end-of-sequence is ignored.
      batch_size: rows.
      trials: calls to take the median of.
      draft, num_draft_tokens: as in :func:`fp4jax.generate`; timed beside decoding without.
      progress: told about "bench", in calls.

    Raises:
      GenerationError: sizes out of range, or more tokens than the model's context.
      ConfigError: a draft that does not fit the model.
    """
    drafts = (None,) if draft is None else (None, as_draft(draft, model, num_draft_tokens))
    for name, value, least in (
        ("prompt_tokens", prompt_tokens, 1),
        ("generation_tokens", generation_tokens, 2),
        ("batch_size", batch_size, 1),
        ("trials", trials, 1),
    ):
        if value < least:
            raise GenerationError(f"{name}={value} must be at least {least}")
    if prompt_tokens + generation_tokens > model.max_context:
        raise GenerationError(
            f"prompt_tokens + generation_tokens = {prompt_tokens + generation_tokens} passes the "
            f"model's context of {model.max_context}"
        )
    rng = np.random.default_rng(0)
    shape = (batch_size, prompt_tokens)
    prompts = rng.integers(0, model.config.vocab_size, shape).tolist()
    calls, runs = [each for each in drafts for _ in range(trials + 1)], []
    for i, each in enumerate(calls):
        runs.append(
            batch_generate(
                model, None, prompts, max_tokens=generation_tokens, ignore_eos=True, draft=each
            ).stats
        )
        if progress is not None:
            progress("bench", i + 1, len(calls))
    timed, drafted = runs[1 : trials + 1], runs[trials + 2 :]
    return BenchResult(
        prompt_tokens=prompt_tokens,
        generation_tokens=generation_tokens,
        batch_size=batch_size,
        trials=trials,
        prompt_tps=statistics.median(run.prompt_tps for run in timed),
        generation_tps=statistics.median(run.generation_tps for run in timed),
        peak_memory=timed[-1].peak_memory,
        step_bytes=decode_step_bytes(
            model, batch_size=batch_size, context=prompt_tokens + generation_tokens // 2
        ),
        bandwidth=read_bandwidth(),
        drafted_tps=statistics.median(run.generation_tps for run in drafted) if drafted else None,
        acceptance=drafted[-1].acceptance if drafted else None,
    )


def decode_step_bytes(model: Model, *, batch_size: int, context: int) -> int:
    """Bytes that one decode step has to read, whatever computes it.

    All weights, but of an embedding that is not the head too only the rows looked up, and of
    stacked experts the share that ``batch_size`` tokens are expected to hit if routing is even;
    and the cache of ``context`` tokens a row.
    """
    config, total = model.config, 0.0
    leaves = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_quantized)
    for path, node in leaves:
        if "embed_tokens" in jax.tree_util.keystr(path) and not config.tie_word_embeddings:
            total += batch_size * node.nbytes / node.shape[-2]
            continue
        share = 1.0
        if len(node.shape) == 3:
            share = 1 - (1 - config.num_experts_per_tok / node.shape[0]) ** batch_size
        total += node.nbytes * share
    cache = jax.eval_shape(lambda: model.module.init_cache(batch_size, context, model.dtype))
    total += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    return round(total)


def read_bandwidth(*, nbytes: int | None = None, trials: int = 5) -> float | None:
    """Bytes a second that the default device reads, the best of a few simple kernels.

    Args:
      nbytes: size of the array that is read; default 1 GiB on an accelerator, 256 MiB on a CPU.
      trials: timed reads a kernel.

    Returns:
      None where the device has not the memory for it.
    """
    cpu = jax.default_backend() == "cpu"
    nbytes = nbytes or (1 << 28 if cpu else 1 << 30)
    rows = max(nbytes // (4 * COLUMNS), 1)
    kernels: tuple[Callable[[Any, Any], Any], ...] = (
        lambda a, v: jnp.dot(a, v, precision=jax.lax.Precision.HIGHEST),
        lambda a, v: jnp.sum(a, axis=1) + v[:1],
    )
    try:
        matrix = jax.block_until_ready(jnp.ones((rows, COLUMNS), jnp.float32))
        vector = jnp.ones(COLUMNS, jnp.float32)
        best = 0.0
        for kernel in kernels:
            compiled = jax.jit(kernel).lower(matrix, vector).compile()
            jax.block_until_ready(compiled(matrix, vector))
            for _ in range(trials):
                begun = time.perf_counter()
                # Several in a row, so that the host's part of a call is not counted.
                jax.block_until_ready([compiled(matrix, vector) for _ in range(READS)])
                best = max(best, READS * matrix.nbytes / (time.perf_counter() - begun))
    except jax.errors.JaxRuntimeError:
        return None
    return best
