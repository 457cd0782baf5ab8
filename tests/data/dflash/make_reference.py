"""Runs the public DFlash code (PyPI ``dflash`` 0.1.0, MIT) on the cases of ``dflash_cases``.

In an environment with torch and transformers 5.25: ``pip install --no-deps dflash==0.1.0``, then
``python tests/data/dflash/make_reference.py``. Only what comes out is kept: for each case, and each
proposal of it, hidden states of the block, logits and greedy tokens of the mask positions.

A second-generation model's candidates are unordered there and their ties arbitrary; values drawn
at random have none.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, _crop_to, _make_cache

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "models"))

from dflash_cases import ANCHORS, NAMES, PIECES, config_of, target_of, write_drafter  # noqa: E402


@torch.inference_mode()
def outputs(name: str, folder: Path) -> dict[str, np.ndarray]:
    """What the public code makes of case ``name``."""
    second = config_of(name)["architectures"] == ["DFlash2DraftModel"]
    kind = DFlash2DraftModel if second else DFlashDraftModel
    model = kind.from_pretrained(write_drafter(folder / name, name), dtype=torch.float32).eval()
    target = {key: torch.from_numpy(value) for key, value in target_of(config_of(name)).items()}
    head = torch.nn.Linear(*target["head"].T.shape, bias=False)
    head.weight.data = target["head"]
    scale = config_of(name)["dflash_config"].get("input_embedding_scale", 1.0)
    cache, start = _make_cache(model.config), 0
    found: dict[str, list[np.ndarray]] = {"hidden": [], "logits": [], "tokens": []}
    for piece, anchor in zip(PIECES, ANCHORS, strict=True):
        block = torch.tensor([[anchor] + [model.mask_token_id] * (model.block_size - 1)])
        hidden = model(
            target_hidden=target["taps"][start : start + piece].flatten(1)[None],
            noise_embedding=target["embed"][block] * scale,
            position_ids=torch.arange(start, start + piece + model.block_size)[None],
            past_key_values=cache,
            use_cache=True,
        )
        start += piece
        _crop_to(cache, start)
        logits = model.compute_logits(hidden[:, 1:], head)
        tokens = logits.argmax(-1)
        if second:
            tokens, _, _ = model.propose(hidden[:, 1:], block[:, 0], head, 0.0)
        for key, value in (("hidden", hidden), ("logits", logits), ("tokens", tokens)):
            found[key].append(value[0].numpy())
    return {f"{name}/{key}": np.stack(values) for key, values in found.items()}


def main() -> None:
    """Writes ``reference.npz``."""
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            arrays |= outputs(name, Path(folder))
    np.savez_compressed(HERE / "reference.npz", **arrays)


if __name__ == "__main__":
    main()
