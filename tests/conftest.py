"""What every test shares: strict dtype promotion, virtual devices, and where data lies."""

from __future__ import annotations

import os
from pathlib import Path

# Before JAX starts: several CPU devices, so that sharding is tested on any machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# Test processes share a GPU, where there is one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

ORACLES = Path(__file__).parent / "oracles"


def pytest_collection_modifyitems(config, items):
    """Tests marked ``gpu`` run where there is an NVIDIA GPU and say why they do not elsewhere."""
    del config
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; this machine's devices are CPUs")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def executables_given_back():
    """Compiled functions go after each file of tests.

    Each keeps memory maps of its own, and where they run out (65,530 a process by default) the
    compiler ends with a segmentation fault.
    """
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def strict_promotion():
    """No implicit dtype promotion anywhere."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def oracles() -> Path:
    """Folder of small checkpoints written by other quantizers, with reference outputs."""
    return ORACLES
