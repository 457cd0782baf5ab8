"""Writing a checkpoint folder: all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from fp4jax.checkpoints.tensors import INDEX_NAME, SINGLE_NAME
from fp4jax.errors import CheckpointError

SHARD_BYTES = 2_000_000_000
"""Bytes of tensors a file, unless told otherwise. This much is held in memory."""


class ShardWriter:
    """Collects tensors and writes a file whenever enough are there.

    Args:
      folder: to write into.
      limit: bytes of tensors that a file holds at most, unless one group alone has more.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._pending: dict[str, np.ndarray] = {}
        self._shards: list[tuple[str, ...]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Takes tensors that stay together in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._size() + size > self._limit:
            self._flush()
        self._pending |= tensors
        self._total += size

    def close(self) -> None:
        """Writes the rest and gives the files their final names."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE_NAME)
            return
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            self._part(i).rename(self._folder / name)
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {
                tensor: name
                for name, shard in zip(names, self._shards, strict=True)
                for tensor in shard
            },
        }
        write_json(self._folder / INDEX_NAME, index)

    def _size(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _part(self, i: int) -> Path:
        return self._folder / f"part-{i}"

    def _flush(self) -> None:
        path = self._part(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        # The library lets the owner alone read it; the folder has what the user's umask allows.
        path.chmod(self._folder.stat().st_mode & 0o666)
        self._shards.append(tuple(self._pending))
        self._pending = {}


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def written_at_once(target: Path) -> Iterator[Path]:
    """A new folder that becomes ``target`` on success and vanishes on any error.

    Raises:
      CheckpointError: ``target`` is not empty, or cannot be written.
    """
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{target}: exists already; remove it or choose another folder")
        made = _make_parents(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error})") from error
    folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir()
        yield folder
        if target.exists():
            target.rmdir()  # it is empty; only POSIX would replace it
        folder.rename(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, (OSError, SafetensorError)):
            raise CheckpointError(f"{target}: cannot be written ({error})") from error
        raise


def _make_parents(target: Path) -> list[Path]:
    """Makes the folders above ``target``; those that were made, innermost first."""
    missing = [parent for parent in target.absolute().parents if not parent.exists()]
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    return missing
