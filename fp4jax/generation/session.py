"""The host side of one generation: shapes, compiled calls, and times."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.errors import GenerationError
from fp4jax.generation import loop
from fp4jax.generation.buckets import bucket
from fp4jax.generation.requests import LanguageModel, Request
from fp4jax.generation.results import GenerationStats, peak_memory_gb
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures
from fp4jax.generation.state import Limits, LoopState, Output
from fp4jax.progress import Progress

PREFILL_CHUNK = 512
COMPILED_STAGES = 3  # prefill, first token, decode: those worth showing


class TraceProbe:
    """A static argument that is told when the function it is passed to gets traced.

    All probes are equal, so a new one reuses what an earlier one compiled.
    """

    def __init__(self, on_trace: Callable[[], None]) -> None:
        self._on_trace: Callable[[], None] | None = on_trace
        self.traced = False

    def note(self) -> None:
        """Called by the traced function's Python body."""
        self.traced = True
        if self._on_trace is not None:
            self._on_trace()

    def release(self) -> None:
        """Drops the callback: the compilation cache keeps the probe itself."""
        self._on_trace = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceProbe)

    def __hash__(self) -> int:
        return 1


def _init_cache(module, *, batch: int, capacity: int, dtype, probe: TraceProbe):
    probe.note()
    return module.init_cache(batch, capacity, dtype)


def _prefill(module, params, tokens, lengths, cache, *, probe: TraceProbe):
    probe.note()
    return loop.prefill_chunk(module, params, tokens, lengths, cache)


def _start(
    module, params, hidden, prompt, lengths, sampling, limits, *, features, size, probe: TraceProbe
):
    probe.note()
    return loop.start(
        module, params, hidden, None, prompt, lengths, sampling, limits,
        features=features, size=size,
    )  # fmt: skip


def _decode(
    module, params, state, sampling, limits, limit, stopped, *, features, probe: TraceProbe
):
    probe.note()
    return loop.run_loop(module, params, state, sampling, limits, limit, stopped, features=features)


def _window(output: Output, begin, *, count: int, probe: TraceProbe) -> Output:
    """A copy of ``count`` entries, so that the state itself can be donated to the next step."""
    probe.note()

    def cut(buffer):
        return lax.dynamic_slice_in_dim(buffer, begin, count, axis=1)

    return Output(
        tokens=cut(output.tokens),
        logprobs=cut(output.logprobs),
        top_tokens=cut(output.top_tokens),
        top_logprobs=cut(output.top_logprobs),
        count=jnp.copy(output.count),
        finished=jnp.copy(output.finished),
        invalid=jnp.copy(output.invalid),
        from_draft=cut(output.from_draft),
    )


_jit_init_cache = jax.jit(
    _init_cache, static_argnames=("module", "batch", "capacity", "dtype", "probe")
)
_jit_prefill = jax.jit(_prefill, static_argnames=("module", "probe"), donate_argnames="cache")
_jit_start = jax.jit(_start, static_argnames=("module", "features", "size", "probe"))
_jit_decode = jax.jit(
    _decode, static_argnames=("module", "features", "probe"), donate_argnames="state"
)
_jit_latest = jax.jit(loop.latest)
_jit_window = jax.jit(_window, static_argnames=("count", "probe"))


class Session:
    """One batch on its way: :meth:`prefill`, then :meth:`advance` and :meth:`window`.

    Belongs to one thread. Everything on the device goes when the session goes.

    Args:
      model: the engine.
      requests: one a row.
      prefill_chunk: prompt tokens fed at once, at least 1.
      progress: told about "compile" (in compiled functions) and "prefill" (in prompt tokens).
    """

    def __init__(
        self,
        model: LanguageModel,
        requests: Sequence[Request],
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Progress | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise GenerationError(f"prefill_chunk={prefill_chunk} must be at least 1")
        rows = [request.sampling for request in requests]
        lengths = [len(request.prompt) for request in requests]
        longest = max(lengths)
        self._model = model
        self._requests = tuple(requests)
        self._progress = progress
        self._features = SamplingFeatures.of(rows)
        self._chunk = min(prefill_chunk, bucket(longest, limit=model.max_context))
        padded = -(-longest // self._chunk) * self._chunk
        needed = max(n + row.max_tokens for n, row in zip(lengths, rows, strict=True))
        self._capacity = bucket(max(needed, padded), limit=model.max_context)
        self.size = bucket(max(row.max_tokens for row in rows))
        self._tokens = np.zeros((len(rows), padded), np.int32)
        for b, request in enumerate(requests):
            self._tokens[b, : lengths[b]] = request.prompt
        self._lengths = np.asarray(lengths, np.int32)
        self._state: LoopState | None = None
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
        cache = self._call(
            _jit_init_cache, model.module, shown=False,
            batch=len(rows), capacity=self._capacity, dtype=jnp.dtype(model.dtype),
        )  # fmt: skip
        hidden, cache = self._feed(cache)
        # Only a repetition penalty reads the prompt; without it, its length is no shape here.
        prompt = self._tokens if self._features.repetition else self._tokens[:, :0]
        state = self._call(
            _jit_start, model.module, model.params, hidden, prompt, self._lengths,
            self._sampling, self._limits, features=self._features, size=self.size,
        )  # fmt: skip
        self._state = dataclasses.replace(state, cache=cache)
        jax.block_until_ready(state.last)
        self._first_token_at = time.perf_counter()
        self._compile_at_first = self.compile_seconds
        self._prompt_seconds = self._first_token_at - begun - self.compile_seconds

    def advance(self, limit: int, stopped: np.ndarray | None = None) -> None:
        """Starts decoding up to ``limit`` tokens a row; does not wait.

        Args:
          limit: tokens a row in all.
          stopped: bool [B], rows to end.
        """
        model = self._model
        if stopped is None:
            stopped = np.zeros(len(self._requests), np.bool_)
        state, self._state = self._state, None
        self._state = self._call(
            _jit_decode, model.module, model.params, state, self._sampling, self._limits,
            np.int32(limit), stopped, features=self._features,
        )  # fmt: skip

    def window(self, begin: int, count: int) -> Output:
        """Entries ``begin`` to ``begin + count``, still on the device, apart from the state."""
        assert self._state is not None, "prefill comes first"
        output: Output = self._call(
            _jit_window, self._state.output, np.int32(begin), shown=False, count=count
        )
        return output

    def fetch(self, output: Output | None = None) -> Output:
        """``output`` (default: everything so far) as numpy arrays.

        Raises:
          GenerationError: a row's logits were not finite.
        """
        if output is None:
            assert self._state is not None, "prefill comes first"
            output = self._state.output
        host: Output = jax.device_get(output)
        if host.invalid.any():
            row = int(np.argmax(host.invalid))
            where = f" of row {row}" if len(self._requests) > 1 else ""
            raise GenerationError(
                f"the model's logits for generated token {int(host.count[row])}{where} are not "
                "finite (NaN or infinite); the checkpoint is damaged, or its activations overflow "
                "this dtype: try dtype=float32"
            )
        return host

    def stats(self, generated: int) -> GenerationStats:
        """Rates as of now, with ``generated`` tokens so far in all rows together."""
        compiled = self.compile_seconds - self._compile_at_first
        seconds = time.perf_counter() - self._first_token_at - compiled
        later = generated - len(self._requests)
        prompt_tokens = int(self._lengths.sum())
        return GenerationStats(
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tokens / max(self._prompt_seconds, 1e-9),
            generation_tokens=generated,
            generation_tps=later / max(seconds, 1e-9) if later > 0 else 0.0,
            peak_memory=peak_memory_gb(),
            compile_seconds=self.compile_seconds,
        )

    def _feed(self, cache: Any) -> tuple[Any, Any]:
        """The prompt in chunks; returns each row's last hidden state and the cache."""
        model, width, hidden = self._model, self._tokens.shape[1], None
        for begin in range(0, width, self._chunk):
            lengths = np.clip(self._lengths - begin, 0, self._chunk).astype(np.int32)
            piece = self._tokens[:, begin : begin + self._chunk]
            last, cache = self._call(
                _jit_prefill, model.module, model.params, piece, lengths, cache
            )
            hidden = last if hidden is None else _jit_latest(lengths, last, hidden)
            if self._progress is not None:
                jax.block_until_ready(hidden)
                done = int(np.minimum(self._lengths, begin + self._chunk).sum())
                self._progress("prefill", done, int(self._lengths.sum()))
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
