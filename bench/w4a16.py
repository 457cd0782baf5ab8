"""W4A16 matmuls on one GPU, in one run: the kernels here, cuBLAS in bf16, and XLA from 4 bits.

``python bench/w4a16.py`` on a machine with an NVIDIA GPU (``--quick``: two of its sizes). For each
size it prints the median time of a call of

* ``triton``: the Pallas kernel, forced (the last column says what the op itself chooses);
* ``xla``: decode to bf16, then a dense dot, all in XLA;
* ``cublas bf16``: a dense dot with a bf16 weight, in cuBLAS;
* ``floor``: the bytes of the repacked weight over the read bandwidth measured here.

Calls of one program depend on each other and go round enough weights to pass twice the L2, so
each weight comes from memory. The result is written to ``bench/results`` as a table and as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from fp4jax import marlin
from fp4jax.ops.w4a16_grouped_matmul import w4a16_grouped_matmul
from fp4jax.ops.w4a16_matmul import explain, w4a16_matmul
from fp4jax.ops.w4a16_matmul.triton import MOST_ROWS

DENSE = ((8192, 8192), (4096, 4096), (28672, 4096), (151936, 4096))
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
GROUPED = ((128, 1536, 2048), (128, 2048, 768))
GROUPED_ROWS = (8, 64, 512, 4096, 32768)
ROTATED_BYTES = 256 << 20
"""Over twice the L2 of any GPU so far."""
PROGRAM_SECONDS = 5e-4
MOST_ROUNDS = 8
CUBLAS = (("xla_gpu_enable_triton_gemm", False),)
"""Compiler options under which a dense dot goes to cuBLAS and not to a kernel of XLA's."""
LARGEST_M_OF_LARGE_N = 256


def median_time(
    call: Callable[..., Array],
    xs: Sequence[Array],
    weights: Sequence,
    estimate: float,
    options: Sequence[tuple[str, bool]] = (),
) -> Callable[[], float]:
    """Compiles a program of many calls in sequence; what it returns measures them.

    Args:
      call: of one element of ``xs`` and one of ``weights``.
      estimate: seconds that it may take.
      options: of the compiler.

    Returns:
      Median seconds of a call, when called.
    """
    rounds = min(len(xs), max(1, math.ceil(PROGRAM_SECONDS / (estimate * len(weights)))))
    call = jax.jit(call)

    def calls(xs, weights):
        found = []
        for x in xs:  # no pair comes twice
            for w in weights:
                if found:  # after the one before it, not beside it or merged with it
                    x, found[-1] = lax.optimization_barrier((x, found[-1]))
                found.append(call(x, w))
        return found

    args = (xs[:rounds], weights)
    program = jax.jit(calls).lower(*args).compile(dict(options))

    def measure() -> float:
        jax.block_until_ready(program(*args))
        times = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(3):
                y = program(*args)
            jax.block_until_ready(y)
            times.append((time.perf_counter() - start) / (3 * rounds * len(weights)))
        return statistics.median(times)

    return measure


def read_bandwidth() -> float:
    """Bytes a second of the better of a sum over, and a copy of, four gigabytes."""
    data = jnp.ones(1 << 30, jnp.uint32)
    best = 0.0
    for call, passes in ((jnp.sum, 1), (lambda a: a + jnp.uint32(1), 2)):
        program = jax.jit(call)
        jax.block_until_ready(program(data))
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([program(data) for _ in range(4)])
            best = max(best, 4 * passes * data.nbytes / (time.perf_counter() - start))
    return best


def copies(make: Callable[[Array], object], nbytes: int) -> list:
    """As many random weights of ``nbytes`` as :data:`ROTATED_BYTES` takes, two at least."""
    count = max(2, math.ceil(ROTATED_BYTES / nbytes))
    return [make(key) for key in jax.random.split(jax.random.key(0), count)]


def inputs(m: int, k: int) -> list[Array]:
    """Enough different rows for every round of :func:`median_time`."""
    return list(jax.random.normal(jax.random.key(m), (MOST_ROUNDS, m, k), jnp.bfloat16))


def dense_dot(x: Array, w: Array) -> Array:
    out = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def bench_dense(n: int, k: int, rows: Sequence[int], bandwidth: float) -> list[dict]:
    nbytes = n * k * 9 // 16
    floor = nbytes / bandwidth
    quantized = copies(lambda key: marlin.random_weight(key, (n,), k), nbytes)
    dense = copies(lambda key: jax.random.normal(key, (n, k), jnp.bfloat16), 2 * n * k)
    kernel = functools.partial(w4a16_matmul, implementation="triton")
    xla = functools.partial(w4a16_matmul, implementation="xla")

    def cases(m: int) -> tuple:
        xs = inputs(m, k)
        estimate = max(1.5 * floor, 2 * m * n * k / 6e14) + 3e-6
        return xs, estimate

    with ThreadPoolExecutor(8) as pool:  # these compile without timing anything
        kernels = {
            m: pool.submit(median_time, kernel, xs, quantized, estimate)
            for m in rows
            if m <= MOST_ROWS  # above, it is never chosen
            for xs, estimate in [cases(m)]
        }
    found = []
    for m in rows:
        xs, estimate = cases(m)
        choice = explain(xs[0], quantized[0]).choice
        row = {"op": "w4a16_matmul", "n": n, "k": k, "m": m, "choice": choice, "floor": floor}
        row["triton"] = kernels[m].result()() if m in kernels else None
        row["xla"] = median_time(xla, xs, quantized, 2 * estimate)()
        row["cublas bf16"] = median_time(dense_dot, xs, dense, 2 * estimate, CUBLAS)()
        check(row)
        found.append(row)
        show(row)
    return found


def bench_grouped(e: int, n: int, k: int, rows: Sequence[int], bandwidth: float) -> list[dict]:
    shards = (n // 2, n // 2) if k > n else (n,)
    w = marlin.random_weight(jax.random.key(0), shards, k, (e,))

    def kernel(x, routing):
        weight, sizes = routing
        return w4a16_grouped_matmul(x, weight, sizes, implementation="triton")

    def case(t: int) -> tuple[float, Callable[[], float]]:
        rng = np.random.default_rng(t)
        # Another routing a call, so that few rows do not find their experts in the L2.
        routings = [np.bincount(rng.integers(0, e, t), minlength=e) for _ in range(16)]
        hit = statistics.mean(int((routing > 0).sum()) for routing in routings)
        floor = hit * n * k * 9 / 16 / bandwidth
        pairs = [(w, jnp.asarray(routing, jnp.int32)) for routing in routings]
        estimate = max(2 * floor, 2 * t * n * k / 4e14) + 5e-6
        return floor, median_time(kernel, inputs(t, k), pairs, estimate)

    with ThreadPoolExecutor(8) as pool:
        cases = list(pool.map(case, rows))
    found = []
    for t, (floor, measure) in zip(rows, cases, strict=True):
        row = {"op": "w4a16_grouped_matmul", "experts": e, "n": n, "k": k, "m": t}
        row |= {"triton": measure(), "floor": floor}
        check(row)
        found.append(row)
        show(row)
    return found


def check(row: dict) -> None:
    """A time under the floor means that the compiler left calls out: no result is better."""
    for name in ("triton", "xla"):
        if row.get(name) is not None and row[name] < 0.9 * row["floor"]:
            raise SystemExit(f"{name} took less than reading its weight: {row}")


NAMES = ("triton", "xla", "cublas bf16", "floor")


def cells(row: dict) -> list[str]:
    size = f"{row['n']}x{row['k']}" + (f" x{row['experts']}" if "experts" in row else "")
    times = ("" if row.get(name) is None else f"{row[name] * 1e6:.1f}" for name in NAMES)
    return [size, str(row["m"]), *times, row.get("choice", "triton")]


HEAD = ("N x K (x experts)", "M", "triton µs", "xla µs", "cublas bf16 µs", "floor µs", "choice")


def show(row: dict) -> None:
    print("  ".join(f"{cell:>12}" for cell in cells(row)), flush=True)


def describe(bandwidth: float) -> dict:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "driver": done.stdout.strip(),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "command": "python " + shlex.join(sys.argv),
        "read bandwidth, TB/s": round(bandwidth / 1e12, 2),
    }


def write(folder: Path, facts: dict, rows: list[dict]) -> Path:
    device = facts["device"].lower().replace(" ", "-")
    path = folder / f"{facts['date']}-{device}.md"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["# W4A16 matmuls, one run", "", *(f"- {key}: {value}" for key, value in facts.items())]
    lines += ["", "| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one dense and one grouped size")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit(f"needs an NVIDIA GPU; JAX {jax.__version__} sees {jax.devices()}")
    bandwidth = read_bandwidth()
    facts = describe(bandwidth)
    print(facts)
    print("  ".join(f"{cell:>12}" for cell in HEAD))
    rows = []
    for n, k in DENSE[:1] if options.quick else DENSE:
        few = [m for m in ROWS if m <= LARGEST_M_OF_LARGE_N or n < 100_000]
        rows += bench_dense(n, k, few, bandwidth)
    for e, n, k in GROUPED[:1] if options.quick else GROUPED:
        rows += bench_grouped(e, n, k, GROUPED_ROWS, bandwidth)
    print(write(options.results, facts, rows))


if __name__ == "__main__":
    main()
