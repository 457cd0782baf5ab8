"""What a DFlash drafter's ``config.json`` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp4jax.checkpoints.hf_config import (
    CONFIG_NAME,
    decoder_fields,
    flag,
    mapping,
    real,
    sequence,
    whole,
)
from fp4jax.errors import ConfigError
from fp4jax.layers.candidate_selector import SelectorSizes
from fp4jax.layers.decoder import DecoderConfig
from fp4jax.layers.dynamic_conv import DynamicConvSizes

ATTENTION_KINDS = ("full_attention", "sliding_attention")
CAP = "final_logit_softcapping"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig(DecoderConfig):
    """Sizes of the layers, and what the drafter adds to them.

    Attributes:
      block_size: the anchor and the tokens proposed after it.
      mask_token_id: stands where a token is to be proposed.
      target_layer_ids: layers of the target whose output is the context.
      num_target_layers: layers of the target; None where the checkpoint does not say.
      windows: of each layer, None where it sees everything.
      causal: of each layer, whether a token of the block sees only those before it.
      input_embedding_scale: multiplies the target's embeddings.
      output_multiplier: multiplies the logits.
      final_logit_softcapping: bound of the logits, by tanh; None for none.
      conv: convolutions around attention and MLP; second generation.
      selector: of candidates; likewise.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv: DynamicConvSizes | None = None
    selector: SelectorSizes | None = None


def dflash_config(hf: Mapping[str, Any]) -> DFlashConfig:
    """A first-generation drafter's sizes.

    What concerns drafting is read from ``dflash_config``, else from the top level, where earlier
    checkpoints have some of it.

    Raises:
      ConfigError: a field is missing, has the wrong type, contradicts another, or asks for what
        cannot be served.
    """
    fields = {**decoder_fields(hf), "tie_word_embeddings": False}
    own = _drafting_fields(hf)
    block_size = whole(own, "block_size", 16)
    if block_size < 2:
        raise ConfigError(f"{CONFIG_NAME}: block_size = 1 leaves nothing to propose")
    rotated = {**mapping(hf, "rope_scaling"), **mapping(hf, "rope_parameters"), **hf}
    if rotated.get("partial_rotary_factor", 1) not in (None, 1):
        raise ConfigError(
            f"{CONFIG_NAME}: partial_rotary_factor = {rotated['partial_rotary_factor']!r:.80} is "
            "not supported in a drafter; known: 1"
        )
    sliding = _sliding(hf, fields["num_hidden_layers"])
    window = None
    if any(sliding) and flag(hf, "use_sliding_window", True):
        window = whole(hf, "sliding_window")
    return DFlashConfig(
        **fields,
        block_size=block_size,
        mask_token_id=_mask_token_id(own, fields["vocab_size"]),
        target_layer_ids=_target_layer_ids(own, fields["num_hidden_layers"]),
        num_target_layers=whole(own, "num_target_layers") if "num_target_layers" in own else None,
        windows=tuple(window if slides else None for slides in sliding),
        causal=tuple(flag(own, "is_causal", slides) for slides in sliding),
        input_embedding_scale=real(own, "input_embedding_scale", 1.0),
        output_multiplier=real(own, "output_multiplier", 1.0),
        final_logit_softcapping=real(own, CAP, 1.0) if own.get(CAP) else None,
    )


def dflash2_config(hf: Mapping[str, Any]) -> DFlashConfig:
    """A second-generation drafter's sizes; errors as of :func:`dflash_config`."""
    config, own = dflash_config(hf), _drafting_fields(hf)
    conv = DynamicConvSizes(whole(own, "conv_kernel_size"), whole(own, "conv_group_size"))
    selector = SelectorSizes(whole(own, "selector_rank"), whole(own, "selector_top_k"))
    if config.hidden_size % conv.group:
        raise ConfigError(
            f"{CONFIG_NAME}: hidden_size = {config.hidden_size} is not a multiple of "
            f"conv_group_size = {conv.group}"
        )
    if selector.top_k > config.vocab_size:
        raise ConfigError(
            f"{CONFIG_NAME}: selector_top_k = {selector.top_k} is more than vocab_size = "
            f"{config.vocab_size}"
        )
    return dataclasses.replace(config, conv=conv, selector=selector)


def _drafting_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**hf, **{k: v for k, v in mapping(hf, "dflash_config").items() if v is not None}}
    return {name: value for name, value in stated.items() if value is not None}


def _mask_token_id(own: Mapping[str, Any], vocab_size: int) -> int:
    token = own.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ConfigError(
            f"{CONFIG_NAME}: mask_token_id must be a token id below vocab_size = {vocab_size}, "
            f"found {token!r:.80}"
        )
    return token


def _target_layer_ids(own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The stated ones; else, as in the first checkpoints, spread over the target's layers."""
    stated = sequence(own, "target_layer_ids", int)
    if not stated:
        if "num_target_layers" not in own:
            raise ConfigError(
                f"{CONFIG_NAME}: 'target_layer_ids' is missing, and so is 'num_target_layers'"
            )
        target = whole(own, "num_target_layers")
        if layers == 1:
            return (target // 2,)
        return tuple(round(1 + i * (target - 4) / (layers - 1)) for i in range(layers))
    if min(stated) < 0:
        raise ConfigError(f"{CONFIG_NAME}: target_layer_ids = {list(stated)} holds a negative one")
    return stated


def _sliding(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = sequence(hf, "layer_types", str) or ATTENTION_KINDS[:1] * layers
    if len(types) != layers or not all(kind in ATTENTION_KINDS for kind in types):
        raise ConfigError(
            f"{CONFIG_NAME}: layer_types must be {layers} of {', '.join(ATTENTION_KINDS)}, found "
            f"{list(types)!r:.80}"
        )
    return tuple(kind == ATTENTION_KINDS[1] for kind in types)
