"""Reading safetensors checkpoints: one file, or shards with an index.

Headers are read and checked first (a truncated or missing shard is found before any tensor is
touched); data is memory-mapped and copied out one tensor at a time. The header is parsed here
rather than by the ``safetensors`` library because its numpy front end has no bf16 and no fp8;
the format is eight length bytes, a JSON object and raw little-endian data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from fp4jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype(np.uint16),
        "I16": np.dtype(np.int16),
        "U32": np.dtype(np.uint32),
        "I32": np.dtype(np.int32),
        "U64": np.dtype(np.uint64),
        "I64": np.dtype(np.int64),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    }
)
"""safetensors dtype names that this package reads and writes."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is; no data."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype.name}{list(self.shape)} in {self.file.name})"


class TensorFiles:
    """The tensors of one checkpoint folder, by name. Immutable; reads are independent."""

    def __init__(self, root: Path, infos: Mapping[str, TensorInfo]):
        self.root = root
        self._infos = MappingProxyType(dict(infos))

    @classmethod
    def open(cls, path: str | Path) -> TensorFiles:
        """Reads every header of the checkpoint in folder ``path``.

        Raises:
          CheckpointError: no such folder, no weights, damaged index, a shard that the index names
            but the folder lacks, a truncated file, a tensor in two shards or in none.
        """
        root = Path(path)
        if not root.is_dir():
            raise CheckpointError(f"{root}: no such checkpoint folder")
        index = root / INDEX_NAME
        if index.exists():
            return cls(root, _read_sharded(root, index))
        single = root / SINGLE_NAME
        if single.exists():
            return cls(root, read_header(single)[0])
        found = sorted(p.name for p in root.iterdir())
        hint = (
            "it has .bin weights; convert them to safetensors first"
            if any(name.endswith(".bin") for name in found)
            else f"it holds {', '.join(found[:8]) or 'nothing'}"
        )
        raise CheckpointError(f"{root}: neither {SINGLE_NAME} nor {INDEX_NAME}; {hint}")

    def names(self) -> Iterator[str]:
        """Names of all tensors, in file order."""
        return iter(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        """What and where ``name`` is.

        Raises:
          CheckpointError: there is no such tensor.
        """
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.root}: there is no tensor {name}") from None

    def read(self, name: str) -> np.ndarray:
        """The data of ``name`` as a fresh host array (bf16 and fp8 as ``ml_dtypes``)."""
        info = self.info(name)
        try:
            data = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
        except OSError as error:
            raise CheckpointError(f"{info.file}: cannot read {name}: {error}") from error
        if data.size != info.nbytes:
            raise CheckpointError(f"{info.file}: {name} is truncated; download the file again")
        return data.view(info.dtype).reshape(info.shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses a repeated name, of which ``json`` would keep the last."""
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"{max(names, key=names.count)} stands there twice")
    return dict(pairs)


def _read_sharded(root: Path, index: Path) -> dict[str, TensorInfo]:
    try:
        weight_map = json.loads(index.read_text("utf-8"), object_pairs_hook=_unique)["weight_map"]
        items = dict(weight_map).items()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{index}: not a safetensors index ({error!r}); download it again"
        ) from error
    for name, shard in items:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: puts {name} in {shard!r}, which is no file name")
    paths = [root / shard for shard in sorted({shard for _, shard in items})]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(
                f"{path}: named by {index.name} but not in the folder; download it again"
            )
    infos: dict[str, TensorInfo] = {}
    for path in paths:
        for name, info in read_header(path)[0].items():
            if weight_map.get(name) != path.name:
                where = weight_map.get(name, "no file at all")
                raise CheckpointError(
                    f"{path}: holds {name}, which {index.name} puts in {where}; download the "
                    "checkpoint again"
                )
            infos[name] = info
    for name, shard in items:
        if name not in infos:
            raise CheckpointError(
                f"{index}: puts {name} in {shard}, which does not hold it; download both again"
            )
    return infos


def read_header(
    path: Path, remedy: str = "download it again"
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """What one safetensors file holds, and its metadata; reads no data.

    Args:
      path: an existing file.
      remedy: what messages say is to be done about a damaged one.

    Raises:
      CheckpointError: truncated, damaged, or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file; {remedy}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: damaged safetensors header ({error}); {remedy}"
            ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: damaged safetensors header (not an object); {remedy}")
    metadata = header.pop("__metadata__", None) or {}
    infos = {}
    for name, entry in header.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {name}: unusable header entry ({error!r})") from error
        info = TensorInfo(name, path, dtype, shape, 8 + length + begin)
        if end - begin != info.nbytes or begin < 0 or min(shape, default=0) < 0:
            raise CheckpointError(
                f"{path}: {name}: {end - begin} bytes stored for {info}; {remedy}"
            )
        if 8 + length + end > size:
            raise CheckpointError(
                f"{path}: truncated: {name} ends at byte {8 + length + end}, the file at {size}; "
                f"{remedy}"
            )
        infos[name] = info
    return infos, dict(metadata) if isinstance(metadata, dict) else {}
