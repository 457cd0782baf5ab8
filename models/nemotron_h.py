"""Nemotron-H and Nemotron 3: one mixer a layer, of Mamba2, attention, an MLP, or experts.

arXiv 2504.03624 and 2512.20848; names as in Hugging Face ``NemotronHForCausalLM``. Attention has
no rotary embedding: positions come from the recurrence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from fp4jax.architecture import Architecture
from fp4jax.checkpoints.hf_config import CONFIG_NAME, flag, real, sequence, whole
from fp4jax.checkpoints.keys import Key, Skip, head, linear, vector
from fp4jax.errors import ConfigError
from fp4jax.layers.attention import Attention, attention_keys
from fp4jax.layers.cache import KVCache
from fp4jax.layers.decoder import DecoderModel
from fp4jax.layers.mamba2 import Mamba2, Mamba2Sizes, mamba2_keys
from fp4jax.layers.mlp import SquaredReluMLP, squared_relu_mlp_keys
from fp4jax.layers.moe import SparseMoE, sparse_moe_keys
from fp4jax.layers.norms import RMSNorm
from fp4jax.layers.routing import SigmoidRouting

MAMBA, ATTENTION, MLP, MOE = "linear_attention", "full_attention", "mlp", "moe"
LETTERS = (("M", MAMBA), ("*", ATTENTION), ("-", MLP), ("E", MOE))
"""Letters of ``hybrid_override_pattern``."""

OLDER_NAMES = (("mamba", MAMBA), ("attention", ATTENTION))
"""Names that the lists of earlier configs have."""

DRAFTS = (
    Skip(r"((backbone|model)\.)?mtp\..*", "multi-token prediction, which only drafts tokens"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Sizes of a mixture of experts; field names are Hugging Face's where they have one.

    Attributes:
      routing: groups and scale.
      shared: features inside the expert that every token goes to; None where there is none.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_latent_size: int | None
    norm_topk_prob: bool
    routing: SigmoidRouting
    shared: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NemotronHConfig:
    """Sizes of the model. Field names are Hugging Face's.

    Attributes:
      layer_types: ``"linear_attention"`` (Mamba2), ``"full_attention"``, ``"mlp"`` or ``"moe"``, a
        layer each.
      mamba: sizes of the Mamba2 layers; None where there are none.
      experts: of the layers that have them; None likewise.
      use_bias: whether the projections of Mamba2 have biases.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_norm_epsilon: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    mamba: Mamba2Sizes | None
    experts: Experts | None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_conv_bias: bool = True

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_experts_per_tok(self) -> int:
        return self.experts.num_experts_per_tok if self.experts else 0


class NemotronHBlock(nn.Module):
    """``x + mixer(norm(x))``."""

    config: NemotronHConfig
    index: int
    quantized: bool = True

    def setup(self):
        self.norm = new_norm(self.config)
        self.mixer = self.new_mixer()

    @nn.nowrap
    def mixes_tokens(self) -> bool:
        """Whether the mixer is called as those of :class:`~fp4jax.layers.decoder.DecoderBlock`."""
        return self.config.layer_types[self.index] in (MAMBA, ATTENTION)

    def new_mixer(self) -> nn.Module:
        """The one layer of this block."""
        c, kind = self.config, self.config.layer_types[self.index]
        if kind == MAMBA:
            assert c.mamba is not None
            bias = c.use_bias, c.use_conv_bias
            return Mamba2(c.hidden_size, c.mamba, c.layer_norm_epsilon, *bias, self.quantized)
        if kind == ATTENTION:
            return Attention(
                c.hidden_size,
                c.num_attention_heads,
                c.num_key_value_heads,
                c.head_dim,
                rope=None,
                use_bias=c.attention_bias,
                quantized=self.quantized,
            )
        if kind == MLP:
            return SquaredReluMLP(c.hidden_size, c.intermediate_size, c.mlp_bias, self.quantized)
        e = c.experts
        assert e is not None
        return SparseMoE(
            c.hidden_size,
            e.moe_intermediate_size,
            e.n_routed_experts,
            e.num_experts_per_tok,
            e.norm_topk_prob,
            self.quantized,
            gated=False,
            latent_size=e.moe_latent_size,
            sigmoid=e.routing,
            shared_size=e.shared,
            use_bias=c.mlp_bias,
        )

    def __call__(
        self,
        x: Float[Array, "batch time h"],
        positions: Int[Array, "batch time"],
        cache: Any,
        lengths: Int32[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch time h"], Any]:
        if not self.mixes_tokens():
            return x + self.mixer(self.norm(x)), cache
        y, cache = self.mixer(self.norm(x), positions, cache, lengths)
        return x + y, cache


class NemotronH(DecoderModel):
    """The shared frame around :class:`NemotronHBlock`."""

    def block(self, index: int) -> nn.Module:
        return NemotronHBlock(self.config, index, self.quantized)

    def new_norm(self) -> nn.Module:
        return new_norm(self.config)

    @nn.nowrap
    def block_cache(self, index: int, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """A state of fixed size in Mamba2 layers, keys and values in attention, else nothing."""
        c, kind = self.config, self.config.layer_types[index]
        if kind == MAMBA:
            return c.mamba.empty_cache(batch, dtype)
        if kind == ATTENTION:
            return KVCache.zeros(batch, capacity, c.num_key_value_heads, c.head_dim, dtype)
        return None


def new_norm(config: NemotronHConfig) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(config.layer_norm_epsilon, rounded_last=True)


def nemotron_h_config(hf: Mapping[str, Any]) -> NemotronHConfig:
    """The sizes in a ``config.json``.

    Raises:
      ConfigError: a field is missing, has the wrong type or a value that is not served, or
        contradicts another.
    """
    hf = _with_usual_names(hf)
    for name, served in (
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("sliding_window", None),
    ):
        if hf.get(name, served) != served:
            raise ConfigError(
                f"{CONFIG_NAME}: {name} = {hf[name]!r} is not supported; known: {served}"
            )
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    types, kv_heads = _layer_types(hf), whole(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{CONFIG_NAME}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    return NemotronHConfig(
        vocab_size=whole(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size", None if MLP in types else hidden),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=whole(hf, "head_dim", None if hidden % heads else hidden // heads),
        layer_norm_epsilon=real(hf, "layer_norm_epsilon", 1e-5),
        max_position_embeddings=whole(hf, "max_position_embeddings"),
        layer_types=types,
        mamba=Mamba2Sizes.from_hf(hf) if MAMBA in types else None,
        experts=_experts(hf) if MOE in types else None,
        tie_word_embeddings=flag(hf, "tie_word_embeddings", False),
        attention_bias=flag(hf, "attention_bias", False),
        mlp_bias=flag(hf, "mlp_bias", False),
        use_bias=flag(hf, "use_bias", False),
        use_conv_bias=flag(hf, "use_conv_bias", True),
    )


SYNONYMS = (
    ("head_dim", "attention_head_dim"),
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("layers_block_type", "layer_types"),
    ("n_groups", "mamba_n_groups"),
    ("conv_kernel", "mamba_d_conv"),
    ("use_conv_bias", "mamba_conv_bias"),
    ("time_step_limit", "mamba_dt_limit"),
)
"""Fields, and what other configs call them."""


def _with_usual_names(hf: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(hf)
    for usual, other in SYNONYMS:
        if named.get(usual) is None and named.get(other) is not None:
            named[usual] = named[other]
    return named


def _layer_types(hf: Mapping[str, Any]) -> tuple[str, ...]:
    pattern, older = hf.get("hybrid_override_pattern"), dict(OLDER_NAMES)
    listed = tuple(older.get(kind, kind) for kind in sequence(hf, "layers_block_type", str))
    unknown = sorted(set(listed) - {kind for _, kind in LETTERS})
    if unknown:
        known = ", ".join(sorted([*older, *(kind for _, kind in LETTERS)]))
        raise ConfigError(
            f"{CONFIG_NAME}: layers_block_type names {', '.join(unknown)}; known: {known}"
        )
    if pattern is not None:
        kinds = dict(LETTERS)
        if not isinstance(pattern, str) or not set(pattern) <= set(kinds):
            known = ", ".join(f"{letter} ({kind})" for letter, kind in LETTERS)
            others = sorted(set(pattern) - set(kinds)) if isinstance(pattern, str) else []
            raise ConfigError(
                f"{CONFIG_NAME}: hybrid_override_pattern {pattern!r:.80} "
                f"{f'names {others}' if others else 'is no text'}; known: {known}"
            )
        spelled = tuple(kinds[letter] for letter in pattern)
        if listed and listed != spelled:
            raise ConfigError(
                f"{CONFIG_NAME}: hybrid_override_pattern {pattern!r:.80} contradicts "
                "layers_block_type"
            )
        listed = spelled
    if not listed:
        raise ConfigError(
            f"{CONFIG_NAME}: 'hybrid_override_pattern' is missing, and so is 'layers_block_type'"
        )
    count = whole(hf, "num_hidden_layers", len(listed))
    if count != len(listed):
        raise ConfigError(
            f"{CONFIG_NAME}: num_hidden_layers = {count}, but kinds of {len(listed)} layers are "
            "listed"
        )
    return listed


def _experts(hf: Mapping[str, Any]) -> Experts:
    count, chosen = whole(hf, "n_routed_experts"), whole(hf, "num_experts_per_tok")
    latent = hf.get("moe_latent_size")
    # A config without shared experts says so by their number.
    shares = hf.get("n_shared_experts", 1) not in (0, None)
    return Experts(
        n_routed_experts=count,
        num_experts_per_tok=chosen,
        moe_intermediate_size=whole(hf, "moe_intermediate_size"),
        moe_latent_size=None if latent is None else whole(hf, "moe_latent_size"),
        norm_topk_prob=flag(hf, "norm_topk_prob", True),
        routing=SigmoidRouting.from_hf(hf, count, chosen),
        shared=whole(hf, "moe_shared_expert_intermediate_size") if shares else None,
    )


def nemotron_h_keys(config: NemotronHConfig) -> tuple[Key, ...]:
    """Checkpoint keys."""
    c = config
    keys = [linear("embed_tokens", "backbone.embeddings", c.vocab_size, c.hidden_size)]
    for i in range(c.num_hidden_layers):
        target, source = f"layers_{i}", f"backbone.layers.{i}"
        keys.append(vector(f"{target}/norm", f"{source}.norm", c.hidden_size))
        keys += _mixer_keys(c, c.layer_types[i], f"{target}/mixer", f"{source}.mixer")
    keys.append(vector("norm", "backbone.norm_f", c.hidden_size))
    return (*keys, head("lm_head", "lm_head", c.vocab_size, c.hidden_size))


def _mixer_keys(c: NemotronHConfig, kind: str, target: str, source: str) -> tuple[Key, ...]:
    h = c.hidden_size
    if kind == MAMBA:
        assert c.mamba is not None
        biases = {"bias": c.use_bias, "conv_bias": c.use_conv_bias}
        return mamba2_keys(target, source, hidden_size=h, sizes=c.mamba, **biases)
    if kind == ATTENTION:
        return attention_keys(
            target,
            source,
            hidden_size=h,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
        )
    if kind == MLP:
        return squared_relu_mlp_keys(
            target,
            source,
            hidden_size=h,
            intermediate_size=c.intermediate_size,
            bias=c.mlp_bias,
        )
    e = c.experts
    assert e is not None
    return sparse_moe_keys(
        target,
        source,
        hidden_size=h,
        intermediate_size=e.moe_intermediate_size,
        count=e.n_routed_experts,
        gated=False,
        latent_size=e.moe_latent_size,
        choice_bias=True,
        shared_size=e.shared,
        bias=c.mlp_bias,
    )


ARCHITECTURE = Architecture(
    name="NemotronHForCausalLM",
    config=nemotron_h_config,
    model=NemotronH,
    keys=nemotron_h_keys,
    skip=DRAFTS,
)
