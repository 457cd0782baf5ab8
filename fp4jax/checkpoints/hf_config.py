"""Reading ``config.json`` and ``generation_config.json``: fields with their types checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4jax.errors import CheckpointError, ConfigError
from fp4jax.layers.rope import RopeConfig

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no such file and it is not required.

    Raises:
      CheckpointError: the file is missing though required, or is not a JSON object.
    """
    if not path.exists():
        if required:
            raise CheckpointError(f"{path}: missing; a checkpoint folder needs it")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not readable as JSON ({error}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds {type(value).__name__}, not a JSON object; download it again"
        )
    return value


def text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model: those of a multimodal config's ``text_config`` first."""
    return {**hf, **hf["text_config"]} if isinstance(hf.get("text_config"), Mapping) else hf


def architecture_names(hf: Mapping[str, Any]) -> list[str]:
    """The ``architectures`` field, [] where there is none."""
    names = hf.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]


def eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end-of-sequence id that any of the configs names, each once.

    Raises:
      ConfigError: ``eos_token_id`` is neither an id nor a list of ids.
    """
    found: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ConfigError(f"eos_token_id: {token!r} is not a token id")
            found[token] = None
    return tuple(found)


def whole(hf: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer field.

    Raises:
      ConfigError: missing without a default, or not a positive integer.
    """
    value = hf.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{CONFIG_NAME}: {name!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{CONFIG_NAME}: {name!r} must be a positive integer, found {value!r}")
    return value


def real(hf: Mapping[str, Any], name: str, default: float) -> float:
    """A positive number field.

    Raises:
      ConfigError: not a positive number.
    """
    value = hf.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{CONFIG_NAME}: {name!r} must be a positive number, found {value!r}")
    return float(value)


def flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    """A true/false field.

    Raises:
      ConfigError: neither true nor false.
    """
    value = hf.get(name, default)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"{CONFIG_NAME}: {name!r} must be true or false, found {value!r}")
    return value


def mapping(hf: Mapping[str, Any], name: str, where: str = CONFIG_NAME) -> Mapping[str, Any]:
    """An object field; empty where it is missing or null.

    Raises:
      ConfigError: not an object.
    """
    value = hf.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name!r} must be an object, found {value!r:.80}")
    return value


def sequence(
    hf: Mapping[str, Any], name: str, kind: type, where: str = CONFIG_NAME
) -> tuple[Any, ...]:
    """A list field with entries of one type; empty where it is missing or null.

    Raises:
      ConfigError: not a list, or an entry of another type.
    """
    value = hf.get(name)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
        raise ConfigError(
            f"{where}: {name!r} must be a list of {kind.__name__}, found {value!r:.80}"
        )
    return tuple(value)


def decoder_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of :class:`fp4jax.layers.decoder.DecoderConfig`.

    Raises:
      ConfigError: a field is missing, has the wrong type, or contradicts another.
    """
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    kv_heads = whole(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{CONFIG_NAME}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}"
        )
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{CONFIG_NAME}: hidden_act {activation!r} is not supported; known: silu")
    if hf.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"{CONFIG_NAME}: hidden_size = {hidden} is not a multiple of num_attention_heads = "
            f"{heads}, and there is no head_dim"
        )
    return {
        "vocab_size": whole(hf, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": whole(hf, "intermediate_size"),
        "num_hidden_layers": whole(hf, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": whole(hf, "head_dim", hidden // heads),
        "rms_norm_eps": real(hf, "rms_norm_eps", 1e-6),
        "max_position_embeddings": whole(hf, "max_position_embeddings"),
        "rope": RopeConfig.from_hf(hf),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings", False),
        "attention_bias": flag(hf, "attention_bias", False),
        "mlp_bias": flag(hf, "mlp_bias", False),
    }


def sliding_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Attention window of each layer, None where a layer sees all tokens.

    ``layer_types`` decides; without it, layers from ``max_window_layers`` on have the window, and
    none has where ``use_sliding_window`` is false.

    Raises:
      ConfigError: a layer type that is not known, or too few of them.
    """
    layers = whole(hf, "num_hidden_layers")
    if not flag(hf, "use_sliding_window", False):
        return (None,) * layers
    window = whole(hf, "sliding_window")
    types = sequence(hf, "layer_types", str)
    if not types:
        first = whole(hf, "max_window_layers", layers)
        return tuple(window if i >= first else None for i in range(layers))
    known = ("full_attention", "sliding_attention")
    if len(types) != layers or not all(kind in known for kind in types):
        raise ConfigError(
            f"{CONFIG_NAME}: layer_types must be {layers} of {', '.join(known)}, found "
            f"{list(types)!r:.80}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
