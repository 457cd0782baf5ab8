"""The repository's own checkers pass: ruff, mypy, and the checker of engine state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("fp4jax", "models", "tests", "examples", "bench")


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("fp4jax.check_engine_state", *SOURCES),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_checker_passes(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
