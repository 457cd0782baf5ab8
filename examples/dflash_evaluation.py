"""Greedy answers with a drafter and without: whether they are the same, and how much sooner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from dflash_prompts import encode

import fp4jax
from fp4jax.generation import AcceptanceStats
from fp4jax.model import forward


@dataclasses.dataclass(frozen=True)
class Answer:
    """One prompt, answered twice.

    Attributes:
      group: of prompts.
      tokens: of the answer without drafter.
      seconds: for those after the first, without and with drafter.
      steps: how many steps gave 1, 2, … tokens.
      gap: None where both answers are the same; else, where they part, how far the target's logits
        of the two tokens lie apart, over the largest of them.
    """

    group: str
    tokens: int
    seconds: tuple[float, float]
    steps: tuple[int, ...]
    gap: float | None


ROUNDING = 2.0**-6
"""Largest gap that 16-bit activations explain: they have 8 bits, and there are many layers."""


def evaluate(
    target: fp4jax.Model,
    tokenizer: fp4jax.Tokenizer,
    draft: fp4jax.Model,
    groups: Mapping[str, Sequence[str]],
    max_tokens: int,
    say: Callable[[str], None],
) -> list[Answer]:
    """Answers each prompt alone, both ways.

    Raises:
      AssertionError: answers differ by more than a tie within rounding.
    """
    bound = fp4jax.pair_draft(draft, target)
    answers = []
    for group, prompts in groups.items():
        for prompt in prompts:
            ids = encode(tokenizer, prompt)
            # The first call of each kind compiles, and warms up what else there is.
            for _ in range(1 if answers else 2):
                plain, drafted = (
                    fp4jax.generate_tokens(target, ids, max_tokens=max_tokens, draft=which)
                    for which in (None, bound)
                )
            answers.append(
                Answer(
                    group,
                    len(plain.tokens),
                    tuple(
                        (len(result.tokens) - 1) / max(result.stats.generation_tps, 1e-9)
                        if len(result.tokens) > 1
                        else 0.0
                        for result in (plain, drafted)
                    ),
                    drafted.stats.acceptance.histogram,
                    parting(target, ids, plain.tokens, drafted.tokens, max_tokens),
                )
            )
        say(f"evaluation: {len(answers)} prompts")
    return answers


def parting(target, ids, plain, drafted, max_tokens: int) -> float | None:
    """:attr:`Answer.gap`, by the target in f32."""
    if plain == drafted:
        return None
    pairs = list(zip(plain, drafted, strict=False))
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    context = np.zeros((1, len(ids) + max_tokens), np.int32)
    context[0, : len(ids) + at] = [*ids, *plain[:at]]
    exact = target.module.clone(dtype=jnp.dtype(jnp.float32))
    logits = np.asarray(forward(exact, target.params, context)[0, len(ids) + at - 1])
    gap = float(abs(logits[plain[at]] - logits[drafted[at]]) / np.abs(logits).max())
    limit = ROUNDING if target.dtype.itemsize < 4 else 1e-5
    assert gap <= limit, f"answers part at token {at}, where logits are {gap:.2g} apart"
    return gap


def report(answers: Sequence[Answer]) -> tuple[str, dict[str, Any]]:
    """A Markdown table, and its numbers."""
    groups = list(dict.fromkeys(answer.group for answer in answers))
    lines = [
        "| prompts | answers | the same | tokens a step | tokens/s | with drafter | gain |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    numbers = {}
    for name in (*groups, "all"):
        some = [answer for answer in answers if name in (answer.group, "all")]
        histogram = np.sum([answer.steps for answer in some], axis=0)
        acceptance = AcceptanceStats.of(histogram[None])
        later = sum(answer.tokens - 1 for answer in some)
        plain, drafted = (
            later / max(sum(answer.seconds[i] for answer in some), 1e-9) for i in (0, 1)
        )
        same = sum(answer.gap is None for answer in some)
        mean = acceptance.mean_accepted_length
        lines.append(
            f"| {name} | {len(some)} | {same} | {mean:.2f} | {plain:.1f} | {drafted:.1f} | "
            f"{drafted / max(plain, 1e-9):.2f} × |"
        )
        numbers[name] = {
            "answers": len(some),
            "same": same,
            "gaps": [answer.gap for answer in some if answer.gap is not None],
            "mean_accepted_length": mean,
            "histogram": histogram.tolist(),
            "plain_tps": plain,
            "drafted_tps": drafted,
        }
    steps = np.asarray(numbers["all"]["histogram"])
    shares = ", ".join(f"{n}: {share:.0%}" for n, share in enumerate(steps / steps.sum(), 1))
    lines.append(
        f"\nTokens a step, the target's own included (greedy, one prompt at a time): {shares}."
    )
    gaps = numbers["all"]["gaps"]
    if gaps:
        lines.append(
            f"Answers that part do so at ties within rounding: logits at most {max(gaps):.1%} of "
            "the largest apart."
        )
    return "\n".join(lines), {"evaluation": numbers}
