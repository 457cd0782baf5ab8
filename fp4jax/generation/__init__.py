"""Text generation: sampling values, the jitted loop, streaming and batches.

:mod:`fp4jax.generation.loop` has the pure functions, :mod:`fp4jax.generation.speculation` those of
decoding with a drafter; :mod:`fp4jax.generation.api` the calls that drive them from Python.
"""

from fp4jax.generation.api import batch_generate, generate, generate_tokens, stream_generate
from fp4jax.generation.cached_prompt import PromptCache
from fp4jax.generation.drafting import Drafter, Draw, Proposal
from fp4jax.generation.drafts import Draft, pair_draft
from fp4jax.generation.loop import complete, decode_step, prefill, run_loop
from fp4jax.generation.prompt_cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from fp4jax.generation.prompt_lookup import PromptLookup
from fp4jax.generation.results import (
    AcceptanceStats,
    BatchResult,
    GenerationStats,
    GenerationStep,
    TokenResult,
)
from fp4jax.generation.samplers import SamplingArrays, SamplingFeatures, sample
from fp4jax.generation.sampling_params import SamplingParams
from fp4jax.generation.speculation import complete_with_draft, run_speculation, speculative_step
from fp4jax.generation.state import Limits, Output

__all__ = [
    "AcceptanceStats",
    "BatchResult",
    "Draft",
    "Drafter",
    "Draw",
    "GenerationStats",
    "GenerationStep",
    "Limits",
    "Output",
    "PromptCache",
    "PromptLookup",
    "Proposal",
    "SamplingArrays",
    "SamplingFeatures",
    "SamplingParams",
    "TokenResult",
    "batch_generate",
    "complete",
    "complete_with_draft",
    "decode_step",
    "generate",
    "generate_tokens",
    "load_prompt_cache",
    "make_prompt_cache",
    "pair_draft",
    "prefill",
    "run_loop",
    "run_speculation",
    "sample",
    "save_prompt_cache",
    "speculative_step",
    "stream_generate",
]
