"""How one matrix is stored in a checkpoint, told from its tensors' headers."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from fp4jax.checkpoints.compressed_tensors import COMPRESSED_TENSORS
from fp4jax.checkpoints.formats import WeightFormat
from fp4jax.checkpoints.modelopt import MODELOPT
from fp4jax.checkpoints.tensors import TensorFiles, TensorInfo
from fp4jax.errors import CheckpointError, FormatError
from fp4jax.fp8 import E4M3, validate_fp8
from fp4jax.nvfp4 import BLOCK_SIZE, NVFP4Weight, validate

DENSE = "dense"
FP8 = "fp8"
FP8_SCALE = "weight_scale"
DENSE_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))
REMEDY = "download the file again, or quantize the model anew"


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """One matrix of a checkpoint; no data.

    Attributes:
      module: name of the module that owns it.
      format: "modelopt" or "compressed-tensors" (both NVFP4), "fp8" or "dense".
      weight: its codes or values.
      scale: block scales, or FP8's scales; None where dense.
      global_scale: of NVFP4.
      bias: None where there is none.
    """

    module: str
    format: str
    weight: TensorInfo
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None
    bias: TensorInfo | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [N, K]."""
        if self.format in (DENSE, FP8):
            return self.weight.shape
        return (*self.weight.shape[:-1], 2 * self.weight.shape[-1])

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every tensor that it is made of."""
        every = (self.weight, self.scale, self.global_scale, self.bias)
        return tuple(tensor for tensor in every if tensor is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return sum(tensor.nbytes for tensor in self.tensors)


def find_matrix(files: TensorFiles, module: str) -> StoredMatrix | None:
    """How ``module``'s matrix is stored; None where there is no tensor of it.

    Raises:
      CheckpointError: a scale is missing, or a tensor's dtype fits no format.
      FormatError: shapes of codes and scales do not fit, or K is no multiple of 16.
    """

    def get(leaf: str) -> TensorInfo | None:
        name = f"{module}.{leaf}"
        return files.info(name) if name in files else None

    packed, weight, bias = get(COMPRESSED_TENSORS.codes), get("weight"), get("bias")
    if packed is not None:
        if weight is not None:
            raise CheckpointError(
                f"{packed.file}: {packed.name} stands beside {weight.name}, so it is not clear "
                f"which is meant; {REMEDY}"
            )
        return _quantized(files, module, COMPRESSED_TENSORS, packed, bias)
    if weight is None:
        leaves = (
            MODELOPT.block_scale,
            MODELOPT.global_scale,
            COMPRESSED_TENSORS.global_scale,
        )
        for orphan in filter(None, map(get, leaves)):
            raise CheckpointError(f"{orphan.file}: {orphan.name} has no weight beside it; {REMEDY}")
        return None
    if weight.dtype == np.uint8:
        return _quantized(files, module, MODELOPT, weight, bias)
    if weight.dtype == E4M3:
        return _fp8(files, module, weight, bias)
    if weight.dtype not in DENSE_DTYPES:
        raise CheckpointError(
            f"{weight.file}: {weight.name} is {weight.dtype}; expected NVFP4 (uint8), FP8 or "
            f"one of {', '.join(dtype.name for dtype in DENSE_DTYPES)}; {REMEDY}"
        )
    for leaf in (MODELOPT.block_scale, MODELOPT.global_scale):
        if (scale := get(leaf)) is not None:
            raise CheckpointError(
                f"{scale.file}: {scale.name} stands beside an unquantized {weight}; the weight was "
                f"written with another dtype than its scales say; {REMEDY}"
            )
    return StoredMatrix(module, DENSE, weight, bias=bias)


def _quantized(
    files: TensorFiles,
    module: str,
    form: WeightFormat,
    codes: TensorInfo,
    bias: TensorInfo | None,
) -> StoredMatrix:
    found = []
    for leaf, what in ((form.block_scale, "block scale"), (form.global_scale, "global scale")):
        name = f"{module}.{leaf}"
        if name not in files:
            raise CheckpointError(
                f"{codes.file}: {codes.name} is NVFP4 but its {what} {name} is missing; {REMEDY}"
            )
        found.append(files.info(name))
    scale, global_scale = found
    if codes.dtype != np.uint8 or len(codes.shape) != 2:
        raise FormatError(f"{codes.file}: {codes} must be uint8 [N, K/2]; {REMEDY}")
    n, k = codes.shape[0], 2 * codes.shape[1]
    if k % BLOCK_SIZE:
        raise FormatError(
            f"{codes.file}: {codes} has K = {k}, which is not a multiple of {BLOCK_SIZE}; "
            "quantize the model with blocks of 16, or leave this layer out"
        )
    if scale.dtype != E4M3 or scale.shape != (n, k // BLOCK_SIZE):
        raise FormatError(
            f"{scale.file}: {scale} must be float8_e4m3fn [{n}, {k // BLOCK_SIZE}] to fit {codes}; "
            f"{REMEDY}"
        )
    if global_scale.dtype != np.float32 or global_scale.shape not in ((), (1,)):
        raise FormatError(f"{global_scale.file}: {global_scale} must be one float32; {REMEDY}")
    return StoredMatrix(module, form.name, codes, scale, global_scale, bias)


def _fp8(
    files: TensorFiles, module: str, values: TensorInfo, bias: TensorInfo | None
) -> StoredMatrix:
    name = f"{module}.{FP8_SCALE}"
    if name not in files:
        raise CheckpointError(
            f"{values.file}: {values.name} is FP8 but its scale {name} is missing; {REMEDY}"
        )
    if len(values.shape) != 2:
        raise FormatError(f"{values.file}: {values} must be [N, K]; {REMEDY}")
    scale, n = files.info(name), values.shape[0]
    if scale.shape not in ((), (1,), (n,), (n, 1), (1, 1)) or scale.dtype not in DENSE_DTYPES:
        raise FormatError(
            f"{scale.file}: {scale} must be one float or one a row, [{n}, 1], to fit {values}; FP8 "
            "with a scale a block is not supported"
        )
    return StoredMatrix(module, FP8, values, scale, bias=bias)


def read_scales(files: TensorFiles, matrix: StoredMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Block scales and global scale of an NVFP4 matrix, on the host."""
    assert matrix.scale is not None and matrix.global_scale is not None
    return files.read(matrix.scale.name), files.read(matrix.global_scale.name).reshape(())


def check_matrix(files: TensorFiles, matrix: StoredMatrix) -> None:
    """Reads what can be invalid in a matrix and refuses it; nothing touches a device.

    Raises:
      FormatError: a NaN or negative block scale, a zero, NaN or infinite global or FP8 scale, or
        NaN among FP8 values.
    """
    if matrix.format == DENSE:
        return
    if matrix.format == FP8:
        values, scale = read_fp8(files, matrix)
        assert matrix.scale is not None
        validate_fp8(None, scale, f"{matrix.scale.file}: {matrix.scale.name}")
        validate_fp8(values, scale, f"{matrix.weight.file}: {matrix.weight.name}")
        return
    scale, global_scale = read_scales(files, matrix)
    assert matrix.scale is not None and matrix.global_scale is not None
    if not np.isfinite(global_scale) or global_scale <= 0:
        raise FormatError(
            f"{matrix.global_scale.file}: {matrix.global_scale.name} is {global_scale}; a global "
            f"scale is finite and positive: {REMEDY}"
        )
    # Stands for the codes, whose every value is valid: a view of one byte, no memory.
    codes = np.broadcast_to(np.zeros((), np.uint8), matrix.weight.shape)
    validate(_host(matrix, codes, scale, global_scale), f"{matrix.scale.file}: {matrix.scale.name}")


def read_nvfp4(files: TensorFiles, matrix: StoredMatrix) -> NVFP4Weight:
    """An NVFP4 matrix as host arrays."""
    scale, global_scale = read_scales(files, matrix)
    return _host(matrix, files.read(matrix.weight.name), scale, global_scale)


def read_fp8(files: TensorFiles, matrix: StoredMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Values and scale of an FP8 matrix, on the host, the scale as it is stored."""
    assert matrix.scale is not None
    return files.read(matrix.weight.name), files.read(matrix.scale.name)


def _host(matrix: StoredMatrix, codes: Any, scale: Any, global_scale: Any) -> NVFP4Weight:
    return NVFP4Weight(codes, scale, global_scale, matrix.format == COMPRESSED_TENSORS.name)
