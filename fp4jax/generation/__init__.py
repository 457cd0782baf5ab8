"""Text generation: sampling values, the jitted loop, streaming and batches.

:mod:`fp4jax.generation.loop` has the pure functions; :mod:`fp4jax.generation.api` the calls that
drive them from Python.
"""

from fp4jax.generation.api import batch_generate, generate, generate_tokens, stream_generate
from fp4jax.generation.loop import complete, decode_step, prefill, run_loop
from fp4jax.generation.results import BatchResult, GenerationStats, GenerationStep, TokenResult
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, sample
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.state import Limits, Output

__all__ = [
    "BatchResult",
    "GenerationStats",
    "GenerationStep",
    "Limits",
    "Output",
    "SamplingArrays",
    "SamplingFeatures",
    "SamplingParams",
    "TokenResult",
    "batch_generate",
    "complete",
    "decode_step",
    "generate",
    "generate_tokens",
    "prefill",
    "run_loop",
    "sample",
    "stream_generate",
]
