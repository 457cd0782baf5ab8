"""What an engine has made of a beginning that prompts share, as a value to be used again.

A :class:`PromptCache` is the model's own cache after the shared tokens, whatever its layers keep
(keys and values, convolutions, running states), with the id of the engine that made it. Those of
:mod:`fp4jax.generation.prompt_cache` make, save and load one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp4jax.errors import ConfigError, GenerationError, PromptCacheError
from fp4jax.generation.drafts import Draft, check_engine, drafter_id
from fp4jax.generation.opening_tokens import is_open
from fp4jax.generation.requests import LanguageModel, Prompt, Request

CONTEXT_FIELD = "max_position_embeddings"
"""The one size that may differ between the model that made a cache and the one that uses it."""


Axes = tuple[tuple[str, int], ...]
"""Names of leaves, each with one of its axes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PromptCache:
    """What one engine has made of the first tokens of a prompt. One row, for batches of any size.

    Attributes:
      cache: the module's, of one row: its leaves by their paths; slots after the last token mean
        nothing.
      hidden: of the last token, after the final norm: a prompt that ends there goes on from it.
      draft: likewise of a drafter that reads the model's activations; empty where none was given.
      tokens: what the cache holds.
      axes: leaves of ``cache`` that have an axis which counts tokens, and the axis.
      draft_axes: likewise of ``draft``.
      engine_id: of the engine that made it.
      facts: what else must be the same in the model that uses it: names and values.
      drafter: id of the drafter that ``draft`` belongs to.
      prompt: what was cached, as JSON: text, messages, or null for token ids.
    """

    cache: dict[str, Shaped[Array, "1 ..."]]
    hidden: Float[Array, "1 h"]
    draft: dict[str, Shaped[Array, "1 ..."]]
    tokens: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axes: Axes = dataclasses.field(metadata={"static": True})
    draft_axes: Axes = dataclasses.field(metadata={"static": True})
    engine_id: str = dataclasses.field(metadata={"static": True})
    facts: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})
    drafter: str | None = dataclasses.field(metadata={"static": True})
    prompt: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"PromptCache({len(self.tokens)} tokens of engine {self.engine_id})"

    def continued(self, text: str) -> Prompt:
        """The whole prompt that goes on with ``text`` where the cached one ends.

        Text goes on as text, and so does a message at the end of a conversation that is a user's
        or a tool's; after any other message comes a user's.

        Raises:
          GenerationError: token ids were cached.
        """
        prompt = json.loads(self.prompt)
        if prompt is None:
            raise GenerationError(
                "the prompt cache was made of token ids, after which text cannot go on: give "
                "[*prompt_cache.tokens, …], or make it of text or messages"
            )
        if isinstance(prompt, str):
            return prompt + text
        last = prompt[-1]
        if is_open(last):
            return [*prompt[:-1], {**last, "content": last["content"] + text}]
        return [*prompt, {"role": "user", "content": text}]


def model_facts(model: LanguageModel) -> tuple[tuple[str, str], ...]:
    """What a cache depends on beside the weights: architecture, dtype, each field of the config."""
    config = model.config
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return (
        ("architecture", type(model.module).__name__),
        ("dtype", jnp.dtype(model.dtype).name),
        *((f"config.{f.name}", repr(getattr(config, f.name))) for f in fields
          if f.name != CONTEXT_FIELD),
    )  # fmt: skip


def check_maker(
    what: str, facts: Sequence[tuple[str, str]], made_by: str, model: LanguageModel
) -> None:
    """Checks that ``model`` may use a cache.

    Args:
      what: names the cache in messages.
      facts: of the model that made it.
      made_by: id of the engine that made it.
      model: the one to use it.

    Raises:
      PromptCacheError: another architecture, dtype or field of the config, which is named.
      EngineMismatchError: another engine; both ids are named.
    """
    theirs, ours = dict(facts), dict(model_facts(model))
    for name in dict.fromkeys((*ours, *theirs)):
        made, found = (known.get(name, "nothing") for known in (theirs, ours))
        if made != found:
            raise PromptCacheError(
                f"{what} was made with {name} = {made:.80}, but this model has {found:.80}; make "
                "it anew with this model"
            )
    check_engine(f"{what} was made by", made_by, model)


def check_prompt_cache(
    prompt_cache: Any, model: LanguageModel, requests: Sequence[Request], draft: Draft | None
) -> PromptCache:
    """What ``prompt_cache=`` was given, checked against all that it is to serve.

    Raises:
      PromptCacheError, EngineMismatchError: as :func:`check_maker`.
      GenerationError: not a prompt cache, or a prompt that does not begin with its tokens; the
        first position that differs is named.
      ConfigError: a drafter that reads activations of the model that are not in the cache.
    """
    if not isinstance(prompt_cache, PromptCache):
        raise GenerationError(
            f"prompt_cache={prompt_cache!r:.80} is no prompt cache: give what "
            "fp4jax.make_prompt_cache or fp4jax.load_prompt_cache returns"
        )
    check_maker("the prompt cache", prompt_cache.facts, prompt_cache.engine_id, model)
    cached, several = prompt_cache.tokens, len(requests) > 1
    for i, request in enumerate(requests):
        name = f"prompt {i}" if several else "the prompt"
        check_beginning(name, request.prompt, cached)
    if draft is not None and draft.drafter.taps and prompt_cache.drafter != drafter_id(draft):
        holds = "none" if prompt_cache.drafter is None else f"those of {prompt_cache.drafter}"
        raise ConfigError(
            f"the draft, {drafter_id(draft)}, reads the model's activations for every token, and "
            f"the prompt cache holds {holds}; make it anew with draft=, or leave one of them out"
        )
    return prompt_cache


def check_beginning(name: str, prompt: Sequence[int], cached: Sequence[int]) -> None:
    """Checks that ``prompt`` begins with the tokens of a cache.

    Raises:
      GenerationError: it does not.
    """
    if tuple(prompt[: len(cached)]) == tuple(cached):
        return
    same = [a == b for a, b in zip(prompt, cached, strict=False)]
    at = same.index(False) if False in same else len(same)
    here = f"has token {prompt[at]}" if at < len(prompt) else "ends"
    raise GenerationError(
        f"{name} does not begin with the {len(cached)} tokens of the prompt cache: at position "
        f"{at} it {here}, where the cache holds token {cached[at]}; give the whole prompt, cached "
        "part included, or make the prompt cache anew"
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def length_axes(make: Callable[[int], Any]) -> Axes:
    """Which leaves of a cache have an axis that counts tokens, and which axis it is.

    Args:
      make: an empty cache with room for so many tokens.
    """
    less, more = (
        named_leaves(jax.eval_shape(functools.partial(make, capacity))) for capacity in (1, 2)
    )
    found = []
    for name, leaf in less.items():
        grown = [a != b for a, b in zip(leaf.shape, more[name].shape, strict=True)]
        if True in grown:
            found.append((name, grown.index(True)))
    return tuple(found)


def check_layout(what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Checks names, shapes and dtypes of the leaves of a cache.

    Args:
      what: names the cache in messages.
      found: its leaves by name, arrays or what stands for them.
      wanted: likewise.

    Raises:
      PromptCacheError: the first that differs is named.
    """
    for name in dict.fromkeys((*wanted, *found)):
        ours, theirs = (
            f"{leaves[name].dtype.name}{list(leaves[name].shape)}" if name in leaves else "nothing"
            for leaves in (wanted, found)
        )
        if ours != theirs:
            raise PromptCacheError(
                f"{what} has {theirs} for {name}, where this model keeps {ours}; make it anew with "
                "this model"
            )


def fill_rows(saved: Mapping[str, Shaped[Array, "1 ..."]], axes: Axes, empty: Any) -> Any:
    """``empty`` with the beginning of every row filled from one row. Traceable.

    Args:
      saved: leaves of a cache of one row, by name.
      axes: those of them that count tokens.
      empty: a cache of the same model for any number of rows, with room for the tokens that count.

    Raises:
      PromptCacheError: another layout; the leaf is named.
    """
    slots, expected = named_leaves(empty), {}
    for name, slot in slots.items():
        sizes = list(slot.shape)
        sizes[0] = 1
        if name in saved and name in dict(axes):  # however many tokens
            sizes[dict(axes)[name]] = saved[name].shape[dict(axes)[name]]
        expected[name] = jax.ShapeDtypeStruct(tuple(sizes), slot.dtype)
    check_layout("the prompt cache", saved, expected)

    def fill(leaf: Array, slot: Array) -> Array:
        sizes = (slot.shape[0], *map(min, leaf.shape[1:], slot.shape[1:]))
        beginning = leaf[(slice(None), *map(slice, sizes[1:]))]
        # Written into the slot, never handed on as it is: what comes out is donated later.
        return lax.dynamic_update_slice(slot, jnp.broadcast_to(beginning, sizes), (0,) * slot.ndim)

    filled = [fill(saved[name], slot) for name, slot in slots.items()]
    return jax.tree.unflatten(jax.tree.structure(empty), filled)
