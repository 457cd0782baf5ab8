"""Drafters with their parameters, and which engine they belong to."""

from __future__ import annotations

import dataclasses
from typing import Any

from fp4jax.errors import ConfigError, EngineMismatchError
from fp4jax.generation.drafting import Drafter
from fp4jax.generation.requests import LanguageModel


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """What ``draft=`` takes in its plainest form.

    Attributes:
      drafter: static.
      params: its tree; None where it has none.
      engine_id: of the engine that it was paired with by :func:`pair_draft`; None drafts for any
        model that it fits.
    """

    drafter: Drafter
    params: Any = None
    engine_id: str | None = None


def as_draft(draft: Any, model: LanguageModel, num_draft_tokens: int | None = None) -> Draft:
    """What ``draft=`` was given, checked against the model it is to draft for.

    Args:
      draft: a loaded draft model (its ``module`` is a :class:`Drafter`), a drafter without
        parameters such as :class:`~fp4jax.generation.prompt_lookup.PromptLookup`, or a
        :class:`Draft`.
      model: the target.
      num_draft_tokens: proposals of a step; the drafter's own number by default.

    Raises:
      ConfigError: not a drafter, or one that does not fit the model or the number.
      EngineMismatchError: paired with another engine.
    """
    if not isinstance(draft, Draft):
        if isinstance(getattr(draft, "module", None), Drafter):
            draft = Draft(draft.module, draft.params)
        elif isinstance(draft, Drafter):
            draft = Draft(draft)
        else:
            raise ConfigError(
                f"draft={draft!r:.80} is no drafter: pass a loaded draft model, or "
                "fp4jax.PromptLookup()"
            )
    if num_draft_tokens is not None:
        if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int):
            raise ConfigError(f"num_draft_tokens={num_draft_tokens!r} must be a whole number")
        if num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens={num_draft_tokens} must be at least 1")
        drafter = draft.drafter.with_block_size(num_draft_tokens + 1)
        draft = dataclasses.replace(draft, drafter=drafter)
    draft.drafter.check_fits(model)
    if draft.engine_id is not None:
        check_engine("the draft was paired with", draft.engine_id, model)
    return draft


def pair_draft(draft: Any, model: LanguageModel, num_draft_tokens: int | None = None) -> Draft:
    """``draft`` for ``model`` and no other: with any other engine it is refused.

    Arguments and errors as in :func:`as_draft`.
    """
    from fp4jax.model import engine_id

    found = as_draft(draft, model, num_draft_tokens)
    return dataclasses.replace(found, engine_id=engine_id(model.params))


def drafter_id(draft: Draft) -> str:
    """Which drafter with which parameters: what its cache can be read by."""
    from fp4jax.model import engine_id

    return f"{type(draft.drafter).__name__} {engine_id(draft.params)}"


def check_engine(what: str, expected: str, model: LanguageModel) -> None:
    """Checks that ``model`` is the engine that something depends on.

    Raises:
      EngineMismatchError: it is not; names both.
    """
    from fp4jax.model import engine_id

    found = engine_id(model.params)
    if found != expected:
        raise EngineMismatchError(
            f"{what} engine {expected}, but this model is engine {found}; make it anew for this one"
        )
