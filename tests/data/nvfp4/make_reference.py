"""Writes ``reference.npz``: inputs, and what other quantizers make of them, bit for bit.

Each case ``name`` holds ``name/weight`` (bfloat16 as its uint16 bits) and, for each tool, what it
would write to a checkpoint: ``name/modelopt/{weight,weight_scale,weight_scale_2}`` and
``name/compressed-tensors/{weight_packed,weight_scale,weight_global_scale}`` (float8 as uint8 bits),
and ``dequantized``, the tool's own dequantization of that. A case with two weights (``fused``) is
calibrated as one group, the way the tools treat q/k/v and gate/up.

The numbers in the repository come from nvidia-modelopt 0.47.0, compressed-tensors 0.20.1,
llmcompressor 0.14.0.1 and torch 2.13.0 on CPU. Run again with those installed::

    python tests/data/nvfp4/make_reference.py
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parent / "reference.npz"
BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BLOCK = 16


def cases() -> dict[str, list[np.ndarray]]:
    """Float32 inputs by name; each is used in every dtype that can hold it."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    found = {
        "normal": [0.02 * normal((24, 64))],
        "odd_rows": [normal((301, BLOCK))],
        "fused": [0.03 * normal((8, 32)), 0.4 * normal((5, 32))],
    }

    # amax = 6 * 448 / 1024 makes both tools' global scale a power of two; block 0 carries it.
    # Then a block with amax 6 * 2^-5 has the block scale 2^5, and an entry at 2^-5 times a
    # rounding boundary is an exact tie. Neighbours of each boundary are there as well.
    points = [sign * b for b in BOUNDARIES for sign in (1, -1)]
    near = [v * (1 + step) for v in points for step in (-(2**-7), 2**-7, -(2**-10), 2**-10)]
    points = [0.0, -0.0, *points, *near, 5.5, 5.9, 6.0, -6.0, 1e-3, -1e-3]
    ties = np.zeros((-(-len(points) // 15), 2 * BLOCK))
    ties[0, 0] = 6 * 448 / 1024
    for i, value in enumerate(points):
        row, column = divmod(i, 15)
        ties[row, BLOCK + 1 + column] = value / 32
    ties[:, BLOCK] = 6 / 32
    found["ties"] = [ties]

    # Block maxima that fall all over e4m3: exact values, ties between two of them, below the
    # smallest subnormal, and the range where entries saturate because the scale rounded down.
    steps = np.concatenate(
        [2.0 ** np.arange(-13, 9), 1.0625 * 2.0 ** np.arange(-6, 8), np.arange(1, 16) * 2.0**-10]
    )
    scales = (normal((len(steps), BLOCK)) / 4).clip(-1, 1)
    scales[:, 3] = np.where(np.arange(len(steps)) % 2, 1, -1)
    scales *= 6 * steps[:, None] / 1024
    scales[0, :] = 0
    scales[0, 3] = 6 * 448 / 1024
    found["block_scales"] = [scales]

    zeros = 0.1 * normal((6, 4 * BLOCK))
    zeros[:, BLOCK : 2 * BLOCK] = 0.0
    zeros[1, 2 * BLOCK : 3 * BLOCK] = -0.0
    zeros[2:4] = -0.0
    zeros[0, ::3] = -0.0
    found["zeros"] = [zeros]
    found["all_zero"] = [np.zeros((3, 2 * BLOCK))]
    found["huge"] = [1e36 * normal((4, 2 * BLOCK))]
    found["small"] = [1e-29 * normal((4, 2 * BLOCK))]
    found["half_max"] = [65504 * normal((4, 2 * BLOCK)).clip(-1, 1)]
    found["half_small"] = [2.0**-19 * normal((8, 2 * BLOCK))]
    found["wide"] = [normal((16, 2 * BLOCK)) * 2.0 ** rng.integers(-14, 6, (16, 2 * BLOCK))]
    return found


def modelopt(weights: list) -> list[dict]:
    """Calibrates, fuses and exports plain linear layers with ModelOpt."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model = torch.nn.Sequential(*[_linear(w) for w in weights])

    def calibrate(m):
        for layer in m:
            layer(torch.zeros(1, layer.in_features, dtype=layer.weight.dtype))

    mtq.quantize(model, copy.deepcopy(mtq.W4A16_NVFP4_CFG), calibrate)
    if len(model) > 1:
        preprocess_linear_fusion(list(model))
    results = []
    for layer, weight in zip(model, weights, strict=True):
        _export_quantized_weight(layer, weight.dtype)
        stored = {
            "weight": layer.weight.data,
            "weight_scale": layer.weight_scale,
            "weight_scale_2": layer.weight_scale_2,
        }
        tensor = NVFP4QTensor(weight.shape, weight.dtype, stored["weight"])
        dequantized = tensor.dequantize(
            dtype=torch.float32,
            scale=stored["weight_scale"],
            double_scale=stored["weight_scale_2"],
            block_sizes={-1: BLOCK},
        )
        results.append({**stored, "dequantized": dequantized})
    return results


def compressed_tensors(weights: list) -> list[dict]:
    """Observes, fuses and compresses plain linear layers with llmcompressor's parts."""
    import torch
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.lifecycle.initialize import (
        initialize_module_for_quantization,
    )
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from llmcompressor.modifiers.quantization.calibration import (
        initialize_observer,
        observe,
        update_qparams,
    )
    from llmcompressor.observers.fusion import FusionHandler

    scheme = QuantizationScheme(targets=["Linear"], **copy.deepcopy(NVFP4A16))
    layers = [_linear(w) for w in weights]
    for layer in layers:
        initialize_module_for_quantization(layer, scheme)
        initialize_observer(layer, "weight")
    if len(layers) > 1:
        FusionHandler.fuse([(layer.weight_observer, layer) for layer in layers])
    for layer in layers:
        observe(layer, "weight")
    for layer in layers:
        update_qparams(layer, "weight")
    results = []
    for layer in layers:
        names = ("weight", "weight_scale", "weight_global_scale")
        state = {name: getattr(layer, name).data for name in names}
        stored = NVFP4PackedCompressor.compress(state, scheme)
        stored = {k: stored[k] for k in ("weight_packed", "weight_scale", "weight_global_scale")}
        dequantized = dequantize(
            unpack_fp4_from_uint8(stored["weight_packed"], *layer.weight.shape),
            stored["weight_scale"].to(torch.float32),
            args=scheme.weights,
            global_scale=stored["weight_global_scale"],
            dtype=torch.float32,
        )
        results.append({**stored, "dequantized": dequantized})
    return results


def _linear(weight):
    import torch

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def to_numpy(x) -> np.ndarray:
    """Bits of a tensor, in a dtype that an npz file has."""
    import torch

    views = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return x.detach().view(views.get(x.dtype, x.dtype)).numpy()


def main() -> None:
    """Writes :data:`TARGET`."""
    import torch

    tools = {"modelopt": modelopt, "compressed-tensors": compressed_tensors}
    arrays = {}
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    for name, values in cases().items():
        for label, dtype in dtypes.items():
            weights = [torch.tensor(v, dtype=torch.float32).to(dtype) for v in values]
            if not all(w.isfinite().all() for w in weights):
                continue
            if name != "all_zero" and not all(w.any() for w in weights):
                continue
            for i, w in enumerate(weights):
                arrays[f"{name}.{i}.{label}/weight"] = to_numpy(w)
            for tool, run in tools.items():
                if name == "all_zero" and tool == "modelopt":
                    continue  # it divides 0 by 0 and writes NaN scales
                for i, result in enumerate(run(weights)):
                    for key, value in result.items():
                        arrays[f"{name}.{i}.{label}/{tool}/{key}"] = to_numpy(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
