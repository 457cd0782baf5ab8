"""The host side of one generation: shapes, compiled calls, and times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.errors import GenerationError
from fp4jax.generation.buckets import bucket, right_padded
from fp4jax.generation.cached_prompt import PromptCache
from fp4jax.generation.compiled import (
    TraceProbe,
    jit_decode,
    jit_init_cache,
    jit_latest,
    jit_place,
    jit_prefill,
    jit_start,
    jit_window,
)
from fp4jax.generation.requests import LanguageModel, Request
from fp4jax.generation.results import AcceptanceStats, GenerationStats, peak_memory_gb
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.state import Limits, LoopState, Output
from fp4jax.progress import Progress

PREFILL_CHUNK = 512
COMPILED_STAGES = 3  # prefill, first token, decode: those worth showing


@dataclasses.dataclass(frozen=True)
class Window:
    """Entries that each row has got since the window before.

    Attributes:
      output: entry 0 of row b is its token number ``begin[b]``.
      begin: i32 [B].
      accepted: counts of speculative steps so far; None in plain decoding.
    """

    output: Output
    begin: Any
    accepted: Any = None

    def new(self, row: int) -> int:
        """Entries of ``row`` that are new; the window has been fetched."""
        return int(self.output.count[row]) - int(self.begin[row])


class Session:
    """One batch on its way: :meth:`prefill`, then :meth:`advance` and :meth:`window` in turn.

    Belongs to one thread. Everything on the device goes when the session goes.

    Args:
      model: the engine.
      requests: one a row.
      prefill_chunk: prompt tokens fed at once, at least 1.
      progress: told about "compile" (in compiled functions) and "prefill" (in prompt tokens).
      overhang: cache slots a row past its last token.
      prompt_cache: holds what every prompt begins with.
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Progress | None = None,
        overhang: int = 0,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise GenerationError(f"prefill_chunk={prefill_chunk} must be at least 1")
        rows = [request.sampling for request in requests]
        lengths = [len(request.prompt) for request in requests]
        self._prefix = prompt_cache
        self._known = 0 if prompt_cache is None else len(prompt_cache.tokens)
        longest = max(lengths) - self._known
        self._model = model
        self._requests = tuple(requests)
        self._progress = progress
        self._features = SamplingFeatures.of(rows)
        self._chunk = min(prefill_chunk, bucket(longest, limit=model.max_context))
        padded = -(-longest // self._chunk) * self._chunk
        needed = max(n + row.max_tokens for n, row in zip(lengths, rows, strict=True)) + overhang
        needed, limit = max(needed, self._known + padded), model.max_context + overhang
        # Past the limit the rest may end anywhere: a bucket again, or each end would compile anew.
        beyond = self._known > 0 and needed > limit
        self._capacity = bucket(needed, limit=None if beyond else limit)
        self._longest = max(row.max_tokens for row in rows)
        self.size = bucket(self._longest)
        self._tokens = right_padded([r.prompt[self._known :] for r in requests], padded)
        self._lengths = np.asarray(lengths, np.int32)
        self._fed = self._lengths - self._known
        self._state: Any = None
        self._limit = 1  # tokens a row that were asked for so far
        self._shown: Any = np.zeros(len(rows), np.int32)
        self._compiled = 0
        self.compile_seconds = 0.0
        self._prompt_seconds = 0.0
        self._first_token_at = 0.0
        self._compile_at_first = 0.0

    def prefill(self) -> None:
        """Feeds the prompts and draws each row's first token; waits for it."""
        begun = time.perf_counter()
        model, rows = self._model, [request.sampling for request in self._requests]
        self._sampling = SamplingArrays.of(rows, self._features)
        self._limits = _limits(self._requests)
        hidden, cache = self.feed()
        # Only a repetition penalty reads the prompt; without it, its length is no shape here.
        prompt = self._tokens[:, :0]
        if self._features.repetition:
            width = bucket(int(self._lengths.max())) if self._known else self._tokens.shape[1]
            prompt = right_padded([request.prompt for request in self._requests], width)
        state = self._call(
            jit_start, model.module, model.params, hidden, prompt, self._lengths,
            self._sampling, self._limits, features=self._features, size=self.size,
        )  # fmt: skip
        self._state = self._with_cache(state, cache)
        jax.block_until_ready(state.last)
        self._first_token_at = time.perf_counter()
        self._compile_at_first = self.compile_seconds
        self._prompt_seconds = self._first_token_at - begun - self.compile_seconds

    def feed(self) -> tuple[Any, Any]:
        """Each prompt's last hidden state, [B, H], and the cache after all of them."""
        return self._feed(self._init_cache())

    def advance(self, tokens: int | None = None, stopped: np.ndarray | None = None) -> None:
        """Starts decoding; does not wait.

        Args:
          tokens: how many more a row; by default until every row has ended.
          stopped: bool [B], rows to end.
        """
        if stopped is None:
            stopped = np.zeros(len(self._requests), np.bool_)
        if self._limit < self._longest:
            # Where a pass gives a row more than it must, there is nothing left to do earlier.
            self._limit = self.size if tokens is None else self._limit + self._least(tokens)
            self._decode(tokens, stopped)

    def window(self, tokens: int = 1) -> Window:
        """What has come since the last window, still on the device, apart from the state.

        Args:
          tokens: what :meth:`advance` was last called with.
        """
        output, accepted = self._call(
            jit_window, self._output, self._counts, self._shown, shown=False,
            width=self._most(tokens),
        )  # fmt: skip
        begin, self._shown = self._shown, output.count
        return Window(output, begin, accepted)

    def everything(self) -> Window:
        """All entries, not copied: no :meth:`advance` may follow."""
        return Window(self._output, np.zeros_like(self._lengths), self._counts)

    def fetch(self, window: Window) -> Window:
        """``window`` as numpy arrays.

        Raises:
          GenerationError: a row's logits were not finite.
        """
        output, begin, accepted = jax.device_get((window.output, window.begin, window.accepted))
        host: Output = output
        if host.invalid.any():
            row = int(np.argmax(host.invalid))
            where = f" of row {row}" if len(self._requests) > 1 else ""
            raise GenerationError(
                f"the model's logits for generated token {int(host.count[row])}{where} are not "
                "finite (NaN or infinite); the checkpoint is damaged, or its activations overflow "
                "this dtype: try dtype=float32"
            )
        return Window(host, begin, accepted)

    def stats(self, generated: int, acceptance: AcceptanceStats | None = None) -> GenerationStats:
        """Rates as of now, with ``generated`` tokens so far in all rows together."""
        compiled = self.compile_seconds - self._compile_at_first
        seconds = time.perf_counter() - self._first_token_at - compiled
        later = generated - len(self._requests)
        prompt_tokens = int(self._lengths.sum())
        return GenerationStats(
            prompt_tokens=prompt_tokens,
            prompt_tps=int(self._fed.sum()) / max(self._prompt_seconds, 1e-9),
            generation_tokens=generated,
            generation_tps=later / max(seconds, 1e-9) if later > 0 else 0.0,
            peak_memory=peak_memory_gb(),
            compile_seconds=self.compile_seconds,
            acceptance=acceptance,
            cached_tokens=self._known * len(self._requests),
        )

    @property
    def _output(self) -> Output:
        return self._state.output

    @property
    def _counts(self) -> Any:
        return None

    def _least(self, tokens: int) -> int:
        """Tokens that a row which goes on is sure to get from advancing by ``tokens``."""
        return tokens

    def _most(self, tokens: int) -> int:
        """Most tokens that a row can get from it."""
        return tokens

    @property
    def _sizes(self) -> dict[str, Any]:
        """Of a cache for this batch."""
        return {
            "batch": len(self._requests),
            "capacity": self._capacity,
            "dtype": jnp.dtype(self._model.dtype),
        }

    def _init_cache(self) -> Any:
        module, prefix = self._model.module, self._prefix
        if prefix is None:
            return self._call(jit_init_cache, module, shown=False, **self._sizes)
        return self._call(
            jit_place, module, prefix.cache, shown=False, axes=prefix.axes, **self._sizes
        )

    def _with_cache(self, state: LoopState, cache: Any) -> Any:
        return dataclasses.replace(state, cache=cache)

    def _prefill(self, tokens: np.ndarray, lengths: np.ndarray, cache: Any) -> tuple[Any, Any]:
        model = self._model
        return self._call(jit_prefill, model.module, model.params, tokens, lengths, cache)

    def _decode(self, tokens: int | None, stopped: np.ndarray) -> None:
        del tokens
        model, state, self._state = self._model, self._state, None
        self._state = self._call(
            jit_decode, model.module, model.params, state, self._sampling, self._limits,
            np.int32(self._limit), stopped, features=self._features,
        )  # fmt: skip

    def _feed(self, cache: Any) -> tuple[Any, Any]:
        """The prompt in chunks; returns each row's last hidden state and the cache."""
        width, hidden = self._tokens.shape[1], None
        if self._prefix is not None:
            last = self._prefix.hidden
            hidden = jnp.broadcast_to(last, (len(self._requests), last.shape[1]))
        for begin in range(0, width, self._chunk):
            lengths = np.clip(self._fed - begin, 0, self._chunk).astype(np.int32)
            piece = self._tokens[:, begin : begin + self._chunk]
            last, cache = self._prefill(piece, lengths, cache)
            hidden = last if hidden is None else jit_latest(lengths, last, hidden)
            if self._progress is not None:
                jax.block_until_ready(hidden)
                done = int(np.minimum(self._fed, begin + self._chunk).sum())
                self._progress("prefill", done, int(self._fed.sum()))
        return hidden, cache

    def _call(
        self, function: Callable[..., Any], *args: Any, shown: bool = True, **static: Any
    ) -> Any:
        """Calls a jitted function; where it had to be compiled, waits, so that times add up.

        ``shown``: compiling it is one of the stages that the progress callback hears of.
        """
        probe = TraceProbe(self._report_compile if shown else lambda: None)
        begun = time.perf_counter()
        try:
            result = function(*args, probe=probe, **static)
        finally:
            probe.release()
        if probe.traced:
            self.compile_seconds += time.perf_counter() - begun
            if shown:
                self._compiled += 1
                self._report_compile()
            jax.block_until_ready(result)
        return result

    def _report_compile(self) -> None:
        if self._progress is not None:
            done = min(self._compiled, COMPILED_STAGES)
            self._progress("compile", done, COMPILED_STAGES)


def _limits(requests: Sequence[Request]) -> Limits:
    """Stop ids, padded to a bucket so that another set of them compiles nothing."""
    slots = bucket(max(len(request.stop_ids) for request in requests))
    stop_ids = np.full((len(requests), slots), -1, np.int32)
    for b, request in enumerate(requests):
        stop_ids[b, : len(request.stop_ids)] = request.stop_ids
    budgets = [request.sampling.max_tokens for request in requests]
    return Limits(jnp.asarray(stop_ids), jnp.asarray(np.asarray(budgets, np.int32)))
