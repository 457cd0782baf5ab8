"""Matching a checkpoint's tensors with a model's keys, from headers alone.

The plan says for each node of the parameter tree which tensors fill it, and accounts for every
tensor of the checkpoint: used exactly once, or skipped for a stated reason. It is made, and every
complaint is raised, before any data is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from fp4jax.checkpoints.accounting import SKIPS, account, conflicts, some_of, tied_skip
from fp4jax.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from fp4jax.checkpoints.keys import Key, Skip
from fp4jax.checkpoints.quantization import HEADS, TRUNKS, QuantizationConfig
from fp4jax.checkpoints.stored import DENSE, DENSE_DTYPES, REMEDY, StoredMatrix, find_matrix
from fp4jax.checkpoints.tensors import TensorFiles, TensorInfo
from fp4jax.errors import CheckpointError, UnsupportedError
from fp4jax.layers.linear import split_weight_name


@dataclasses.dataclass(frozen=True)
class PlannedNode:
    """One node of the parameter tree.

    Attributes:
      path: names from the root of the tree.
      format: "dense", "fp8", or "modelopt" or "compressed-tensors" for an NVFP4 weight.
      vectors: of a vector or a bias, its parts in order; None stands for zeros.
      matrices: of a matrix, ``matrices[expert][shard]``; one row where there are no experts.
      rows: length of each part.
      k: input features, 0 for a vector.
      stacked: whether the node has a leading expert axis.
      parameter: of a tensor that is taken as it is, its shape; () otherwise.
    """

    path: tuple[str, ...]
    format: str
    vectors: tuple[TensorInfo | None, ...] = ()
    matrices: tuple[tuple[StoredMatrix, ...], ...] = ()
    rows: tuple[int, ...] = ()
    k: int = 0
    stacked: bool = False
    parameter: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        if self.parameter:
            return self.parameter
        shape = (sum(self.rows), self.k) if self.k else (sum(self.rows),)
        return (len(self.matrices), *shape) if self.stacked else shape

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor that fills it."""
        if self.matrices:
            every = [m for group in self.matrices for m in group]
            leaves = [t for m in every for t in (m.weight, m.scale, m.global_scale)]
        else:
            leaves = list(self.vectors)
        return tuple(tensor for tensor in leaves if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a checkpoint's tensors become.

    Attributes:
      nodes: of the parameter tree.
      skipped: (tensor, reason) of those left out on purpose.
      tied: whether the embedding is the output head too.
      warnings: contradictions between config and tensors, which the tensors decide.
    """

    nodes: tuple[PlannedNode, ...]
    skipped: tuple[tuple[TensorInfo, str], ...]
    tied: bool
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are used."""
        return sum(node.nbytes for node in self.nodes)


def make_plan(
    files: TensorFiles,
    keys: Sequence[Key],
    quantization: QuantizationConfig,
    *,
    tied: bool = False,
    skips: Iterable[Skip] = (),
) -> Plan:
    """Matches tensors with keys.

    Args:
      files: the checkpoint.
      keys: the model's table; the first one is the embedding.
      quantization: the checkpoint's own statement.
      tied: whether the config ties the output head to the embedding.
      skips: tensors that this architecture leaves out.

    Raises:
      CheckpointError: tensors are missing, left over, or of other sizes than the config's.
      FormatError, UnsupportedError: as :func:`fp4jax.checkpoints.stored.find_matrix`.
    """
    matcher = _Matcher(files, keys)
    nodes, warnings, missing, unforeseen = [], [], [], []
    for key in keys:
        if key.kind == "head":
            head = matcher.find(key.sources[0])
            if head is None or (tied and matcher.repeats_embedding(head)):
                if head is None and not tied:
                    warnings.append(
                        "config.json says tie_word_embeddings = false, but there is no lm_head; "
                        "the embedding is used for the logits"
                    )
                tied = True
                continue
            if tied:
                warnings.append(
                    f"config.json ties the embeddings, but {head.weight.name} is stored and "
                    "differs; it is used for the logits"
                )
            tied = False
        found, lacking = matcher.nodes(key)
        nodes += found
        missing += lacking
        if key.bias is False:
            unforeseen += [t.name for n in found if n.path[-1] == "bias" for t in n.tensors]
    if missing:
        raise CheckpointError(
            f"{files.root}: {len(missing)} tensors that config.json calls for are missing: "
            f"{some_of(missing)}; download the checkpoint again, or use its own config.json"
        )
    used = [tensor for node in nodes for tensor in node.tensors]
    skipped = account(files, used, [*SKIPS, *skips, *tied_skip(tied)])
    stored = [matrix for node in nodes for group in node.matrices for matrix in group]
    warnings += conflicts(stored, quantization)
    if unforeseen:
        warnings.append(
            f"{len(unforeseen)} biases are stored though config.json says that there are none; "
            f"they are used: {some_of(unforeseen)}"
        )
    return Plan(tuple(nodes), skipped, tied, tuple(warnings))


class _Matcher:
    """Finds a key's tensors under the prefix that the checkpoint uses."""

    def __init__(self, files: TensorFiles, keys: Sequence[Key]) -> None:
        self._files = files
        source = keys[0].sources[0]
        self._trunk = next((t for t in TRUNKS if source.startswith(t)), "")
        leaf = source[len(self._trunk) :]
        codes = ("weight", COMPRESSED_TENSORS.codes)
        self._actual = next(
            (t for t in TRUNKS if any(f"{t}{leaf}.{code}" in files for code in codes)), self._trunk
        )
        self._embedding = f"{self._actual}{leaf}"

    def name(self, source: str) -> str:
        """``source`` as the checkpoint spells it."""
        if source in HEADS:
            leaves = ("weight", COMPRESSED_TENSORS.codes)
            named = (h for h in HEADS if any(f"{h}.{leaf}" in self._files for leaf in leaves))
            return next(named, source)
        if self._trunk and source.startswith(self._trunk):
            return self._actual + source[len(self._trunk) :]
        return source

    def find(self, source: str) -> StoredMatrix | None:
        return find_matrix(self._files, self.name(source))

    def repeats_embedding(self, head: StoredMatrix) -> bool:
        """Whether ``head`` holds the embedding's very bytes."""
        embedding = find_matrix(self._files, self._embedding)
        if embedding is None or (embedding.format, embedding.shape) != (head.format, head.shape):
            return False
        if [t.dtype for t in embedding.tensors] != [t.dtype for t in head.tensors]:
            return False
        return all(
            self._files.read(a.name).tobytes() == self._files.read(b.name).tobytes()
            for a, b in zip(embedding.tensors, head.tensors, strict=True)
        )

    def nodes(self, key: Key) -> tuple[list[PlannedNode], list[str]]:
        """The nodes that ``key`` makes, and the tensors that it lacks."""
        target = tuple(key.target.split("/"))
        if key.kind in ("vector", "parameter"):
            name, own = self.name(key.sources[0]), key.kind == "parameter"
            name = name if own else f"{name}.weight"
            if name not in self._files:
                return [], [name]
            info = self._files.info(name)
            _check_vector(info, key.rows)
            if own:
                return [PlannedNode(target, DENSE, (info,), parameter=key.rows)], []
            return [PlannedNode((*target, "weight"), DENSE, (info,), rows=key.rows)], []
        groups, missing = [], []
        for expert in range(key.experts or 1):
            names = [self.name(source.format(expert=expert)) for source in key.sources]
            found = [find_matrix(self._files, name) for name in names]
            for name, matrix in zip(names, found, strict=True):
                if matrix is None:
                    missing.append(f"{name}.weight")
                elif key.bias and matrix.bias is None:
                    missing.append(f"{name}.bias")
            group = tuple(matrix for matrix in found if matrix is not None)
            for matrix, rows in zip(group, key.rows, strict=False) if not missing else ():
                _check_shape(matrix.weight, matrix.shape, (rows, key.k))
            groups.append(group)
        if missing:
            return [], missing
        return _matrix_nodes(key, target, tuple(groups)), []


def _matrix_nodes(
    key: Key, target: tuple[str, ...], groups: tuple[tuple[StoredMatrix, ...], ...]
) -> list[PlannedNode]:
    formats: list[str] = []
    for shard, source in enumerate(key.sources):
        stored = {group[shard].format for group in groups}
        if len(stored) > 1:
            raise UnsupportedError(
                f"{groups[0][shard].weight.file}: {source} is stored as {', '.join(sorted(stored))}"
                ", depending on the expert; all experts of a layer must be stored alike"
            )
        formats += stored
    stacked = key.experts > 0
    if len(set(formats)) == 1:
        nodes = [PlannedNode((*target, "weight"), formats[0], (), groups, key.rows, key.k, stacked)]
    else:
        nodes = [
            PlannedNode(
                (*target, split_weight_name(name)),
                formats[i],
                (),
                tuple((group[i],) for group in groups),
                key.rows[i : i + 1],
                key.k,
                stacked,
            )
            for i, name in enumerate(key.shard_names)
        ]
    biases = tuple(matrix.bias for group in groups for matrix in group)
    if any(bias is not None for bias in biases):
        if stacked:
            raise UnsupportedError(f"{target[-1]}: biases of experts are not supported")
        for bias, rows in zip(biases, key.rows, strict=True):
            if bias is not None:
                _check_vector(bias, (rows,))
        nodes.append(PlannedNode((*target, "bias"), DENSE, biases, rows=key.rows))
    return nodes


def _check_vector(info: TensorInfo, wanted: tuple[int, ...]) -> None:
    _check_shape(info, info.shape, wanted)
    if info.dtype not in DENSE_DTYPES:
        raise CheckpointError(
            f"{info.file}: {info.name} is {info.dtype}; expected one of "
            f"{', '.join(dtype.name for dtype in DENSE_DTYPES)}; {REMEDY}"
        )


def _check_shape(info: TensorInfo, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{info.file}: {info.name} has shape {list(found)}, but the sizes in config.json call "
            f"for {list(wanted)}; use weights and config.json of one model"
        )
