"""Making, saving and loading prompt caches.

::

    system = {"role": "system", "content": long_instructions}
    cache = make_prompt_cache(model, tokenizer, [system])
    save_prompt_cache("instructions.safetensors", cache)

    cache = load_prompt_cache("instructions.safetensors", model)
    messages = [system, {"role": "user", "content": "…"}]
    generate(model, tokenizer, messages, prompt_cache=cache)

A file is safetensors: the leaves by their paths in the cache, cut to the tokens that there are,
and what they depend on in the metadata, with a digest of all of it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.checkpoints.tensors import TensorFiles, read_header
from fp4jax.errors import CheckpointError, GenerationError, PromptCacheError
from fp4jax.generation.buckets import bucket
from fp4jax.generation.cached_prompt import (
    Axes,
    PromptCache,
    check_layout,
    check_maker,
    length_axes,
    model_facts,
    named_leaves,
)
from fp4jax.generation.drafts import as_draft, drafter_id
from fp4jax.generation.driving import open_checked
from fp4jax.generation.opening_tokens import is_chat, opening_tokens, prompt_json
from fp4jax.generation.requests import LanguageModel, Prompt, TextTokenizer, make_requests
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.session import PREFILL_CHUNK
from fp4jax.progress import Progress

FORMAT_NAME, FORMAT_VERSION = "fp4jax-prompt-cache", "1"
ANEW = "make the prompt cache anew"
CACHE, DRAFT, HIDDEN, TOKENS = "cache", "draft", "hidden", "tokens"


def make_prompt_cache(
    model: LanguageModel,
    tokenizer: TextTokenizer | None,
    prompt: Prompt,
    *,
    draft: Any = None,
    prompt_cache: PromptCache | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    progress: Progress | None = None,
) -> PromptCache:
    """Runs the model over the beginning of a prompt and keeps what it leaves behind.

    Token ids are cached as they are. Of text and messages those tokens are cached that stay
    whatever comes after, so that any prompt which goes on from them fits: all but the last word of
    a text; likewise of a user's or tool's message at the end of a conversation; and after any other
    message what opens the user's turn.

    Args:
      model: from ``fp4jax.load``.
      tokenizer: likewise; None for token ids.
      prompt: text, token ids or messages.
      draft: whom to cache it for too, as ``draft=`` of :func:`fp4jax.generate`; needed by drafters
        that read the model's activations, and by no other.
      prompt_cache: one of a shorter beginning, to go on from.
      prefill_chunk: tokens fed at once.
      progress: as in :func:`fp4jax.generate`.

    Raises:
      GenerationError: no token that is sure to stay, no room in the context, an id outside the
        vocabulary, or a last message that may go on and is not text.
      Fp4JaxError: as :func:`fp4jax.generate` of ``draft`` and ``prompt_cache``.
    """
    from fp4jax.model import engine_id

    ids: Any = prompt
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise GenerationError("the prompt is text, which needs a tokenizer; give token ids")
        ids = opening_tokens(tokenizer, prompt)
    requests = make_requests(model, None, [ids], SamplingParams(max_tokens=1))
    bound = None if draft is None else as_draft(draft, model)
    if bound is not None and not bound.drafter.taps:
        bound = None  # it is shown the tokens whenever they are used
    session = open_checked(model, requests, bound, None, prompt_cache, prefill_chunk, progress)
    hidden, caches = session.feed()
    cache, drafted = (caches, None) if bound is None else caches
    jax.block_until_ready(hidden)
    return PromptCache(
        cache=named_leaves(cache),
        hidden=hidden,
        draft=named_leaves(drafted),
        tokens=requests[0].prompt,
        axes=length_axes(functools.partial(_empty, model.module, model)),
        draft_axes=(
            () if bound is None else length_axes(functools.partial(_empty, bound.drafter, model))
        ),
        engine_id=engine_id(model.params),
        facts=model_facts(model),
        drafter=None if bound is None else drafter_id(bound),
        prompt=prompt_json(prompt),
    )


def save_prompt_cache(path: str | Path, prompt_cache: PromptCache) -> None:
    """Writes a prompt cache to one file, which is all there or not at all.

    Args:
      path: a safetensors file to write or replace, in a folder that there is.
      prompt_cache: from :func:`make_prompt_cache` or :func:`load_prompt_cache`.

    Raises:
      PromptCacheError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path, p = Path(path).expanduser(), prompt_cache
    count = len(p.tokens)
    tensors: dict[str, np.ndarray] = {
        HIDDEN: np.asarray(p.hidden),
        TOKENS: np.asarray(p.tokens, np.int32),
    }
    for part, tree, axes in ((CACHE, p.cache, p.axes), (DRAFT, p.draft, p.draft_axes)):
        for name, leaf in jax.device_get(tree).items():
            tensors[f"{part}.{name}"] = _resized(leaf, dict(axes).get(name), count)
    metadata = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "engine_id": p.engine_id,
        "facts": json.dumps(dict(p.facts)),
        "axes": json.dumps(dict(p.axes)),
        "draft_axes": json.dumps(dict(p.draft_axes)),
        "drafter": json.dumps(p.drafter),
        "prompt": p.prompt,
    }
    metadata["digest"] = _digest(metadata, tensors)
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        aside.touch()
        allowed = aside.stat().st_mode  # by the user's umask; the library's files are the owner's
        save_file(tensors, aside, metadata=metadata)
        aside.chmod(allowed)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        raise PromptCacheError(f"{path}: cannot be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def load_prompt_cache(path: str | Path, model: LanguageModel) -> PromptCache:
    """Reads a prompt cache that this engine has made, in this process or in any other.

    Everything is checked before any of it is put on the device.

    Args:
      path: what :func:`save_prompt_cache` wrote.
      model: the engine.

    Raises:
      PromptCacheError: no such file, a damaged one, one of another kind, or a cache of a model of
        another architecture, dtype, layout or size, or of more tokens than this one's context;
        what differs is named.
      EngineMismatchError: made by another engine; both ids are named.
    """
    path = Path(path).expanduser()
    metadata, tensors = _read(path)
    what = f"{path}: the prompt cache"
    try:
        facts, axes, draft_axes = (
            tuple(json.loads(metadata[name]).items()) for name in ("facts", "axes", "draft_axes")
        )
        engine, prompt, drafter = (
            metadata["engine_id"], metadata["prompt"], json.loads(metadata["drafter"])
        )  # fmt: skip
        tokens, hidden = tuple(tensors.pop(TOKENS).tolist()), tensors.pop(HIDDEN)
    except (AttributeError, KeyError, ValueError) as error:
        raise PromptCacheError(f"{path}: incomplete ({error!r}); {ANEW}") from error
    check_maker(what, facts, engine, model)
    count, limit = len(tokens), model.max_context
    if count >= limit:
        raise PromptCacheError(
            f"{what} holds {count} tokens, which leaves no room in this model's context of {limit} "
            "(max_position_embeddings); load the model with a longer one"
        )
    cache, draft = _part(tensors, CACHE), _part(tensors, DRAFT)
    empty = jax.eval_shape(functools.partial(_empty, model.module, model, count))
    check_layout(what, cache, named_leaves(empty))
    room = bucket(count, limit=limit)
    return PromptCache(
        cache=_on_device(cache, axes, room),
        hidden=jnp.asarray(hidden),
        draft=_on_device(draft, draft_axes, room),
        tokens=tokens,
        axes=axes,
        draft_axes=draft_axes,
        engine_id=engine,
        facts=facts,
        drafter=drafter,
        prompt=prompt,
    )


def _empty(maker: Any, model: LanguageModel, capacity: int) -> Any:
    """A cache of one row, of a module or a drafter."""
    return maker.init_cache(1, capacity, jnp.dtype(model.dtype))


def _part(tensors: Mapping[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    """Those named ``part.…``."""
    return {
        name.removeprefix(f"{part}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{part}.")
    }


def _resized(leaf: np.ndarray, axis: int | None, size: int) -> np.ndarray:
    """``leaf`` cut or filled with zeros to ``size`` along ``axis``."""
    if axis is None or leaf.shape[axis] == size:
        return np.ascontiguousarray(leaf)
    sizes = [size if i == axis else n for i, n in enumerate(leaf.shape)]
    result = np.zeros(sizes, leaf.dtype)
    kept = tuple(map(slice, map(min, leaf.shape, sizes)))
    result[kept] = leaf[kept]
    return result


def _on_device(leaves: Mapping[str, np.ndarray], axes: Axes, size: int) -> dict[str, jax.Array]:
    return {
        name: jnp.asarray(_resized(leaf, dict(axes).get(name), size))
        for name, leaf in leaves.items()
    }


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a prompt cache's file, which is whole and undamaged."""
    if not path.is_file():
        raise PromptCacheError(f"{path}: no such prompt cache file")
    try:
        infos, metadata = read_header(path, ANEW)
        if metadata.get("format") != FORMAT_NAME:
            raise PromptCacheError(
                f"{path}: not a prompt cache of this package; give a file that save_prompt_cache "
                "or `fp4jax cache-prompt` wrote"
            )
        if metadata.get("version") != FORMAT_VERSION:
            raise PromptCacheError(
                f"{path}: a prompt cache of version {metadata.get('version')!r:.80}, where this "
                f"package reads version {FORMAT_VERSION!r}; {ANEW}"
            )
        files = TensorFiles(path.parent, infos)
        tensors = {name: files.read(name) for name in files.names()}
    except (CheckpointError, OSError) as error:
        raise PromptCacheError(
            str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"
        ) from error
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        raise PromptCacheError(f"{path}: damaged: its content is not what was written; {ANEW}")
    return metadata, tensors


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of all of a file's content."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype.name} {tensor.shape}".encode())
        digest.update(tensor.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
