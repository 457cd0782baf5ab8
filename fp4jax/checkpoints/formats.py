"""What tells one vendor's NVFP4 tensors from another's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """Names of the tensors that make up one NVFP4 matrix.

    Attributes:
      name: as ``quant_method`` spells it.
      codes: leaf name of the packed codes.
      block_scale: leaf name of the e4m3 block scales.
      global_scale: leaf name of the f32 global scale.
      global_is_divisor: whether the global scale divides.
    """

    name: str
    codes: str
    block_scale: str
    global_scale: str
    global_is_divisor: bool = False
