"""The compiled functions of a generation, each with a static argument that tells of its tracing."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fp4jax.generation import loop, speculation
from fp4jax.generation.cached_prompt import fill_rows
from fp4jax.generation.state import Output


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


def _place(maker, saved, *, axes, batch: int, capacity: int, dtype, probe: TraceProbe):
    probe.note()
    return fill_rows(saved, axes, maker.init_cache(batch, capacity, dtype))


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


def _window(output: Output, counts, begin, *, width: int, probe: TraceProbe):
    """Copies of ``width`` entries and of ``counts``: the state is donated to the next step."""
    probe.note()
    # Clipped at the end: what is past a row's count means nothing anyway.
    slots = begin[:, None] + jnp.arange(width, dtype=jnp.int32)
    slots = jnp.minimum(slots, output.tokens.shape[1] - 1)

    def cut(buffer):
        index = slots.reshape(*slots.shape, *(1,) * (buffer.ndim - 2))
        return jnp.take_along_axis(buffer, index, axis=1)

    window = Output(
        tokens=cut(output.tokens),
        logprobs=cut(output.logprobs),
        top_tokens=cut(output.top_tokens),
        top_logprobs=cut(output.top_logprobs),
        count=jnp.copy(output.count),
        finished=jnp.copy(output.finished),
        invalid=jnp.copy(output.invalid),
        from_draft=cut(output.from_draft),
    )
    return window, jax.tree.map(jnp.copy, counts)


def _init_draft_cache(drafter, *, batch: int, capacity: int, dtype, probe: TraceProbe):
    probe.note()
    return drafter.init_cache(batch, capacity, dtype)


def _draft_observe(drafter, draft_params, cache, tokens, lengths, *, probe: TraceProbe):
    probe.note()
    return drafter.observe(draft_params, cache, tokens, (), lengths)


def _draft_prefill(
    module, params, drafter, draft_params, tokens, lengths, caches, *, probe: TraceProbe
):
    probe.note()
    return speculation.observed_prefill_chunk(
        module, params, drafter, draft_params, tokens, lengths, caches
    )


def _speculate(
    module, params, drafter, draft_params, state, sampling, limits, steps, stopped, *,
    features, probe: TraceProbe,
):  # fmt: skip
    probe.note()
    return speculation.run_speculation(
        module, params, drafter, draft_params, state, sampling, limits, steps, stopped,
        features=features,
    )  # fmt: skip


jit_init_cache = jax.jit(
    _init_cache, static_argnames=("module", "batch", "capacity", "dtype", "probe")
)
jit_place = jax.jit(
    _place, static_argnames=("maker", "axes", "batch", "capacity", "dtype", "probe")
)
jit_prefill = jax.jit(_prefill, static_argnames=("module", "probe"), donate_argnames="cache")
jit_start = jax.jit(_start, static_argnames=("module", "features", "size", "probe"))
jit_decode = jax.jit(
    _decode, static_argnames=("module", "features", "probe"), donate_argnames="state"
)
jit_latest = jax.jit(loop.latest)
jit_window = jax.jit(_window, static_argnames=("width", "probe"))
jit_init_draft_cache = jax.jit(
    _init_draft_cache, static_argnames=("drafter", "batch", "capacity", "dtype", "probe")
)
jit_draft_observe = jax.jit(
    _draft_observe, static_argnames=("drafter", "probe"), donate_argnames="cache"
)
jit_draft_prefill = jax.jit(
    _draft_prefill, static_argnames=("module", "drafter", "probe"), donate_argnames="caches"
)
jit_speculate = jax.jit(
    _speculate,
    static_argnames=("module", "drafter", "features", "probe"),
    donate_argnames="state",
)
