"""Which experts serve a token, and how much of the result is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from fp4jax.checkpoints.hf_config import CONFIG_NAME, real, whole
from fp4jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SigmoidRouting:
    """Routing by one sigmoid an expert (arXiv 2412.19437, section 2.1.2), as Nemotron-H has it.

    Attributes:
      groups: neighbouring experts form this many equal groups.
      top_groups: groups that a token may choose from, those with the two best experts.
      scale: of the shares.
    """

    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], experts: int, top_k: int) -> SigmoidRouting:
        """From ``n_group``, ``topk_group`` and ``routed_scaling_factor``.

        Raises:
          ConfigError: groups that do not divide ``experts``, or that leave fewer than ``top_k``.
        """
        groups, top = whole(hf, "n_group", 1), whole(hf, "topk_group", 1)
        if experts % groups or top > groups:
            raise ConfigError(
                f"{CONFIG_NAME}: n_group = {groups} must divide the {experts} experts and be at "
                f"least topk_group = {top}"
            )
        left = top * (experts // groups)
        if top_k > left:
            raise ConfigError(
                f"{CONFIG_NAME}: num_experts_per_tok = {top_k} is more than the {left} of "
                f"{experts} experts that topk_group = {top} of n_group = {groups} leave"
            )
        return cls(groups, top, real(hf, "routed_scaling_factor", 1.0))


def route(
    logits: Float32[Array, "tokens experts"], top_k: int, normalize: bool
) -> tuple[Int32[Array, "tokens top"], Float32[Array, "tokens top"]]:
    """The ``top_k`` likeliest experts of each token and their share of its output."""
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    if normalize:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def route_by_sigmoid(
    logits: Float32[Array, "tokens experts"],
    bias: Float[Array, " experts"],
    routing: SigmoidRouting,
    top_k: int,
    normalize: bool,
) -> tuple[Int32[Array, "tokens top"], Float32[Array, "tokens top"]]:
    """The ``top_k`` best experts of each token, bias included, and their shares without it.

    The choice is among the experts of the ``top_groups`` groups whose two best experts sum to most.
    """
    scores = jax.nn.sigmoid(logits)
    rating = scores + bias.astype(jnp.float32)
    if routing.top_groups < routing.groups:
        grouped = rating.reshape(rating.shape[0], routing.groups, -1)
        best = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        open_groups = jax.lax.top_k(best, routing.top_groups)[1]
        is_open = jnp.any(open_groups[..., None] == jnp.arange(routing.groups), axis=1)
        rating = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(rating.shape)
    chosen = jax.lax.top_k(rating, top_k)[1]
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if normalize:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + jnp.float32(1e-20))
    return chosen, shares * jnp.float32(routing.scale)


def sort_by_expert(
    chosen: Int32[Array, "tokens top"], experts: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " experts"]]:
    """(token, choice) pairs in order of their expert, and how many each expert got."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    return order, jnp.bincount(flat, length=experts).astype(jnp.int32)
