"""What a caller may ask of the sampler, checked before any device work."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any, cast

from fp4jax.errors import SamplingError

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends. Field names are mlx-lm's.

    Processors act in this order: logit bias; repetition, presence and frequency penalties;
    temperature; top-k; top-p (of what top-k left, renormalized); min-p. With ``temp=0`` the
    largest biased and penalized logit wins (lowest id on a tie) and top-k, top-p and min-p, which
    can never remove it, have no effect: they are accepted, as in mlx-lm and vLLM.

    Attributes:
      temp: temperature, >= 0; 0 is greedy.
      top_p: in (0, 1]; the smallest set of most likely tokens whose mass reaches it. 1 is off.
      top_k: >= 0; 0 is off. More than the vocabulary is off too.
      min_p: in [0, 1]; drops tokens less likely than this share of the likeliest. 0 is off.
      repetition_penalty: > 0; logits of tokens in the context are divided by it where positive
        and multiplied where negative (CTRL, arXiv 1909.05858). 1 is off.
      repetition_context_size: how many last tokens, prompt included, are that context; None is all
        of them (vLLM and transformers); mlx-lm's default is 20.
      presence_penalty: in [-2, 2]; subtracted once from tokens generated so far.
      frequency_penalty: in [-2, 2]; subtracted for each time a token was generated so far.
      logit_bias: token id to a value that is added; -inf bans a token. Stored as sorted pairs.
      seed: in [0, 2**32); None draws a fresh one. Row i of a batch uses seed + i (mod 2**32).
      logprobs: how many likeliest alternatives to report with each token.
      max_tokens: >= 1.
      stop: strings that end the text; they are not part of it.
      stop_token_ids: ids that end it, besides the end-of-sequence ids of model and tokenizer.
      ignore_eos: go on after end-of-sequence ids; ``stop_token_ids`` still end it.

    Raises:
      SamplingError: a value out of range or a contradiction; names field, value and range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context_size: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int = 0
    max_tokens: int = 256
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("temp", _real("temp", self.temp, low=0.0))
        put("top_p", _real("top_p", self.top_p, low=0.0, high=1.0, open_low=True))
        put("top_k", _whole("top_k", self.top_k))
        put("min_p", _real("min_p", self.min_p, low=0.0, high=1.0))
        put(
            "repetition_penalty",
            _real("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True),
        )
        if self.repetition_context_size is not None:
            size = _whole("repetition_context_size", self.repetition_context_size, low=1)
            put("repetition_context_size", size)
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), low=-2.0, high=2.0))
        put("logit_bias", _bias(self.logit_bias))
        if self.seed is not None:
            put("seed", _whole("seed", self.seed, high=MAX_SEED))
        put("logprobs", _whole("logprobs", self.logprobs))
        put("max_tokens", _whole("max_tokens", self.max_tokens, low=1))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise SamplingError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        banned = {token for token, value in self.bias_pairs if value == -math.inf}
        for token in self.stop_token_ids:
            if token in banned:
                raise SamplingError(
                    f"stop_token_ids holds {token}, which logit_bias[{token}]=-inf can never let "
                    "through; drop one of the two"
                )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` in its stored form."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    @classmethod
    def of(cls, base: SamplingParams | None = None, **options: Any) -> SamplingParams:
        """``base`` (default: all defaults) with ``options`` on top.

        Raises:
          SamplingError: an unknown option (the nearest known one is named) or a bad value.
        """
        known = tuple(field.name for field in dataclasses.fields(cls))
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SamplingError(
                    f"unknown sampling option {name!r}{hint} Known: {', '.join(known)}"
                )
        return dataclasses.replace(base, **options) if base is not None else cls(**options)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises SamplingError where an id or a count does not fit ``vocab_size`` tokens."""
        for name, ids in (
            ("logit_bias", [token for token, _ in self.bias_pairs]),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise SamplingError(
                        f"{name} names token {token}; the vocabulary has ids 0 to {vocab_size - 1}"
                    )
        if self.logprobs > vocab_size:
            raise SamplingError(
                f"logprobs={self.logprobs} must be at most the vocabulary size, {vocab_size}"
            )
        banned = sum(value == -math.inf for _, value in self.bias_pairs)
        if banned >= vocab_size:
            raise SamplingError("logit_bias bans every token of the vocabulary with -inf")


def _real(
    name: str, value: Any, *, low: float, high: float = math.inf, open_low: bool = False
) -> float:
    """``value`` as a finite float within the range."""
    if low == -math.inf and high == math.inf:
        allowed = "a finite number"
    elif high == math.inf:
        allowed = f"a finite number {'>' if open_low else '>='} {low:g}"
    else:
        allowed = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SamplingError(f"{name}={value!r} must be {allowed}")
    number = float(value)
    if not math.isfinite(number) or number > high or number < low or (open_low and number == low):
        raise SamplingError(f"{name}={value!r} must be {allowed}")
    return number


def _whole(name: str, value: Any, *, low: int = 0, high: int | None = None) -> int:
    """``value`` as an int within the range."""
    allowed = f"a whole number >= {low}" if high is None else f"a whole number in [{low}, {high}]"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise SamplingError(f"{name}={value!r} must be {allowed}") from None
    if number < low or (high is not None and number > high):
        raise SamplingError(f"{name}={value!r} must be {allowed}")
    return number


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Sorted (id, value) pairs; each id once."""
    pairs = value.items() if isinstance(value, Mapping) else value
    found: dict[int, float] = {}
    try:
        listed = [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise SamplingError(f"logit_bias={value!r} must map token ids to numbers") from None
    for key, bias in listed:
        token = _whole("logit_bias id", int(key) if _is_digits(key) else key)
        if token in found:
            raise SamplingError(f"logit_bias names token {token} twice")
        if isinstance(bias, numbers.Real) and bias == -math.inf:
            found[token] = -math.inf
        else:
            found[token] = _real(f"logit_bias[{token}]", bias, low=-math.inf)
    return tuple(sorted(found.items()))


def _is_digits(key: Any) -> bool:
    """JSON objects have string keys, so ``{"12": 1.0}`` is taken as well."""
    return isinstance(key, str) and key.isascii() and key.isdigit()


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable):
        raise SamplingError(f"stop={value!r} must be a string or a list of strings")
    strings = tuple(strings)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise SamplingError(f"stop holds {text!r}; stop strings are non-empty strings")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SamplingError(f"{name}={value!r} must be a list of token ids")
    return tuple(dict.fromkeys(_whole(f"{name} entry", token) for token in value))
