"""The package as others get it: a wheel from a clean copy, and what importing it costs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

OUTSIDE = """
import sys
from pathlib import Path

import fp4jax
import fp4jax.check_engine_state
import fp4jax.models

home = Path(fp4jax.__file__).parent
assert home == Path(sys.argv[1]) / "fp4jax", home
assert (home / "py.typed").exists()
assert (home / "models" / "llama.py").exists()
model = fp4jax.load_model(sys.argv[2], dtype="float32")
print(fp4jax.generate_tokens(model, [1, 2, 3], max_tokens=4, ignore_eos=True).tokens)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy that holds what a clean clone would, nothing built before."""
    root = tmp_path_factory.mktemp("wheel")
    clone = root / "clone"
    clone.mkdir()
    for name in ("fp4jax", "models"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, clone / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    command = ["wheel", ".", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(root)]
    subprocess.run([sys.executable, "-m", "pip", *command], cwd=clone, check=True)
    (found,) = root.glob("*.whl")
    return found


def test_the_wheel_generates_outside_the_repository(wheel, oracles, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ["install", "--no-deps", "--quiet", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, str(site), str(oracles / "qwen3-ct-nvfp4")],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(ast.literal_eval(done.stdout)) == 4
    names = {path.name for path in site.iterdir()}
    assert "models" not in names and "tests" not in names


def test_importing_the_package_loads_nothing_heavy():
    """Names are imported on first use; what a command alone needs is not loaded before it."""
    script = (
        "import sys, fp4jax\n"
        "heavy = ('flax', 'tokenizers', 'jinja2', 'rich', 'typer', 'gguf', 'safetensors')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_public_name_is_there():
    import fp4jax

    for name in fp4jax.__all__:
        assert getattr(fp4jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conjure'"):
        fp4jax.conjure  # noqa: B018
