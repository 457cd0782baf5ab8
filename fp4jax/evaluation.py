"""Perplexity: how well a model predicts a given text."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from fp4jax.errors import GenerationError
from fp4jax.model import Model
from fp4jax.progress import Progress

LOGIT_ROWS = 128
"""Positions whose logits are held at once: [batch, LOGIT_ROWS, vocab] in f32."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result of :func:`perplexity`.

    Attributes:
      value: ``exp(nll / tokens)``.
      nll: summed negative natural-log likelihood of the scored tokens.
      tokens: how many were scored.
      windows: forward passes.
    """

    value: float
    nll: float
    tokens: int
    windows: int


def perplexity(
    model: Model,
    tokens: Sequence[int],
    *,
    window: int = 1024,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of a token sequence over sliding windows of a fixed length.

    Each window is one forward pass; every token but the very first is scored once, in the first
    window that reaches it. One shape is compiled, whatever the length of the text.

    Args:
      model: from ``fp4jax.load``.
      tokens: ids of the text, at least two; a tokenizer's beginning-of-sequence token included
        where the model wants one.
      window: tokens a pass, at most the model's context.
      stride: tokens that the next window advances; default half a window, so that scored tokens
        have at least that much context. Equal to ``window``, passes overlap by one token.
      progress: told about "perplexity", in windows.

    Raises:
      GenerationError: too few tokens, an id outside the vocabulary, a window that does not fit the
        context, or logits that are not finite.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size < 2 or not np.issubdtype(ids.dtype, np.integer):
        raise GenerationError("perplexity needs a flat list of at least two token ids")
    vocab = int(model.config.vocab_size)
    if ids.min() < 0 or ids.max() >= vocab:
        raise GenerationError(f"the text has token ids outside the vocabulary, 0 to {vocab - 1}")
    if not 2 <= window <= model.max_context:
        raise GenerationError(
            f"window={window} must be between 2 and the model's context, {model.max_context}"
        )
    stride = max(window // 2, 1) if stride is None else stride
    if not 1 <= stride <= window:
        raise GenerationError(f"stride={stride} must be between 1 and the window, {window}")
    pieces = list(_windows(ids.astype(np.int32), window, stride))
    nll, count = 0.0, 0
    for i, (piece, scored) in enumerate(pieces):
        nll += float(_nll(model.module, model.params, piece, scored))
        count += int(scored.sum())
        if progress is not None:
            progress("perplexity", i + 1, len(pieces))
    if not math.isfinite(nll):
        raise GenerationError(
            "the model's logits are not finite (NaN or infinite); the checkpoint is damaged, or "
            "its activations overflow this dtype: try dtype=float32"
        )
    mean = nll / count
    return Perplexity(math.exp(mean) if mean < 700 else math.inf, nll, count, len(pieces))


def _windows(
    ids: np.ndarray, window: int, stride: int
) -> Iterator[tuple[Int32[np.ndarray, "1 t"], Bool[np.ndarray, "1 t"]]]:
    """Padded windows, and which of their tokens are scored (predicted from the one before)."""
    begin, done = 0, 1
    while done < ids.size:
        end = min(begin + window, ids.size)
        piece = np.zeros((1, window), np.int32)
        piece[0, : end - begin] = ids[begin:end]
        scored = np.zeros((1, window), np.bool_)
        # The window's own first token has nothing before it.
        scored[0, max(done - begin, 1) : end - begin] = True
        yield piece, scored
        done = end
        begin = min(begin + stride, end - 1)


@functools.partial(jax.jit, static_argnames=("module",))
def _nll(
    module: Any,
    params: Any,
    tokens: Int32[Array, "batch time"],
    scored: Bool[Array, "batch time"],
) -> Float32[Array, ""]:
    """Summed negative log-likelihood of the scored tokens."""
    out: Any = module.apply({"params": params}, tokens)
    batch, time = tokens.shape
    rows = min(LOGIT_ROWS, time)
    pad = -(time - 1) % rows
    # Hidden state t predicts token t + 1.
    hidden = jnp.pad(out.hidden[:, :-1], ((0, 0), (0, pad), (0, 0)))
    target = jnp.pad(tokens[:, 1:], ((0, 0), (0, pad)))
    wanted = jnp.pad(scored[:, 1:], ((0, 0), (0, pad)))

    def chunked(x: Array) -> Array:
        return x.reshape(batch, -1, rows, *x.shape[2:]).swapaxes(0, 1)

    def one(args: tuple[Array, Array, Array]) -> Array:
        h, t, m = args
        logits: Any = module.apply({"params": params}, h, method="logits")
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(m, log_z - chosen, 0.0))

    return jnp.sum(jax.lax.map(one, (chunked(hidden), chunked(target), chunked(wanted))))
